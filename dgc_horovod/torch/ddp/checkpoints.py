"""``save_checkpoint`` and ``load_checkpoint`` between the ranks of torch.distributed: Horovod's adapter reads them."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from dgc_horovod import envvars
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.state import checkpoint
from dgc_horovod.torch import state
from dgc_horovod.torch.ddp.models import bare, bare_optimizer
from dgc_horovod.torch.ddp.transport import ProcessGroupCollectives, new_group


def save_checkpoint(directory: str | os.PathLike[str], model: Any, optimizer: Any, **extra: Any) -> None:
    """Save model, optimizer and every rank's residuals; called on every rank of the optimizer, between two steps.

    ``dgc_horovod.torch.load_checkpoint`` reads the same files: names are those of the model without DDP.

    Args:
        directory: path, made if it is not there. A checkpoint in it is replaced once the new one is complete; other
            files are left alone. One for each optimizer.
        model: module whose state is saved, with or without DDP around it.
        optimizer: optimizer of `register` or `DistributedOptimizer`, with any compression.
        extra: more values to keep: numbers, texts, tensors, dicts and lists of them; those of rank 0 are kept.

    Raises:
        CheckpointError: on every rank, if any rank could not write, or is between backward() and step().

    Cost: u and v of every rank are written, twice the model's size each with momentum.
    """
    optimizer = bare_optimizer(optimizer)
    state.save(directory, _patient(optimizer), bare(model), optimizer, extra, _group_number(optimizer))


def load_checkpoint(
    directory: str | os.PathLike[str], model: Any, optimizer: Any, residuals: str = checkpoint.REQUIRED
) -> dict[str, Any]:
    """Go on from ``save_checkpoint``, of this or of Horovod's adapter; called on every rank of the optimizer.

    With the same number of ranks training goes on bit for bit. With another number the combined residual of all ranks
    stays the same (to fp32 rounding); all ranks must then see the directory.

    Args:
        directory: path of the checkpoint.
        model, optimizer: model and optimizer, built as they were when it was saved.
        residuals: demand on them: "required"; "if sound": go on without those missing or damaged, whose content
            is lost; "ignored": all start from zero.

    Returns:
        The `extra` of ``save_checkpoint``.

    Raises:
        CheckpointError: on every rank, if a file is missing or damaged on any, or of another model or method.
    """
    optimizer = bare_optimizer(optimizer)
    averages = optimizer._dgc_settings.averages if hasattr(optimizer, "_dgc_settings") else True
    return state.load(directory, _patient(optimizer), bare(model), optimizer, averages, residuals)


def _patient(optimizer: Any) -> ProcessGroupCollectives:
    """Collectives that bear with slow disks."""
    if not hasattr(optimizer, "_dgc_process_group"):
        raise UnsupportedUse("pass the optimizer that was given to register() or DistributedOptimizer()")
    seconds = envvars.checkpoint_seconds()
    if not hasattr(optimizer, "_dgc_patient_group"):
        optimizer._dgc_patient_group = new_group(optimizer._dgc_process_group.ranks, seconds)
    return ProcessGroupCollectives(optimizer._dgc_patient_group, checkpoint.CALLS, seconds)


def _group_number(optimizer: Any) -> int:
    """0 for all ranks, as Horovod numbers its process sets; else the first rank of a part, which is its own."""
    ranks = optimizer._dgc_process_group.ranks
    return 0 if len(ranks) == dist.get_world_size() else 1 + ranks[0]
