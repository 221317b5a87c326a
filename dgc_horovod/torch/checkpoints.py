"""``save_checkpoint`` and ``load_checkpoint`` for Horovod's ranks."""

from __future__ import annotations

from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.files import AnyPath
from dgc_horovod.state import checkpoint
from dgc_horovod.torch import state
from dgc_horovod.torch.horovod_carrier import HorovodCarrier
from dgc_horovod.torch.session.carrier import Carrier
from dgc_horovod.torch.session.session import session_of


def save_checkpoint(directory: AnyPath, model: Module, optimizer: Optimizer, **extra: object) -> None:
    """Save model, optimizer and every rank's residuals; call it on every rank of the optimizer, between two steps.

    Args:
        directory: path, created if missing; one for each optimizer. A checkpoint in it is replaced when the new one is
            complete; other files are not changed.
        model: module whose state is saved.
        optimizer: optimizer of ``DistributedOptimizer``, with any compression.
        extra: more values to save: numbers, texts, tensors, dicts and lists of them (a scheduler's ``state_dict()``,
            the epoch, the state of a random generator); those of rank 0 are saved.

    Raises:
        CheckpointError: on every rank, if any rank cannot write, or is between backward() and step().

    Cost: u and v of every rank are written, twice the model's size each with momentum.
    """
    state.save(directory, model, optimizer, extra, _carrier_of(optimizer))


def load_checkpoint(
    directory: AnyPath, model: Module, optimizer: Optimizer, residuals: str = checkpoint.REQUIRED
) -> dict[str, Any]:
    """Load a checkpoint of ``save_checkpoint``; call it on every rank of the optimizer, for any number of ranks.

    With the same number of ranks training continues bit for bit. With another number the combined residual of all ranks
    stays the same (to fp32 rounding); all ranks must then see the directory.

    Args:
        directory: path of the checkpoint.
        model, optimizer: model and optimizer, built as they were when it was saved.
        residuals: handling of the residuals: "required"; "if sound": missing or damaged ones are lost and start from
            zero; "ignored": all start from zero.

    Returns:
        The `extra` of ``save_checkpoint``.

    Raises:
        CheckpointError: on every rank, if a file is missing or damaged on any, or of another model or method.
    """
    return state.load(directory, model, optimizer, residuals, _carrier_of(optimizer))


def _carrier_of(optimizer: Any) -> Carrier:
    """Return the carrier of an optimizer of ``DistributedOptimizer``, which may be stock Horovod's own."""
    if not hasattr(optimizer, "_requires_update"):
        raise UnsupportedUse(f"pass the optimizer that DistributedOptimizer returned, got {type(optimizer).__name__}")
    if not optimizer.process_set.included():
        raise UnsupportedUse("this rank is not in the optimizer's process set; call it on ranks of the set only")
    session = session_of(optimizer)
    if session is None:
        return HorovodCarrier(optimizer)
    session.carrier.follow(session)
    return session.carrier
