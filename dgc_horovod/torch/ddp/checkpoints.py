"""``save_checkpoint`` and ``load_checkpoint`` for torch.distributed; the files are the same as with Horovod."""

from __future__ import annotations

from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.files import AnyPath
from dgc_horovod.state import checkpoint
from dgc_horovod.torch import state
from dgc_horovod.torch.ddp.carrier import GroupCarrier
from dgc_horovod.torch.ddp.models import bare, bare_optimizer
from dgc_horovod.torch.session.session import Session


def save_checkpoint(directory: AnyPath, model: Module, optimizer: Optimizer, **extra: object) -> None:
    """Save model, optimizer and every rank's residuals; call it on every rank of the optimizer, between two steps.

    ``dgc_horovod.torch.load_checkpoint`` reads the same files: names are those of the model without DDP.

    Args:
        directory: path, created if missing; one for each optimizer. A checkpoint in it is replaced when the new one is
            complete; other files are not changed.
        model: module whose state is saved, with or without DDP around it.
        optimizer: optimizer of `register` or `DistributedOptimizer`, with any compression.
        extra: more values to save: numbers, texts, tensors, dicts and lists of them; those of rank 0 are saved.

    Raises:
        CheckpointError: on every rank, if any rank cannot write, or is between backward() and step().

    Cost: u and v of every rank are written, twice the model's size each with momentum.
    """
    state.save(directory, bare(model), bare_optimizer(optimizer), extra, carrier_of(optimizer))


def load_checkpoint(
    directory: AnyPath, model: Module, optimizer: Optimizer, residuals: str = checkpoint.REQUIRED
) -> dict[str, Any]:
    """Load a checkpoint of ``save_checkpoint``, also of Horovod's adapter; call it on every rank of the optimizer.

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
    return state.load(directory, bare(model), bare_optimizer(optimizer), residuals, carrier_of(optimizer))


def save_residuals(directory: AnyPath, optimizer: Optimizer) -> None:
    """Save only every rank's residuals, in addition to a checkpoint of the script or of another library.

    Call it on every rank of the optimizer, between two steps. Save model and ``optimizer.state_dict()`` separately.

    Args:
        directory: path, created if missing; see `save_checkpoint`.
        optimizer: see `save_checkpoint`.

    Raises:
        CheckpointError: see `save_checkpoint`.

    Cost: u and v of every rank are written, twice the model's size each with momentum.
    """
    state.save(directory, None, bare_optimizer(optimizer), {}, carrier_of(optimizer))


def load_residuals(directory: AnyPath, optimizer: Optimizer, residuals: str = checkpoint.REQUIRED) -> None:
    """Load residuals of `save_residuals`, after the state of model and optimizer; call it on every rank.

    Args:
        directory: path, also of a checkpoint of `save_checkpoint`.
        optimizer: see `load_checkpoint`.
        residuals: see `load_checkpoint`.

    Raises:
        CheckpointError: see `load_checkpoint`.
    """
    state.load(directory, None, bare_optimizer(optimizer), residuals, carrier_of(optimizer))


def carrier_of(optimizer: Optimizer) -> GroupCarrier:
    """Return the carrier of a registered optimizer, which may leave the exchange to DDP.

    Raises:
        UnsupportedUse: the optimizer was not registered.
    """
    found = getattr(bare_optimizer(optimizer), "_dgc", None)
    found = found.carrier if isinstance(found, Session) else found
    if not isinstance(found, GroupCarrier):
        raise UnsupportedUse("pass the optimizer that was passed to register() or DistributedOptimizer()")
    return found
