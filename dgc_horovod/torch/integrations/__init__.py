"""Compression inside other libraries' training loops: their checkpoints include every rank's residuals."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from dgc_horovod.config_check import shared_from
from dgc_horovod.torch.ddp.models import bare_optimizer
from dgc_horovod.torch.ddp.optimizer import carrier_of, load_residuals, register, save_residuals
from dgc_horovod.torch.session.session import session_of

RESIDUALS = "dgc_residuals"  # name of the folder in a checkpoint
_log = logging.getLogger("dgc_horovod")


def begin(model: torch.nn.Module, optimizer: Optimizer, compression: Any) -> bool:
    """Register an optimizer whose residuals are saved by `save_beside`.

    Args:
        model, optimizer, compression: see `register`.

    Returns:
        False, with a warning, if there is one process, which exchanges nothing.

    Raises:
        ConfigError, UnsupportedUse, RankMismatch: see `register`.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        _log.warning("dgc_horovod: NOT ACTIVE: there is one process, which exchanges nothing")
        return False
    register(model, optimizer, compression)
    session = session_of(bare_optimizer(optimizer))
    if session is not None:
        session.saves_residuals = True
    return True


def save_beside(checkpoint: str | Path, optimizer: Optimizer, name: str = RESIDUALS) -> None:
    """Save every rank's residuals in a folder of another library's checkpoint; call it on every rank.

    Args:
        checkpoint: folder of the checkpoint.
        optimizer: optimizer that was passed to ``register``.
        name: name of the folder for residuals.

    Cost: see `save_residuals`.
    """
    save_residuals(Path(checkpoint) / name, optimizer)


def resume(checkpoint: str | Path, optimizer: Optimizer, name: str = RESIDUALS) -> None:
    """Load residuals of `save_beside`; call it on every rank.

    If rank 0 finds none in the checkpoint, they start at zero, with a warning.

    Args:
        checkpoint: folder of the checkpoint.
        optimizer: registered optimizer with its state loaded.
        name: name of the folder for residuals.
    """
    folder = Path(checkpoint) / name
    if shared_from(carrier_of(optimizer).patient(), b"there" * folder.is_dir(), "residuals"):
        load_residuals(folder, optimizer)
    elif dist.get_rank() == 0:
        _log.warning(
            "dgc_horovod: training resumes without residuals, as %s has no folder %s: gradients that were not applied "
            "when it was saved are lost",
            checkpoint,
            name,
        )
