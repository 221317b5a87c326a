"""What ranks have kept survives a restart and a change of their number, and can be emptied: on real ranks."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dgc_horovod import WarmupSchedule
from tests.helpers.adapters import Adapter, Compression, on_adapters
from tests.helpers.errors import error_of
from tests.helpers.on_ranks import on_ranks, same_on_ranks
from tests.helpers.run import COMPRESSIONS, HALF, SMALL, STEPS, UNROUNDED, distance
from tests.helpers.sealed import check_sealed

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"name": "SGD", "momentum": 0.9},
    "Nesterov, decay": {"name": "SGD", "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
    "AdamW": {"name": "AdamW"},
}
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


def _started(adapter: Adapter, compression: Any, optimizer: str = "SGD", seed: int = 0, **wrap: Any) -> Any:
    run = adapter.start(compression, seed=seed, wrap=wrap, **OPTIMIZERS[optimizer])
    if optimizer == "AdamW":  # a warm-up, in which residuals fade
        run.rates = lambda step: 0.003 * min(1.0, (step + 1) / STEPS)
    return run


# Of Adam in dense steps, at their end, after them, and without them.
DENSE = {f"dense, {n} steps": Compression.dgc(**SMALL, warmup=WarmupSchedule(steps=n, first_density=1.0, factor=1e-3))
         for n in (HALF + 6, HALF, HALF - 6)}  # fmt: skip
RESUMED = [(name, "SGD", STEPS) for name in COMPRESSIONS]
RESUMED += [("dgc, warm-up", "Nesterov, decay", STEPS), ("dgc, warm-up", "AdamW", STEPS), ("topk", "AdamW", STEPS)]
RESUMED += [(name, "AdamW", STEPS) for name in ("clipped", *DENSE)]
IN_KERAS = [row for row in RESUMED if row[0] != "sampled, 4bit"]


@pytest.mark.parametrize(
    ("adapter", "name", "optimizer", "steps"),
    [
        *((Adapter("Horovod"), *row) for row in RESUMED),
        (Adapter("DDP"), *RESUMED[0]),
        *(pytest.param(Adapter(a), "dgc, warm-up", "SGD", 200, marks=pytest.mark.slow) for a in ("Horovod", "Keras")),
        *(pytest.param(Adapter("DDP"), *row, marks=pytest.mark.slow) for row in RESUMED[1:]),
        *(pytest.param(Adapter("Keras"), *row, marks=pytest.mark.slow) for row in IN_KERAS),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(adapter, name, optimizer, steps, tmp_path):
    """By a checkpoint, in the run that was saved too, and by a rank's own record."""
    compression = {**COMPRESSIONS, **DENSE}[name]
    whole, half = (_started(adapter, compression, optimizer) for _ in range(2))
    whole.train(steps)
    half.train(steps // 2)
    half.save(tmp_path, epoch=3)
    record = half.optimizer.residual_state_dict()
    if adapter.kind != "keras":
        _check_that_it_goes_through_a_file(record)
    resumed, by_record, without = (_started(adapter, compression, optimizer, seed=5) for _ in range(3))
    assert resumed.load(tmp_path) == {"epoch": 3} and resumed.print == half.print
    half.load(tmp_path)
    for run in (by_record, without):
        run.load(tmp_path, residuals="ignored")
    by_record.optimizer.load_residual_state_dict(record)
    for run in (half, resumed, by_record, without):
        run.steps = steps // 2
        run.train(steps - steps // 2)
    assert half.print == resumed.print == by_record.print == whole.print
    assert _known(resumed) == _known(whole)
    assert without.print != whole.print, "without its residuals the run is the same, so this shows nothing"
    if adapter.kind == "keras" and optimizer == "AdamW" and name != "topk":
        second = resumed.session.buckets.second.saved()
        assert float(next(iter(second.values()))[3]) == pytest.approx(resumed.rate, rel=1e-6)
    same_on_ranks(whole.print, _known(whole))


def _known(run: Any) -> str:
    """The bits of what ranks know of Adam's second moment; "{}" for nothing."""
    return str(
        {
            name: np.asarray(x).tobytes().hex()
            for name, x in sorted(run.optimizer.residual_state_dict()["second"].items())
        }
    )


def _check_that_it_goes_through_a_file(record: dict[str, Any]) -> None:
    import torch

    file = io.BytesIO()
    torch.save(record, file)
    file.seek(0)
    torch.load(file, weights_only=True)


@on_adapters("Horovod", slow=("DDP", "Keras"))
@each_optimizer
def test_a_run_that_was_flushed_and_saved_is_resumed_bit_by_bit(adapter, optimizer, tmp_path):
    """What a flush has put into the optimizer's own state is taken over, too."""
    runs = [_started(adapter, COMPRESSIONS["clipped"], optimizer, seed) for seed in (0, 5)]
    runs[0].train(HALF)
    runs[0].optimizer.flush()
    runs[0].save(tmp_path)
    runs[1].load(tmp_path)
    runs[1].steps = HALF
    for run in runs:
        run.train(HALF)
    assert runs[0].print == runs[1].print
    same_on_ranks(runs[0].print)


@on_adapters("Horovod", slow=("Keras",))
@each_optimizer
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_a_flush_leaves_nothing_and_loses_nothing(adapter, optimizer, op):
    compression = Compression.dgc(**SMALL, dense_values="8bit")
    run = _started(adapter, compression, optimizer, op=getattr(adapter.ranks, op))
    run.train(HALF)
    before, states = run.arrays, adapter.of_all_ranks(run.kept())
    run.optimizer.flush()
    after, kept = run.arrays, run.kept()
    for name, old, new in zip(run.names, before, after, strict=True):
        if old.ndim == 2:
            owed = run.rate * sum(state[name]["v"].astype(float) for state in states)
            owed = owed / len(states) if op == "Average" else owed
            moved = old.ravel().astype(float) - new.ravel()
            assert np.abs(moved - owed).max() / np.abs(owed).max() < 1e-5, "the weights have not moved by what was owed"
        for part, x in kept[name].items():  # small ones of Adam's keep what 8 bits have left
            assert not x.any() or (part == "v" and optimizer == "AdamW" and (old.ndim == 1 or x.size <= 96)), name
    assert all(slot.any() for slot in run.slots()), "the framework's own optimizer takes no momentum over"
    run.train(HALF)
    assert np.isfinite(run.weights).all()
    same_on_ranks(run.print)


LINEAR: dict[str, dict[str, Any]] = {  # at a rate at which rounding differences stay small
    "SGD": {"lr": 0.02, "momentum": 0.9},
    "Nesterov, decay": {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
    "ascending": {"lr": 0.001, "momentum": 0.9, "maximize": True},
}


@pytest.mark.parametrize(
    ("adapter", "optimizer"),
    [
        *((Adapter("Horovod"), name) for name in ("SGD", "Nesterov, decay", "ascending")),
        *(pytest.param(Adapter("Keras"), name, marks=pytest.mark.slow) for name in ("SGD", "Nesterov, decay")),
    ],
)
def test_a_flush_moves_momentum_and_changes_nothing_else(adapter, optimizer):
    """Where all is sent at once there is nothing to flush but momentum."""
    everything = Compression.dgc(1.0, min_numel=1, factor_masking=False, **UNROUNDED)
    never, often = (adapter.start(everything, **LINEAR[optimizer]) for _ in range(2))
    for _ in range(STEPS // 4):
        never.train(4)
        often.train(4)
        often.optimizer.flush()
    assert distance(never.weights, often.weights) < 1e-5


@on_adapters("Horovod", slow=("Keras",))
@pytest.mark.parametrize("name", ["dgc, warm-up", "topk"])
def test_a_commit_that_flushes_leaves_nothing(adapter, name):
    """Another one changes nothing."""
    run = _started(adapter, COMPRESSIONS[name], "Nesterov, decay")
    state = run.state(flush_on_commit=True)
    state.sync()
    state.commit()
    run.train(HALF)
    state.commit()
    assert not any(parts["v"].any() for parts in run.kept().values() if parts["v"].size > 96)
    before = run.print, run.inner
    state.commit()
    assert (run.print, run.inner) == before
    same_on_ranks(run.print)


@on_adapters("Horovod", slow=("Keras",))
def test_ranks_that_meet_with_other_settings(adapter):
    """A newcomer makes its optimizer while the others wait: nothing is compared then, but when they meet."""
    with mock.patch.dict(os.environ, HOROVOD_ELASTIC="1"):
        run = _started(adapter, Compression.topk(0.01 + 0.01 * adapter.rank))
        error = error_of(run.state().sync) if adapter.kind == "keras" else error_of(_torch_state(run).sync)
    assert error.startswith("RankMismatch: ") and "density" in error
    assert "rank 0 has" in error and "0.01, rank 1 has" in error and "0.02" in error
    same_on_ranks(error)


def _torch_state(run: Any) -> Any:
    return run.adapter.module.elastic.TorchState(run.model, run.optimizer)


def save_for_others(adapter: Adapter, folder: Path, optimizer: str) -> tuple[dict[str, dict[str, np.ndarray]], str]:
    """On a rank: train and save; returns its record, and what is known for Adam."""
    run = _started(adapter, COMPRESSIONS["clipped"], optimizer)
    run.train(HALF)
    run.save(folder)
    return run.kept(), _known(run)


def load_of_others(adapter: Adapter, folder: Path, optimizer: str) -> tuple[dict[str, dict[str, np.ndarray]], str]:
    """On a rank: load what another number of ranks has saved, and go on; returns its record, and the same."""
    run = _started(adapter, COMPRESSIONS["clipped"], optimizer, seed=5)
    run.load(folder)
    found, run.steps = (run.kept(), _known(run)), HALF
    at_first = run.loss(*run.batch())
    assert np.mean(run.train(30)[-10:]) < at_first
    same_on_ranks(run.print)
    return found


@pytest.mark.on_ranks(0)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize(
    ("adapter", "before", "after"),
    [
        (Adapter("Horovod"), 2, 1),
        *(pytest.param(Adapter("Horovod"), *n, marks=pytest.mark.slow) for n in ((4, 2), (2, 3), (2, 4))),
        *(pytest.param(Adapter("Keras"), *n, marks=pytest.mark.slow) for n in ((2, 1), (1, 2), (4, 2))),
    ],
)
def test_another_number_of_ranks_owes_the_same(adapter, before, after, optimizer, tmp_path):
    """And knows the same of Adam's second moment."""
    given = {"adapter": adapter, "folder": tmp_path, "optimizer": optimizer}
    saved, known = zip(*on_ranks(save_for_others, before, adapter.kind, arguments=given), strict=True)
    loaded, known_later = zip(*on_ranks(load_of_others, after, adapter.kind, arguments=given), strict=True)
    assert {*known, *known_later} == {known[0]} and (known[0] != "{}") == (optimizer == "AdamW")
    assert any(parts["v"].any() for state in saved for parts in state.values())
    for name, parts in saved[0].items():
        for part in parts:
            old, new = (np.array([state[name][part] for state in states], np.float32) for states in (saved, loaded))
            np.testing.assert_allclose(new.mean(0), old.mean(0), rtol=1e-5, atol=1e-6 * max(np.abs(old).max(), 1e-9))
            if before == 2 * after:
                np.testing.assert_array_equal(new, np.float32(0.5) * old[::2] + np.float32(0.5) * old[1::2])
            elif after == 2 * before:
                np.testing.assert_array_equal(new, np.repeat(old, 2, axis=0))


@on_adapters("Horovod", "DDP", slow=("Keras",))
def test_what_was_changed_and_sealed_again_is_one_error_and_changes_nothing(adapter, tmp_path):
    run = _started(adapter, COMPRESSIONS["clipped"])
    run.train(HALF)
    run.save(tmp_path)
    run.train(2)
    check_sealed(run, tmp_path)
