"""``save_checkpoint`` and ``load_checkpoint`` between the ranks of torch.distributed: Horovod's adapter reads them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.optim import Optimizer

from dgc_horovod import envvars
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.state import checkpoint
from dgc_horovod.torch import state
from dgc_horovod.torch.ddp.carrier import GroupCarrier
from dgc_horovod.torch.ddp.models import bare, bare_optimizer
from dgc_horovod.torch.ddp.transport import Group, ProcessGroupCollectives, new_group
from dgc_horovod.torch.session.session import session_of


def save_checkpoint(directory: str | os.PathLike[str], model: Module, optimizer: Optimizer, **extra: Any) -> None:
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
    state.save(directory, bare(model), bare_optimizer(optimizer), extra, member_of(optimizer))


def load_checkpoint(
    directory: str | os.PathLike[str], model: Module, optimizer: Optimizer, residuals: str = checkpoint.REQUIRED
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
    return state.load(directory, bare(model), bare_optimizer(optimizer), residuals, member_of(optimizer))


def save_residuals(directory: str | os.PathLike[str], optimizer: Optimizer) -> None:
    """Save every rank's residuals alone, beside a checkpoint of the script or of another library.

    Called on every rank of the optimizer, between two steps. Model and ``optimizer.state_dict()`` are saved apart.

    Args:
        directory: path, made if it is not there; see `save_checkpoint`.
        optimizer: see `save_checkpoint`.

    Raises:
        CheckpointError: see `save_checkpoint`.

    Cost: u and v of every rank are written, twice the model's size each with momentum.
    """
    state.save(directory, None, bare_optimizer(optimizer), {}, member_of(optimizer))


def load_residuals(
    directory: str | os.PathLike[str], optimizer: Optimizer, residuals: str = checkpoint.REQUIRED
) -> None:
    """Load what `save_residuals` has saved, after model and optimizer have their state; called on every rank.

    Args:
        directory: path, also of a checkpoint of `save_checkpoint`.
        optimizer: see `load_checkpoint`.
        residuals: see `load_checkpoint`.

    Raises:
        CheckpointError: see `load_checkpoint`.
    """
    state.load(directory, None, bare_optimizer(optimizer), residuals, member_of(optimizer))


@dataclass
class UncompressedOptimizer:
    """What a checkpoint needs of an optimizer whose gradients DDP exchanges, in place of a session.

    Args:
        group: ranks that take part.
        names: name of every parameter.
        patient_group: the same ranks, connected to wait longer; None: not yet.
    """

    group: Group
    names: Mapping[torch.Tensor, str]
    patient_group: Group | None = None


def member_of(optimizer: Optimizer) -> state.Member:
    """This rank, of those that save and load a registered optimizer together.

    Raises:
        UnsupportedUse: it was not registered.
    """
    optimizer = bare_optimizer(optimizer)
    session = session_of(optimizer)
    found = getattr(optimizer, "_dgc", None) if session is None else session.carrier
    if not isinstance(found, (GroupCarrier, UncompressedOptimizer)):
        raise UnsupportedUse("pass the optimizer that was given to register() or DistributedOptimizer()")
    ranks, seconds = found.group.ranks, envvars.checkpoint_seconds()
    if found.patient_group is None:
        found.patient_group = new_group(ranks, seconds)
    patient = ProcessGroupCollectives(found.patient_group, checkpoint.CALLS, seconds)
    averages = isinstance(found, UncompressedOptimizer) or found.settings.averages
    # 0 for all ranks, as Horovod numbers its process sets; else the first rank of a part, which is its own
    number = 0 if len(ranks) == dist.get_world_size() else 1 + ranks[0]
    return state.Member(patient, found.names, averages, number)
