"""What a training run must keep beside model and optimizer, and how it is saved, loaded and emptied."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from dgc_horovod import checkpoint
from dgc_horovod.agreement import together
from dgc_horovod.engine import BucketEngine
from dgc_horovod.errors import CheckpointError, UnsupportedUse
from dgc_horovod.state import FIRST, MOMENTUM, RESIDUAL, ResidualState
from dgc_horovod.torch.collectives import Collectives
from dgc_horovod.torch.exchange import GradientExchange

_log = logging.getLogger("dgc_horovod")
_RECORD = ("rank", "workers", "averages", "step", "epoch", "directions")


def save_checkpoint(directory: str | os.PathLike[str], model: Any, optimizer: Any, **extra: Any) -> None:
    """Save model, optimizer and every rank's residuals; called on every rank of the optimizer, between two steps.

    Args:
        directory: made if it is not there. A checkpoint in it is replaced once the new one is complete; other files
            are left alone. One for each optimizer.
        model: a module.
        optimizer: of ``DistributedOptimizer``, with any compression.
        extra: more to keep: numbers, texts, tensors, and dicts and lists of them (a scheduler's ``state_dict()``, the
            epoch, the state of a random generator); those of rank 0 are kept.

    Raises:
        CheckpointError: on every rank, if any rank could not write.
        UnsupportedUse: between backward() and step().

    Cost: u and v of every rank are written, twice the model's size each with momentum.
    """
    with _of(optimizer) as (collectives, exchange):
        state = kept_by(optimizer) if exchange is not None else None
        saved = b""
        with together(collectives, f"saving to {directory}"):
            if collectives.rank == 0:
                saved = _dumped(model, optimizer, extra)
        step = state.step if state is not None else 0
        checkpoint.save(Path(directory), collectives, step, saved, state, exchange.config if exchange else None)


def load_checkpoint(
    directory: str | os.PathLike[str], model: Any, optimizer: Any, residuals: str = checkpoint.REQUIRED
) -> dict[str, Any]:
    """Go on from ``save_checkpoint``; called on every rank of the optimizer, whatever their number is now.

    With the same number of ranks training goes on bit by bit. With another number what the ranks together owe the
    model stays the same (to fp32 rounding); all ranks must then see the directory.

    Args:
        directory: of the checkpoint.
        model, optimizer: built as they were when it was saved.
        residuals: "required"; "if sound": go on without those that are missing or damaged, whose content is lost;
            "ignored": all start from zero.

    Returns:
        The `extra` of ``save_checkpoint``.

    Raises:
        CheckpointError: on every rank, if a file is missing or damaged on any, or of another model or method.
    """
    with _of(optimizer) as (collectives, exchange):
        config = None if exchange is None else exchange.config
        found = checkpoint.load(Path(directory), collectives, config, residuals)
        with together(collectives, f"loading {directory}"):
            try:
                saved = torch.load(io.BytesIO(found.model), weights_only=True, map_location="cpu")
            except Exception as error:
                raise CheckpointError(f"the model's file cannot be read ({error})") from None
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            if exchange is not None and found.state is not None:
                load_residuals(optimizer, found.state)
            elif exchange is not None and collectives.rank == 0:
                _log.info("dgc_horovod: no residuals from %s; they start from zero", directory)
        return dict(saved["extra"])


class _of:  # noqa: N801 - read as `with _of(optimizer)`
    """The collectives and the exchange (None: not compressed) of an optimizer that is between two steps."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __enter__(self) -> tuple[Collectives, Any]:
        optimizer = self._optimizer
        if not hasattr(optimizer, "_requires_update"):
            raise UnsupportedUse("pass the optimizer that DistributedOptimizer has returned")
        if not optimizer.process_set.included():
            raise UnsupportedUse("this rank is not in the optimizer's process set; call it on those that are")
        exchange = getattr(optimizer, "_dgc", None)
        if exchange is not None:
            check_between_steps(optimizer)
            return exchange.collectives, exchange
        return Collectives(optimizer.process_set, "checkpoint"), None

    def __exit__(self, *_: Any) -> None:
        return None


def _dumped(model: Any, optimizer: Any, extra: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": extra}, out)
    try:
        torch.load(io.BytesIO(out.getvalue()), weights_only=True, map_location="cpu")
    except Exception as error:
        raise CheckpointError(
            "what is to be saved could not be loaded again without running code from the file; keep numbers, texts, "
            f"tensors, dicts and lists only ({error})"
        ) from None
    return out.getvalue()


# -- the state of one rank


def check_between_steps(optimizer: Any) -> None:
    """Raise UnsupportedUse while gradients are being exchanged, or have been and are not applied yet."""
    if optimizer._handles or (optimizer._synchronized and optimizer._dgc_may_apply):
        raise UnsupportedUse(
            "residuals can be saved, loaded and flushed between two steps only: after step(), before backward()"
        )


def kept_by(optimizer: Any) -> ResidualState:
    """A copy of what this rank has kept; see ``residual_state_dict``."""
    check_between_steps(optimizer)
    exchange, update = optimizer._dgc, optimizer._dgc_update
    state: ResidualState = exchange.residuals()
    steps = {exchange.names[p]: update.directions(p) for p in exchange.compressed}
    state.directions = {name: count for name, count in steps.items() if count}
    return state


def load_residuals(optimizer: Any, state: ResidualState) -> None:
    """Go on from `state`, of this rank; see ``load_residual_state_dict``."""
    check_between_steps(optimizer)
    exchange, update = optimizer._dgc, optimizer._dgc_update
    _check_fits(exchange, state)
    exchange.load(state)
    for p in exchange.compressed:
        name = exchange.names[p]
        if FIRST in state.tensors.get(name, {}):
            update.resume(p, optimizer.state[p], state.directions.get(name, 0))


def _check_fits(exchange: Any, state: ResidualState) -> None:
    buckets = exchange.buckets
    ours, theirs = (buckets.workers, buckets.rank, buckets.averages), (state.workers, state.rank, state.averages)
    if ours != theirs:
        raise CheckpointError(
            f"the residuals are of rank {state.rank} of {state.workers}, {'averaging' if state.averages else 'summing'}"
            f" gradients; this is rank {buckets.rank} of {buckets.workers}, "
            f"{'averaging' if buckets.averages else 'summing'}; load_checkpoint hands residuals on to other ranks"
        )
    for name, arrays in state.tensors.items():
        sizes = {array.size for array in arrays.values()}
        if sizes != {buckets.numel.get(name)}:
            raise CheckpointError(
                f"the residual of {name!r} has {sorted(sizes)} elements, the model's tensor has "
                f"{buckets.numel.get(name, 'been removed')}; they must be of the same model"
            )
    missing = [name for name in buckets.compressed if RESIDUAL not in state.tensors.get(name, {})]
    if missing and state.tensors:
        raise CheckpointError(f"there are no residuals of {', '.join(map(repr, missing[:3]))}: of another model?")


def to_dict(state: ResidualState) -> dict[str, Any]:
    """`state` as a dict of plain values and tensors."""
    tensors = {name: {k: torch.from_numpy(x) for k, x in arrays.items()} for name, arrays in state.tensors.items()}
    thresholds = {bucket: torch.from_numpy(x) for bucket, x in state.thresholds.items()}
    return {**{name: getattr(state, name) for name in _RECORD}, "tensors": tensors, "thresholds": thresholds}


def from_dict(record: Mapping[str, Any]) -> ResidualState:
    """What `to_dict` was given.

    Raises:
        CheckpointError: it is no such dict.
    """
    try:
        tensors = {name: {k: x.cpu().numpy() for k, x in arrays.items()} for name, arrays in record["tensors"].items()}
        thresholds = {bucket: x.cpu().numpy() for bucket, x in record["thresholds"].items()}
        return ResidualState(**{name: record[name] for name in _RECORD}, tensors=tensors, thresholds=thresholds)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"this is no dict of residual_state_dict() ({type(error).__name__}: {error})") from None


# -- nothing left behind


def flush(optimizer: Any) -> None:
    """See ``flush`` of the optimizer."""
    check_between_steps(optimizer)
    exchange, update = optimizer._dgc, optimizer._dgc_update
    kept = update.flush(optimizer, _left(exchange), exchange.is_compressed)
    share = 1 if exchange.settings.op == hvd.Average else exchange.collectives.workers
    for p, v in kept.items():
        run, i = exchange.place[p]
        run.engine.write(i, {RESIDUAL: (v / share).reshape(-1).cpu().numpy()})


def _left(exchange: GradientExchange) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """What all ranks together have kept of every tensor in a bucket, by part; it is zero here afterwards.

    Residual and momentum are averaged or summed as gradients are, Adam's moments averaged. An allreduce of every part
    that any rank has.
    """
    own = [run.engine.parts for run in exchange.runs]
    theirs = [json.loads(data) for data in exchange.collectives.gather_bytes(json.dumps(own).encode(), "parts")]
    found: dict[torch.Tensor, dict[str, torch.Tensor]] = {p: {} for p in exchange.place}
    for run, *parts in zip(exchange.runs, *theirs, strict=True):
        for part in sorted({part for one in parts for part in one}):
            combined = _combined(exchange, run.engine, part)
            for segment, p in zip(run.engine.bucket.segments, run.parameters, strict=True):
                found[p][part] = combined[segment.place].view(p.shape).to(p.device)
    exchange.buckets.clear()
    return found


def _combined(exchange: GradientExchange, engine: BucketEngine, part: str) -> torch.Tensor:
    collectives, op = exchange.collectives, exchange.settings.op if part in (RESIDUAL, MOMENTUM) else hvd.Average
    own = [engine.read(i).get(part, np.zeros(s.numel, np.float32)) for i, s in enumerate(engine.bucket.segments)]
    whole = torch.from_numpy(np.concatenate(own))
    collectives.traffic.count_allreduce(whole.nbytes, collectives.workers)
    return collectives.wait(collectives.allreduce(whole, f"left.{engine.bucket.index}.{part}", op))
