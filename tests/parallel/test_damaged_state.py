"""Checkpoints that are damaged, or of something else, on real ranks: one error on every rank, or a choice."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dgc_horovod.state import manifest
from tests.helpers.adapters import Adapter, Compression, on_adapters
from tests.helpers.errors import error_of
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.run import ALONE, COMPRESSIONS, HALF, SMALL

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
each_adapter = on_adapters("Horovod", slow=("Keras",))


def _started(adapter: Adapter, compression: Any = COMPRESSIONS["clipped"], **wrap: Any) -> Any:
    return adapter.start(compression, momentum=0.9, wrap=wrap)


def _saved(adapter: Adapter, folder: Path) -> Any:
    """A run, of which this is a checkpoint."""
    run = _started(adapter)
    run.train(HALF)
    run.save(folder)
    return run


def _same_but_for_the_rank(error: str) -> None:
    same_on_ranks(error.split("failed; ")[-1])


@each_adapter
@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_damage_is_one_error_on_every_rank_or_a_choice(adapter, damage, tmp_path):
    _saved(adapter, tmp_path)
    listed = manifest.Manifest.from_bytes((tmp_path / manifest.MANIFEST).read_bytes())
    last = tmp_path / listed.files["rank 1"].name
    sound = last.read_bytes()
    adapter.barrier()
    if adapter.rank == 0 and damage == "missing":
        last.unlink()
    elif adapter.rank == 0:
        last.write_bytes(sound[:-100] if damage == "cut" else sound[:500] + b"x" + sound[501:])
    adapter.barrier()
    other = _started(adapter)
    error = error_of(lambda: other.load(tmp_path))
    _same_but_for_the_rank(error)
    assert error.startswith("CheckpointError: ") and "rank 1: " in error and 'residuals="if sound"' in error
    other.load(tmp_path, residuals="if sound")
    kept = any(parts["v"].any() for parts in other.kept().values())
    assert kept == (adapter.rank == 0), "the damaged rank alone starts from zero"


def _with_a_strangers_manifest(folder: Path, adapter: Adapter) -> Path:
    other = folder / "web"
    if adapter.rank == 0:
        other.mkdir()
        (other / manifest.MANIFEST).write_text('{"name": "my web app"}')
    return other


def _other_model(adapter: Adapter) -> Any:
    if adapter.kind == "keras":
        import keras

        return keras.Sequential([keras.layers.Input((10,)), keras.layers.Dense(3)])
    import torch

    return torch.nn.Linear(3, 4)


UNFIT: dict[str, tuple[str, Callable[[Path, Any], Any]]] = {  # words, and what is done
    "other model": ("CheckpointError: ", lambda folder, run: run.adapter.module.load_checkpoint(
        folder, _other_model(run.adapter), run.optimizer, residuals="ignored")),
    "other op": ("CheckpointError: .*(averaging.*summing|summing.*averaging)", lambda folder, run: _started(
        run.adapter, op=run.adapter.ranks.Sum).load(folder)),
    "something else's": ("CheckpointError: ", lambda folder, run: run.save(
        _with_a_strangers_manifest(folder, run.adapter))),
    "not writable": ("CheckpointError: ", lambda folder, run: run.save("/proc/none" if run.adapter.rank else folder)),
    "code": ("CheckpointError: ", lambda folder, run: run.save(folder, extra=run.adapter.ranks.Average, run=error_of)),
    "no name": ("CheckpointError: .*rank 1: the directory must be a path, got ''", lambda folder, run: run.save(
        "" if run.adapter.rank else folder)),
    "no name to load": ("CheckpointError: ", lambda folder, run: run.load("" if run.adapter.rank else folder)),
    "not distributed": ("UnsupportedUse: ", lambda folder, run: run.adapter.module.save_checkpoint(
        folder, run.model, run.adapter.start(ALONE).optimizer)),
}  # fmt: skip


@each_adapter
@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_one_error_on_every_rank(adapter, name, tmp_path):
    """And the first save is still there."""
    run = _saved(adapter, tmp_path)
    run.save(tmp_path)  # over the first one
    files = sorted(file.name.split("-", 2)[-1] for file in tmp_path.iterdir())
    assert files == ["manifest.json", "model.bin", "rank0.npz", "rank1.npz"]
    adapter.barrier()
    words, attempt = UNFIT[name]
    error = error_of(lambda: attempt(tmp_path, run))
    assert re.match(words, error, re.DOTALL), error
    assert (adapter.name, name) != ("Keras", "code") or "must be numbers, texts" in error
    _same_but_for_the_rank(error)
    run.load(tmp_path)


@each_adapter
def test_a_record_that_is_none_or_anothers(adapter):
    run = _started(adapter)
    run.train(2)
    error = error_of(lambda: run.optimizer.load_residual_state_dict(None))
    assert re.match(r"CheckpointError: .*this is no dict of residual_state_dict\(\)", error, re.DOTALL)
    same_on_ranks(error)
    stale = {**run.optimizer.residual_state_dict(), "rank": 1 - adapter.rank}
    error = error_of(lambda: run.optimizer.load_residual_state_dict(stale))
    assert re.match(f"CheckpointError: .*the residuals are of rank {1 - adapter.rank} of 2", error, re.DOTALL)


LOCAL, DGC = Compression.local(steps=4, min_numel=16), Compression.dgc(**SMALL)


@each_adapter
@pytest.mark.parametrize(
    ("before", "now", "optimizer", "steps", "words"),
    [
        (COMPRESSIONS["topk"], LOCAL, "SGD", 0, r"gradients((?!flush\(\)).)*$"),
        (COMPRESSIONS["topk"], DGC, "SGD", 0, "gradients"),
        (COMPRESSIONS["topk"], DGC, "SGD", 2, "gradients"),
        (COMPRESSIONS["dgc, warm-up"], COMPRESSIONS["topk"], "SGD", 0, r".*flush\(\)"),
        (DGC, DGC, "AdamW", 0, r".*flush\(\)"),
    ],
    ids=["topk, local", "topk, dgc", "topk, dgc, trained", "dgc, topk", "SGD, AdamW"],
)
def test_residuals_of_another_method_are_refused(adapter, before, now, optimizer, steps, words):
    run = _started(adapter, before)
    run.train(4)
    other = adapter.start(now, optimizer)
    if adapter.kind == "keras":
        other.optimizer.build(other.model.trainable_variables)
    other.train(steps)
    error = error_of(lambda: other.optimizer.load_residual_state_dict(run.optimizer.residual_state_dict()))
    assert re.match("CheckpointError: the residuals hold " + words, error, re.DOTALL), error
