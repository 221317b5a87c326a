"""Errors of the TensorFlow adapter: the same on every rank, with what to do; nothing hangs."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

from tests.helpers.metrics_file import check_metrics_file
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel
REFUSED = {
    "twice": "already a DistributedOptimizer",
    "not called": "Compression.dgc(density=0.001)",
    "adasum": "op must be hvd.Average or hvd.Sum",
    "predivide": "goes with op=hvd.Average only",
    "passes": "backward_passes_per_step must be a whole number >= 1, got 0",
    "passes twice": "leave backward_passes_per_step at 1",
    "amsgrad": "use amsgrad=False",
    "xla": "pass jit_compile=False",
    "scaler outside": "DistributedOptimizer(LossScaleOptimizer(optimizer))",
    "positional": "pass the compression as compression=...",
    "torch's": "import Compression from dgc_horovod.tensorflow",
    "horovod's": "wrap the Keras optimizer itself",
    "tape twice": "already a DistributedGradientTape",
    "string": "must be a Keras 3 optimizer",
}


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(
        2, [f"keras_messages.{case}" for case in ("refused", "disagreement", "other_epochs", "spoilt_weights")]
    )


def test_what_is_refused(ranks):
    for found in (found["keras_messages.refused"] for found in ranks):
        assert found.keys() == REFUSED.keys()
        for name, text in REFUSED.items():
            assert text in found[name], f"{name}: {found[name]}"


def test_ranks_that_disagree_hear_the_same(ranks):
    first, second = (found["keras_messages.disagreement"] for found in ranks)
    assert first == second
    assert "RankMismatch" in first["density"] and "rank 0 has density=0.05, rank 1 has density=0.1" in first["density"]
    assert "compression: rank 0 has DGCConfig, rank 1 has NoneCompressor" in first["choice"]
    assert "rank 0 has FP16Compressor, rank 1 has NoneCompressor" in first["fp16"]
    assert "variable count: rank 0 has 8, rank 1 has 2" in first["model"]
    assert "density=0.05, rank 1 has density=0.1" in first["tape"]
    assert "optimizer: rank 0 has Adagrad, rank 1 has RMSprop" in first["optimizer"]
    assert "refused: rank 0 has the metrics file" in first["metrics"] and "rank 1 has nothing" in first["metrics"]


def test_ranks_in_other_epochs_hear_it(ranks):
    for mode in ("eager", "graph"):
        for found in ranks:
            assert "check that every rank sets the same epoch" in found["keras_messages.other_epochs"][mode]


def test_weights_that_are_not_finite_are_named(ranks):
    """Gradients were blamed, and every step was skipped to the end."""
    first, second = (found["keras_messages.spoilt_weights"] for found in ranks)
    for found in (first, second):
        assert re.match(r"NotFinite: step 0: _MyAdafactor has made the weights of '\S*/kernel' that are", found["made"])
        assert re.match(r"NotFinite: step 0: the weights of '\S*/kernel' are not finite, and so gr", found["had"])
        assert re.search(r"the weights of '\S*/kernel' are not finite on rank \d, and so gradients", found["local"])
        assert "finite on the weights" not in found["local"]
        assert found["refused"].startswith("UnsupportedUse: Adafactor of Keras divides by")
        assert not found["sent whole"] and not found["steps alone"]
    assert re.search(r"step 0: the weights of '\S*/kernel' are not finite, and so gradients are not", first["told"])
    assert re.search(r"step 0: the weights of 'Variable\S*' are not finite, and so gradients are not", first["tape"])
    assert "stock Horovod stays" in first["chosen"] and "Adafactor" in first["chosen"]


@pytest.mark.slow
def test_a_set_of_ranks(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    ranks = run_ranks(2, ["keras_messages.process_sets"], environment={"DGC_METRICS_FILE": str(metrics)}, fresh=True)
    check_metrics_file(metrics, "dgc")
    first, second = (found["keras_messages.process_sets"] for found in ranks)
    assert first["selected"] > 0 and first["steps"] == 8
    looked_at = {"gradient_norm", "residual_norm", "residual_ratio", "staleness_mean", "staleness_99"}  # of a step
    assert second.keys() == first.keys() - looked_at and not any(second.values())


@pytest.mark.slow
def test_a_rank_that_stays_away():
    first, second = run_ranks(2, ["keras_messages.missing_rank"], environment={"DGC_TIMEOUT": "3"}, fresh=True)
    first, second = first["keras_messages.missing_rank"], second["keras_messages.missing_rank"]
    assert first["said"].startswith("CollectiveTimeout: rank 0 of 2 waited 3 s") and first["seconds"] < 7
    assert "Horovod has" in second["said"] and second["seconds"] < 15


@pytest.mark.ranks(2, last=1)
def test_uneven_data_with_join():
    """Horovod's background loop had ended with "unordered_map::at"."""
    first, second = run_ranks(2, ["keras_messages.join"], environment={"DGC_TIMEOUT": "5"}, last=True)
    first, second = first["keras_messages.join"], second["keras_messages.join"]
    assert first["last, none"] == second["last, none"] == 1 and first["last, dgc"] == second["last, dgc"]
    assert "UnsupportedUse: hvd.join(): another rank did not call it" in first["said"] and first["seconds"] < 15
    assert "give every rank the same number of steps" in first["said"] and "or use compression none" in first["said"]
    expected = ("has fewer steps", "is in hvd.join()", "Horovod has")  # whichever rank's time is over first
    assert any(words in second["said"] for words in expected), second["said"]
    assert second["seconds"] < 15
