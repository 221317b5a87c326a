"""Compression inside of other libraries' training loops: their checkpoints carry every rank's residuals."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from dgc_horovod.config_check import shared_from
from dgc_horovod.torch.ddp.checkpoints import load_residuals, member_of, save_residuals
from dgc_horovod.torch.ddp.models import bare_optimizer
from dgc_horovod.torch.ddp.optimizer import register
from dgc_horovod.torch.session.session import session_of

RESIDUALS = "dgc_residuals"  # the folder inside of a checkpoint
_log = logging.getLogger("dgc_horovod")


def begin(model: torch.nn.Module, optimizer: Optimizer, compression: Any) -> bool:
    """Register an optimizer whose residuals are saved by `save_beside`.

    Args:
        model, optimizer, compression: see `register`.

    Returns:
        False, with one line, where there is one process: it exchanges nothing.

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
    """Save every rank's residuals in a folder of a checkpoint that another library writes; called on every rank.

    Args:
        checkpoint: its folder.
        optimizer: as it was given to ``register``.
        name: of the folder inside.

    Cost: see `save_residuals`.
    """
    save_residuals(Path(checkpoint) / name, optimizer)


def resume(checkpoints: Sequence[str | Path], optimizer: Optimizer, name: str = RESIDUALS) -> None:
    """Load residuals that `save_beside` has saved, from the first checkpoint that has some; called on every rank.

    Rank 0 says which one that is. Where none has any, residuals start at zero, and one line says so.

    Args:
        checkpoints: folders where the checkpoint may be.
        optimizer: registered, with its state loaded.
        name: of the folder inside.
    """
    found = next((str(Path(each) / name) for each in checkpoints if (Path(each) / name).is_dir()), "")
    folder = shared_from(member_of(optimizer).collectives, found.encode(), "residuals").decode()
    if folder:
        load_residuals(folder, optimizer)
    elif dist.get_rank() == 0:
        _log.warning(
            "dgc_horovod: training resumes without residuals, as %s has no folder %s: gradients that were not applied "
            "when it was saved are lost",
            " or ".join(map(str, checkpoints)),
            name,
        )
