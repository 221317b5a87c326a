"""Compression for Lightning's Trainer: a callback that registers, saves residuals and resumes them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.names import put_around
from dgc_horovod.torch import integrations

if TYPE_CHECKING or "pytorch_lightning" not in sys.modules or "lightning.pytorch" in sys.modules:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import Strategy
else:  # the older name of the library
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.strategies import Strategy


class CompressCallback(Callback):
    """Compress the gradients of a Trainer with ``strategy="ddp"``.

    ``Trainer(strategy="ddp", callbacks=[CompressCallback(Compression.dgc(density=0.01))])``. Beside each checkpoint
    ``NAME.ckpt`` there is a folder ``NAME.ckpt.dgc`` with the residuals of every rank; both are removed together.

    Args:
        compression: see `register`.

    Raises:
        UnsupportedUse: there is more than one optimizer.

    Cost: see `save_residuals`, at each checkpoint.
    """

    def __init__(self, compression: Any = None) -> None:
        self.compression = compression
        self._followed: Strategy | None = None  # whose checkpoints have residuals beside them
        self._optimizer: Optimizer | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Register the optimizer; load residuals if training resumes."""
        if len(trainer.optimizers) != 1:
            raise UnsupportedUse(
                f"CompressCallback compresses one optimizer, got {len(trainer.optimizers)}; call register() for "
                "each of them and its DistributedDataParallel model"
            )
        optimizer, strategy = trainer.optimizers[0], trainer.strategy
        assert strategy.model is not None
        if not integrations.begin(strategy.model, optimizer, self.compression):
            return
        self._optimizer = optimizer
        if strategy is not self._followed:  # it is the same in a second fit()
            self._followed = strategy
            self._follow(strategy, trainer)
        if trainer.ckpt_path:
            integrations.resume(_beside(trainer.ckpt_path), optimizer)

    def _follow(self, strategy: Strategy, trainer: Trainer) -> None:
        @put_around(strategy, "save_checkpoint")
        def save_checkpoint(stock: Any, checkpoint: object, filepath: str | Path, *args: Any, **named: Any) -> None:
            stock(checkpoint, filepath, *args, **named)
            assert self._optimizer is not None
            integrations.save_beside(_beside(filepath), self._optimizer)

        @put_around(strategy, "remove_checkpoint")
        def remove_checkpoint(stock: Any, filepath: str | Path) -> None:
            stock(filepath)
            if trainer.is_global_zero:
                shutil.rmtree(_beside(filepath), ignore_errors=True)


def _beside(checkpoint: str | Path) -> Path:
    return Path(f"{checkpoint}.dgc")
