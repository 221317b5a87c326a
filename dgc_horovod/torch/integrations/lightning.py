"""Compression for Lightning's Trainer: a callback that registers, saves residuals and resumes them."""

from __future__ import annotations

import functools
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.torch import integrations

if TYPE_CHECKING or "pytorch_lightning" not in sys.modules or "lightning.pytorch" in sys.modules:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:  # the older name of the library
    from pytorch_lightning import Callback, LightningModule, Trainer


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
        save, remove = strategy.save_checkpoint, strategy.remove_checkpoint

        @functools.wraps(save)
        def save_checkpoint(checkpoint: dict[str, Any], filepath: str | Path, *args: Any, **named: Any) -> None:
            save(checkpoint, filepath, *args, **named)
            integrations.save_beside(_beside(filepath), optimizer)

        @functools.wraps(remove)
        def remove_checkpoint(filepath: str | Path) -> None:
            remove(filepath)
            if trainer.is_global_zero:
                shutil.rmtree(_beside(filepath), ignore_errors=True)

        vars(strategy).update(save_checkpoint=save_checkpoint, remove_checkpoint=remove_checkpoint)
        if trainer.ckpt_path:
            integrations.resume(_beside(trainer.ckpt_path), optimizer)


def _beside(checkpoint: str | Path) -> Path:
    return Path(f"{checkpoint}.dgc")
