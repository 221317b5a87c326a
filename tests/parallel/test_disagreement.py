"""Ranks that disagree all raise the same error, and where one stays away nothing hangs: alike on all adapters."""

from __future__ import annotations

import time
from typing import Any

import pytest

from dgc_horovod import WarmupSchedule
from tests.helpers.adapters import Adapter, on_adapters
from tests.helpers.errors import error_of, error_told, stay_away
from tests.helpers.on_ranks import same_on_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
OPTIMIZERS = "optimizer: rank 0 has Adagrad, rank 1 has RMSprop"
SAID = {
    ("Horovod", "density"): "config.density: rank 0 has 0.01, rank 1 has 0.02",
    ("Horovod", "rule"): "config.rule: rank 0 has 'gaussian', rank 1 has 'exact'",
    ("Horovod", "choice"): "compression: rank 0 has dgc, rank 1 has NoneCompressor",
    ("Horovod", "optimizer"): OPTIMIZERS,
    ("DDP", "density"): "config.density: rank 0 has 0.01, rank 1 has 0.02",
    ("DDP", "choice"): "compression: rank 0 has dgc, rank 1 has none",
    ("DDP", "optimizer"): OPTIMIZERS,
    ("Keras", "density"): "rank 0 has density=0.01, rank 1 has density=0.02",
    ("Keras", "choice"): "compression: rank 0 has DGCConfig, rank 1 has NoneCompressor",
    ("Keras", "fp16"): "rank 0 has FP16Compressor, rank 1 has NoneCompressor",
    ("Keras", "optimizer"): OPTIMIZERS,
}
ROWS = [
    pytest.param(Adapter(name), what, marks=[pytest.mark.slow] * (name == "Keras"), id=f"{name}, {what}")
    for name, what in SAID
]


def _start(adapter: Any, what: str, last: bool) -> Any:
    presets = adapter.module.Compression
    first, second = {
        "density": (presets.dgc(0.01), presets.dgc(0.02)),
        "rule": (presets.gaussian(0.01), presets.topk(0.01)),
        "choice": (presets.dgc(0.01), presets.none),
        "fp16": (presets.fp16, presets.none),
        "optimizer": (presets.topk(0.01), presets.topk(0.01)),
    }[what]
    name = "SGD" if what != "optimizer" else "RMSprop" if last else "Adagrad"
    return adapter.start(second if last else first, name)


@pytest.mark.parametrize(("adapter", "what"), ROWS)
def test_ranks_that_disagree_all_raise_the_same(adapter, what):
    def start() -> None:
        run = _start(adapter, what, adapter.rank == 1)
        if adapter.kind == "keras":
            run.step()

    error = error_of(start)
    assert SAID[adapter.name, what] in error, error
    assert error.startswith("RankMismatch:") or (adapter.kind == "keras" and "RankMismatch" in error)
    same_on_ranks(error)


@on_adapters("Horovod", slow=("Keras",))
@pytest.mark.parametrize("by_hand", [False, True])
def test_ranks_in_other_epochs_hear_it(adapter, by_hand):
    """The packets differ in length or step; Keras' own step is a graph."""
    run = adapter.start(adapter.module.Compression.dgc(0.001, min_numel=64, warmup=WarmupSchedule(epochs=4)))
    run.optimizer.set_epoch(2 * adapter.rank)
    error = error_of(lambda: run.apply(run.gradients(*run.batch())) if by_hand else run.step())
    assert "check that every rank sets the same epoch" in error
    assert error.startswith("RankMismatch:") or adapter.kind == "keras"


@on_adapters("Horovod", slow=("Keras",))
@pytest.mark.on_ranks(2, last=1, timeout=90, environment={"DGC_TIMEOUT": "3"})
def test_missing_rank_is_an_error_not_a_hang(adapter, tmp_path):
    """The last rank stays away from a step: the others give up, naming what they waited for; Keras tells it next."""
    run = adapter.start(adapter.module.Compression.dgc(0.01))
    gradients = run.gradients(*run.batch())
    for _ in range(2):
        run.apply(gradients)
    start = time.monotonic()
    if adapter.rank == 1:
        stay_away(tmp_path)
        if adapter.kind == "keras":
            assert "Horovod has" in error_of(lambda: run.apply(gradients)) and time.monotonic() - start < 15
        return
    error = error_told(lambda: run.apply(gradients), tmp_path)
    assert error.startswith("CollectiveTimeout: rank 0 of 2 waited 3 s"), error
    assert "waited 3 s for dgc." in error or adapter.kind == "keras"
    assert time.monotonic() - start < 7
