"""Compression for Hugging Face's accelerate: ``save_state`` and ``load_state`` include every rank's residuals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator

from dgc_horovod.names import put_around
from dgc_horovod.torch import integrations


def compress(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    compression: Any = None,
    name: str = integrations.RESIDUALS,
) -> None:
    """Compress the gradients of a prepared model, and keep residuals in accelerate's checkpoints.

    ``compress(accelerator, model, optimizer, Compression.dgc(density=0.01))``, after ``accelerator.prepare``.

    Args:
        accelerator: accelerator that has prepared model and optimizer.
        model, optimizer: results of ``accelerator.prepare``.
        compression: see `register`.
        name: name of the folder in each checkpoint; it must differ between optimizers.

    Raises:
        ConfigError, UnsupportedUse, RankMismatch: see `register`.

    Cost: see `save_residuals`, at each ``save_state``.
    """
    if not integrations.begin(model, optimizer, compression):
        return
    folders: list[str] = []
    accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: integrations.save_beside(folder, optimizer, name)
    )
    accelerator.register_load_state_pre_hook(lambda models, folder: folders.append(folder))

    @put_around(accelerator, "load_state")
    def load_state(stock: Callable[..., None], *args: Any, **named: Any) -> None:
        stock(*args, **named)  # it loads the optimizer's state, which clears residuals
        integrations.resume(folders.pop(), optimizer, name)
