"""Checkpoints that are damaged, or of something else, on real ranks: one error on every rank, or a choice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch

from dgc_horovod.state import manifest
from dgc_horovod.testing.torch import kept_by
from dgc_horovod.torch import Compression, DistributedOptimizer, load_checkpoint, save_checkpoint
from tests.helpers.errors import error_of
from tests.helpers.interrupted import made, train_between
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.run import COMPRESSIONS, HALF
from tests.helpers.training import batches, fingerprint, momentum_sgd

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
COMPRESSION = COMPRESSIONS["clipped"]


def _saved(folder: Path, steps: int = HALF) -> tuple[Any, Any]:
    """A model and its optimizer, of which this is a checkpoint."""
    model, optimizer = made(COMPRESSION)
    train_between(model, optimizer, 0, steps)
    save_checkpoint(folder, model, optimizer)
    return model, optimizer


def _same_but_for_the_rank(error: str) -> None:
    assert error.startswith("CheckpointError: "), error
    same_on_ranks(error.split("failed; ")[1])


@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_damage_is_one_error_on_every_rank_or_a_choice(damage, tmp_path):
    _saved(tmp_path)
    listed = manifest.Manifest.from_bytes((tmp_path / manifest.MANIFEST).read_bytes())
    last = tmp_path / listed.files[f"rank {hvd.size() - 1}"].name
    sound = last.read_bytes()
    hvd.barrier()
    if hvd.rank() == 0 and damage == "missing":
        last.unlink()
    elif hvd.rank() == 0:
        last.write_bytes(sound[:-100] if damage == "cut" else sound[:500] + b"x" + sound[501:])
    hvd.barrier()
    error = error_of(lambda: load_checkpoint(tmp_path, *made(COMPRESSION)))
    _same_but_for_the_rank(error)
    assert "rank 1: " in error and 'residuals="if sound"' in error
    other, second = made(COMPRESSION)
    load_checkpoint(tmp_path, other, second, residuals="if sound")
    kept = any(arrays["v"].any() for arrays in kept_by(second).tensors.values())
    assert kept == (hvd.rank() == 0), "the damaged rank alone starts from zero"


def _with_a_strangers_manifest(folder: Path) -> Path:
    other = folder / "web"
    if hvd.rank() == 0:
        other.mkdir()
        (other / manifest.MANIFEST).write_text('{"name": "my web app"}')
    return other


def _other() -> tuple[Any, Any]:
    model = torch.nn.Linear(32, 40)
    named = [(f"other.{name}", p) for name, p in model.named_parameters()]
    return model, DistributedOptimizer(momentum_sgd(model), named, COMPRESSION)


UNFIT: dict[str, tuple[list[str], Callable[[Path, Any, Any], Any]]] = {  # words, and what is done
    "other method": ([], lambda folder, model, optimizer: load_checkpoint(folder, *made(COMPRESSIONS["topk"]))),
    "other model": ([], lambda folder, model, optimizer: load_checkpoint(
        folder, torch.nn.Linear(3, 4), optimizer, "ignored")),
    "other op": (["averaging", "summing"], lambda folder, model, optimizer: load_checkpoint(
        folder, *made(COMPRESSION, op=hvd.Sum))),
    "something else's": ([], lambda folder, model, optimizer: save_checkpoint(
        _with_a_strangers_manifest(folder), model, optimizer)),
    "not writable": ([], lambda folder, model, optimizer: save_checkpoint(
        "/proc/none" if hvd.rank() else folder, model, optimizer)),
    "another optimizer": ([], lambda folder, model, optimizer: save_checkpoint(folder, *_other())),
    "code": ([], lambda folder, model, optimizer: save_checkpoint(
        folder, model, optimizer, extra=hvd.Average, run=error_of)),
    "no name": (["rank 1: the directory must be a path, got ''"], lambda folder, model, optimizer: save_checkpoint(
        "" if hvd.rank() else folder, model, optimizer)),
    "a long name": ([], lambda folder, model, optimizer: save_checkpoint(folder / ("x" * 300), model, optimizer)),
    "no name to load": ([], lambda folder, model, optimizer: load_checkpoint(
        "" if hvd.rank() else folder, model, optimizer)),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_one_error_on_every_rank(name, tmp_path):
    """And the first save is still there."""
    model, optimizer = _saved(tmp_path)
    save_checkpoint(tmp_path, model, optimizer)  # over the first one
    files = sorted(file.name.split("-", 2)[-1] for file in tmp_path.iterdir())
    assert files == ["manifest.json", "model.bin", "rank0.npz", "rank1.npz"]
    hvd.barrier()
    words, attempt = UNFIT[name]
    error = error_of(lambda: attempt(tmp_path, model, optimizer))
    _same_but_for_the_rank(error)
    assert all(word in error for word in words), error
    load_checkpoint(tmp_path, model, optimizer)


def test_a_record_that_is_none_or_anothers():
    model, optimizer = made(COMPRESSION)
    train_between(model, optimizer, 0, 2)
    error = error_of(lambda: optimizer.load_residual_state_dict(None))
    assert error.startswith("CheckpointError: this is no dict of residual_state_dict()")
    stale = {**optimizer.residual_state_dict(), "rank": 1 - hvd.rank()}
    error = error_of(lambda: optimizer.load_residual_state_dict(stale))
    assert error.startswith(f"CheckpointError: the residuals are of rank {1 - hvd.rank()} of 2")


def test_between_backward_and_step_nothing_is_saved(tmp_path):
    model, optimizer = _saved(tmp_path)
    x, y = next(iter(batches(1, hvd.rank())))
    torch.nn.functional.mse_loss(model(x), y).backward()
    in_flight = error_of(lambda: save_checkpoint(tmp_path, model, optimizer))
    optimizer.synchronize()
    not_applied = error_of(optimizer.residual_state_dict)
    optimizer.step()
    assert in_flight.startswith("CheckpointError: ") and not_applied.startswith("UnsupportedUse: ")
    assert "after step()" in in_flight and "after step()" in not_applied


class Particular(torch.nn.Module):
    """A model that changes what it is given to load, and looks at what it has loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(64, 64), 0
        self.register_buffer("norm", torch.zeros(()))
        self._register_state_dict_hook(self._write)
        self._register_load_state_dict_pre_hook(self._prepare)
        self.register_load_state_dict_post_hook(self._look)

    @staticmethod
    def _write(module: Any, found: dict[str, Any], prefix: str, _: Any) -> None:
        found["norm"], found["layer.weight"] = module.layer.weight.norm(), 2 * found["layer.weight"]

    def _prepare(self, found: dict[str, Any], *_: Any) -> None:
        found["layer.weight"].div_(2)

    def _look(self, *_: Any) -> None:
        if not torch.allclose(self.norm, self.layer.weight.norm()):
            raise RuntimeError("other weights than were saved")

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": [self.seen]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"].pop()

    def load_state_dict(self, found: Any, *arguments: Any, **more: Any) -> Any:
        found["layer.bias"] = found.pop("bias of before", found.get("layer.bias"))
        return super().load_state_dict(found, *arguments, **more)


def _particular() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Particular()
    return model, DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.1))


def test_a_model_is_loaded_by_its_own_hooks_once_or_is_what_it_was(tmp_path):
    """By its own methods too; and not at all, where one rank's refuses."""
    model, optimizer = _particular()
    for seen in range(1, 4):
        model.layer(torch.ones(2, 64) * seen).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.seen = seen
    other, second = _particular()
    save_checkpoint(tmp_path, model, optimizer)

    def refuse(*_: Any) -> None:
        if hvd.rank() == 1:
            raise RuntimeError("not mine")

    refusing = other.register_load_state_dict_post_hook(refuse)
    before = fingerprint(other)
    error = error_of(lambda: load_checkpoint(tmp_path, other, second))
    assert "rank 1" in error and "not mine" in error and fingerprint(other) == before
    refusing.remove()
    load_checkpoint(tmp_path, other, second)
    assert fingerprint(other) == fingerprint(model) and other.seen == 3
