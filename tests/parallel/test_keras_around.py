"""Callbacks, broadcast, saved models, checkpoints and elastic state under Keras 3."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, [f"keras_around.{case}" for case in ("broadcast", "schedules", "saved", "state")])


def test_broadcast(ranks):
    first, second = (dict(found["keras_around.broadcast"]) for found in ranks)
    assert len(first.pop("forgotten")) == 1 and second.pop("forgotten") == []
    assert first == second, "the ranks began differently and must end alike"
    assert first["dtypes"] == [1.0] * 6 and first["none, rate"] == first["dgc, rate"] == pytest.approx(1e-3)
    assert first["local is kept"] and first["not forgotten"] == []
    errors = first["errors"]
    assert "takes variables" in errors["arrays"] and "root_rank must be in [0, 2), got 7" in errors["root"]
    assert "variables: rank 0 has 0 (2,) float32, rank 1 has 0 (3,) float32" in errors["other shapes"]


def test_learning_rates_and_metrics(ranks):
    found = ranks[0]["keras_around.schedules"]
    assert found["warm-up"] == pytest.approx([0.02 + 0.02 * (i + 1) / 16 for i in range(16)])
    assert found["history"] == ranks[1]["keras_around.schedules"]["history"] and len(found["history"]["lr"]) == 2
    assert found["staircase"] == pytest.approx([0.04] * 8 + [0.02] * 8)
    assert found["decay"][:9] == pytest.approx([0.04] * 9)
    assert found["decay"][-1] == pytest.approx(0.04 * 0.1 ** (2 + 7 / 8 - 1))
    assert found["velocity"] < 1e-4
    # two epochs of warm-up, of which the first sends 25%, 6.25% or less, and one at 1%
    assert 0.05 < found["selected"] < 0.2
    assert "the epoch is not known" in found["errors"]["no epoch"]
    assert "initial_lr must be a positive number, got -1.0" in found["errors"]["rate"]


def test_saved_models(ranks):
    first, second = (dict(found["keras_around.saved"]) for found in ranks)
    assert len(first.pop("said")) == 1 and second.pop("said") == [], "one rank says it"
    assert first == second
    assert first["warnings"] == [] and first["same weights"]
    assert first["stock"] == ["keras.src.optimizers.adam", 8] and first["ours"] == [8, True]
    assert first["dense resumes exactly"]
    assert first["compressed takes the velocity over"] < 1e-5
    assert first["sgd goes on as if not saved"] < 1e-5 and first["adam goes on as if not saved"] < 1e-5


def test_a_restored_checkpoint_empties_the_residual(ranks):
    found = ranks[0]["keras_around.saved"]
    assert found["restored"] and len(found["said"]) == 1
    assert "the optimizer is at iteration 8" in found["said"][0]


def test_elastic_state(ranks):
    first, second = (found["keras_around.state"] for found in ranks)
    assert all(found["moved"] and found["restored"] for found in (first, second))
    assert (first["batch"], second["batch"]) == (3, 4)
    assert first["synced"] == second["synced"] and first["synced batch"] == second["synced batch"] == 3
    assert first["iterations"] == second["iterations"]
    assert first["accumulators"] and second["accumulators"]
    assert first["disagree"] == second["disagree"]
    assert first["flushed"] == second["flushed"] == [True] * 4
    assert "config: rank 0 has density=0.1, rank 1 has density=0.2" in first["disagree"]
