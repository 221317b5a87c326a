"""A script's habits, bad input and ranks that disagree: what is told, on every rank, without a hang."""

from __future__ import annotations

import re

import pytest

from dgc_horovod import __version__
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module", params=["gloo", pytest.param("mpi", marks=[pytest.mark.mpi, pytest.mark.slow])])
def ranks(request):
    return run_ranks(2, ["messages.script_habits", "messages.disagreements"], request.param)


def test_script_habits(ranks):
    found = [rank["messages.script_habits"] for rank in ranks]
    assert found[0]["fingerprint"] == found[1]["fingerprint"]
    assert found[0]["broadcast moved weights"] == 0
    assert found[0]["lr"] == pytest.approx(0.005) and found[0]["momentum shown"] == 0.9 and found[0]["is SGD"]
    assert found[0]["stock momentum"] == 0.9


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("wrap twice", "already wrapped"),
        ("add_param_group", "before wrapping|first, then wrap"),
        ("adasum", "Average or hvd.Sum"),
        ("predivide", "must be a positive number, got 0.0; leave it at 1.0"),
        ("predivide, a text", "ConfigError: gradient_predivide_factor must be a positive number, got '2'"),
        ("passes, a text", "ConfigError: backward_passes_per_step must be a whole number >= 1, got '2'"),
        ("duplicate names", "repeated names: a"),
        ("missing names", "no name in named_parameters"),
        ("not called", r"Compression.dgc\(density=0.001\)"),
        ("dampening", "dampening=0"),
        ("zero_grad between", "before step"),
        ("gradients removed", r"was removed between backward\(\) and step\(\)"),
        ("stock given ours", "dgc_horovod.torch import DistributedOptimizer.*dgcrun"),
        ("epoch unknown", "steps_per_epoch"),
        ("arguments swapped", "second argument is named_parameters"),
        ("model for optimizer", "must be a torch.optim.Optimizer, got Sequential"),
        ("step twice", "no backward pass"),
        ("unscaled too early", r"optimizer.synchronize\(\) before scaler.unscale_"),
        ("scaler not passed", "pass grad_scaler=scaler"),
        ("loaded too early", "call it after step"),
        ("unfrozen later", "'0.weight' did not require a gradient"),
    ],
)
def test_error_messages(ranks, case, words):
    for rank in ranks:
        assert re.search(words, rank["messages.script_habits"]["errors"][case]), rank


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("density", "config.density: rank 0 has 0.01, rank 1 has 0.02"),
        ("rule", "config.rule: rank 0 has 'gaussian', rank 1 has 'exact'"),
        ("scaler", "grad_scaler: rank 0 has True, rank 1 has False"),
        ("groups", "bucket boundaries: rank 0 has"),
        ("compression", "compression: rank 0 has dgc, rank 1 has NoneCompressor"),
        ("shapes", "shapes: rank 0 has 0.weight (65, 32), rank 1 has 0.weight (64, 32)"),
        ("names", "names: rank 0 has 0.weight, rank 1 has other.0.weight"),
        ("tensor count", "tensor count: rank 0 has 4, rank 1 has 2"),
        ("passes", "backward_passes_per_step: rank 0 has 1, rank 1 has 2"),
        ("optimizer", "optimizer: rank 0 has Adagrad, rank 1 has RMSprop"),
        ("version", f"version: rank 0 has {__version__}, rank 1 has 0.0"),
        ("epoch", "check that every rank sets the same epoch"),
    ],
)
def test_ranks_that_disagree_all_raise_the_same(ranks, case, words):
    texts = [rank["messages.disagreements"][case] for rank in ranks]
    for text in texts:
        assert text.startswith("RankMismatch:") and words in text, text
    if case != "epoch":
        assert texts[0] == texts[1]


@pytest.mark.ranks(2, last=1)
def test_missing_rank_is_an_error_not_a_hang():
    ranks = run_ranks(2, ["messages.missing_rank"], timeout=90, environment={"DGC_TIMEOUT": "3"})
    found = ranks[0]["messages.missing_rank"]
    assert found["error"].startswith("CollectiveTimeout: rank 0 of 2 waited 3 s for dgc."), found
    assert found["seconds"] < 7
