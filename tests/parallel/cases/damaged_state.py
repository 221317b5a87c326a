"""Checkpoints that are damaged, or of something else, on real ranks: one error on every rank, or a choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from dgc_horovod.state import manifest
from dgc_horovod.testing.torch import kept_by
from dgc_horovod.torch import Compression, DistributedOptimizer, load_checkpoint, save_checkpoint
from tests.helpers.errors import error_of
from tests.helpers.interrupted import COMPRESSIONS, HALF, made, train_between
from tests.helpers.sealed import OF_TORCH, outcomes
from tests.helpers.training import batches, fingerprint, momentum_sgd
from tests.parallel.cases.state import _shared_folder


def damage() -> dict[str, Any]:
    """A missing file, a damaged one, another model, an unwritable folder: one error on every rank, or a choice."""
    hvd.init()
    compression = COMPRESSIONS["clipped, per tensor"]
    model, optimizer = made(compression)
    train_between(model, optimizer, 0, HALF)
    with _shared_folder() as folder:
        save_checkpoint(folder, model, optimizer)
        save_checkpoint(folder, model, optimizer)  # over the first one
        files = sorted(file.name.split("-", 2)[-1] for file in folder.iterdir())
        found = {"files": files, **_damaged(folder, compression), **_unfit(folder, compression, model, optimizer)}
        found |= _between_backward_and_step(folder, model, optimizer)
        load_checkpoint(folder, model, optimizer)  # still sound
    return found


def sealed() -> dict[str, Any]:
    """Files that somebody has changed and sealed again: one error on every rank, and nothing has changed."""
    hvd.init()
    model, optimizer = made(COMPRESSIONS["clipped, per tensor"])
    train_between(model, optimizer, 0, HALF)
    with _shared_folder() as folder:
        save_checkpoint(folder, model, optimizer)
        train_between(model, optimizer, HALF, HALF + 2)
        return outcomes(
            OF_TORCH, folder, hvd.rank() == 0, hvd.barrier,
            lambda: error_of(lambda: load_checkpoint(folder, model, optimizer)),
            lambda: str([fingerprint(model), kept_as_text(optimizer)]),
        )  # fmt: skip


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


def particular() -> dict[str, Any]:
    """A model is loaded by its own methods and hooks, once; and not at all, where one rank's refuses."""
    hvd.init()

    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = Particular()
        return model, DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.1))

    model, optimizer = made()
    for seen in range(1, 4):
        model.layer(torch.ones(2, 64) * seen).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.seen = seen
    other, second = made()
    with _shared_folder() as folder:
        save_checkpoint(folder, model, optimizer)
        if hvd.rank() == 1:
            refusing = other.register_load_state_dict_post_hook(lambda *_: exec("raise RuntimeError('not mine')"))
        before = fingerprint(other)
        error = error_of(lambda: load_checkpoint(folder, other, second))
        same = fingerprint(other) == before
        if hvd.rank() == 1:
            refusing.remove()
        load_checkpoint(folder, other, second)
    return {"error": error, "same": same, "loaded": fingerprint(other) == fingerprint(model), "seen": other.seen}


def kept_as_text(optimizer: Any) -> str:
    """All that a rank has kept, and its optimizer's state."""
    kept = {n: {part: x.tobytes() for part, x in a.items()} for n, a in kept_by(optimizer).tensors.items()}
    return str([kept, optimizer.state_dict()])


def _damaged(folder: Path, compression: Any) -> dict[str, Any]:
    listed = manifest.Manifest.from_bytes((folder / manifest.MANIFEST).read_bytes())
    last = folder / listed.files[f"rank {hvd.size() - 1}"].name
    sound, found = last.read_bytes(), {}

    def change(data: bytes | None) -> None:
        hvd.barrier()
        if hvd.rank() == 0:
            last.unlink(missing_ok=True)
            if data is not None:
                last.write_bytes(data)
        hvd.barrier()

    for name, data in (("missing", None), ("cut", sound[:-100]), ("changed", sound[:500] + b"x" + sound[501:])):
        change(data)
        found[name] = error_of(lambda: load_checkpoint(folder, *made(compression)))
        other, second = made(compression)
        load_checkpoint(folder, other, second, residuals="if sound")
        found[f"{name}, skipped"] = any(a["v"].any() for a in kept_by(second).tensors.values())
    change(sound)
    return found


def _unfit(folder: Path, compression: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    other, second = made(COMPRESSIONS["topk"])
    found = {"other method": error_of(lambda: load_checkpoint(folder, other, second))}
    load_checkpoint(folder, other, second, residuals="ignored")
    elsewhere = "/proc/none" if hvd.rank() else folder
    stale = {**optimizer.residual_state_dict(), "rank": 1 - hvd.rank()}
    attempts = {
        "other model": lambda: load_checkpoint(folder, torch.nn.Linear(3, 4), second, "ignored"),
        "other op": lambda: load_checkpoint(folder, *made(compression, op=hvd.Sum)),
        "something else's": lambda: save_checkpoint(_with_a_strangers_manifest(folder), model, optimizer),
        "not writable": lambda: save_checkpoint(elsewhere, model, optimizer),
        "another optimizer": lambda: save_checkpoint(folder, *_other()),
        "code": lambda: save_checkpoint(folder, model, optimizer, extra=hvd.Average, run=error_of),
        "no name": lambda: save_checkpoint("" if hvd.rank() else folder, model, optimizer),
        "a long name": lambda: save_checkpoint(folder / ("x" * 300), model, optimizer),
        "no name to load": lambda: load_checkpoint("" if hvd.rank() else folder, model, optimizer),
        "no dict": lambda: optimizer.load_residual_state_dict(None),
        "stale": lambda: optimizer.load_residual_state_dict(stale),
    }
    return {**found, **{name: error_of(attempt) for name, attempt in attempts.items()}}


def _with_a_strangers_manifest(folder: Path) -> Path:
    other = folder / "web"
    if hvd.rank() == 0:
        other.mkdir()
        (other / manifest.MANIFEST).write_text('{"name": "my web app"}')
    return other


def _between_backward_and_step(folder: Path, model: Any, optimizer: Any) -> dict[str, Any]:
    x, y = next(iter(batches(1, hvd.rank())))
    torch.nn.functional.mse_loss(model(x), y).backward()
    found = {"in flight": error_of(lambda: save_checkpoint(folder, model, optimizer))}
    optimizer.synchronize()
    found["not applied"] = error_of(optimizer.residual_state_dict)
    optimizer.step()
    return found


def _other() -> tuple[Any, Any]:
    model = torch.nn.Linear(32, 40)
    named = [(f"other.{name}", p) for name, p in model.named_parameters()]
    return model, DistributedOptimizer(momentum_sgd(model), named, Compression.dgc(0.1, min_numel=1))
