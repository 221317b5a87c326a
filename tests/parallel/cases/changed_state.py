"""Checkpoints of a job that is another one now: other layers are trained, another method, none; on real ranks."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd

from dgc_horovod.testing.torch import kept_by
from dgc_horovod.torch import Compression, DistributedOptimizer, load_checkpoint, save_checkpoint
from tests.helpers.errors import error_of
from tests.helpers.training import fingerprint, momentum_sgd, smooth_model
from tests.parallel.cases.state import _SMALL, COMPRESSIONS, HALF, _adamw, _made, _shared_folder, _train


def _trained(frozen: bool, compression: Any = COMPRESSIONS["gaussian, momentum correction"]) -> tuple[Any, Any]:
    model = smooth_model()
    for p in model[0].parameters():
        p.requires_grad_(not frozen)
    return model, DistributedOptimizer(momentum_sgd(model), model.named_parameters(), compression)


def frozen() -> dict[str, Any]:
    """A layer is frozen, or thawed, between two jobs: refused, and nothing has changed; behind a flush it is loaded."""
    hvd.init()
    found = {}
    for name, before, now in (("frozen", False, True), ("thawed", True, False)):
        model, optimizer = _trained(before)
        _train(model, optimizer, 0, HALF)
        other, second = _trained(now)
        _train(other, second, 0, 3)
        weights, kept = fingerprint(other), _kept(second)
        with _shared_folder() as folder:
            save_checkpoint(folder, model, optimizer)
            refused = error_of(lambda: load_checkpoint(folder, other, second))  # noqa: B023 - called at once
            same = [fingerprint(other) == weights, _kept(second) == kept]
            optimizer.flush()
            save_checkpoint(folder, model, optimizer)
            load_checkpoint(folder, other, second)
        found[name] = {"refused": refused, "same": same, "flushed": fingerprint(other) == fingerprint(model)}
        _train(other, second, 0, 2)
    return found


def _kept(optimizer: Any) -> str:
    return str({n: {part: x.tobytes() for part, x in a.items()} for n, a in kept_by(optimizer).tensors.items()})


def methods() -> dict[str, str]:
    """``load_residual_state_dict`` of another method."""
    hvd.init()
    local = Compression.local(steps=4, min_numel=16)
    pairs = {
        "topk, local": (_made(COMPRESSIONS["topk"]), _made(local)),
        "dgc, topk": (_made(COMPRESSIONS["dgc, warm-up"]), _made(COMPRESSIONS["topk"])),
        "SGD, AdamW": (_made(Compression.dgc(**_SMALL)), _made(Compression.dgc(**_SMALL), _adamw)),
        "dgc, dgc": (_made(Compression.dgc(**_SMALL)), _made(Compression.dgc(**_SMALL, rule="sampled"))),
    }
    found = {}
    for name, ((model, optimizer), (_, other)) in pairs.items():
        _train(model, optimizer, 0, 4)
        kept = optimizer.residual_state_dict()
        found[name] = error_of(lambda: other.load_residual_state_dict(kept))  # noqa: B023 - called at once
    return found


def uncompressed() -> dict[str, Any]:
    """Nothing is compressed any more: what waits is not dropped without a word."""
    hvd.init()
    model, optimizer = _made(COMPRESSIONS["clipped, per tensor"], _adamw)
    _train(model, optimizer, 0, HALF)
    other, dense = _made(Compression.none, _adamw)
    weights = fingerprint(other)
    with _shared_folder() as folder:
        save_checkpoint(folder, model, optimizer)
        found: dict[str, Any] = {"required": error_of(lambda: load_checkpoint(folder, other, dense))}
        found["same"] = fingerprint(other) == weights
        for residuals in ("ignored", "if sound"):
            load_checkpoint(folder, other, dense, residuals=residuals)
        optimizer.flush()
        save_checkpoint(folder, model, optimizer)
        load_checkpoint(folder, other, dense)
    return {**found, "flushed": fingerprint(other) == fingerprint(model)}
