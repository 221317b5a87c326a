"""Compression for ``transformers.Trainer``: a callback that registers, saves residuals and resumes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dgc_horovod.names import put_around
from dgc_horovod.torch import integrations


class CompressCallback(TrainerCallback):
    """Compress the gradients of a Trainer, started by torchrun.

    ``trainer.add_callback(CompressCallback(trainer, Compression.dgc(density=0.01)))``, before ``trainer.train()``.
    Each ``checkpoint-N`` gets a folder ``dgc_residuals`` with a file of every rank. Training that resumes from it with
    the same number of ranks continues bit for bit.

    Args:
        trainer: Trainer to compress.
        compression: see `register`.

    Cost: see `save_residuals`, at each checkpoint.
    """

    def __init__(self, trainer: Trainer, compression: Any = None) -> None:
        self.trainer, self.compression, self.active = trainer, compression, False
        self._given: str | bool | None = None  # the checkpoint that train() was told to resume from

        @put_around(trainer, "train")
        def train(stock: Any, resume_from_checkpoint: str | bool | None = None, *args: Any, **named: Any) -> Any:
            self._given = resume_from_checkpoint
            return stock(resume_from_checkpoint, *args, **named)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Register the optimizer; load residuals if training resumes."""
        trainer = self.trainer
        assert trainer.optimizer is not None
        self.active = integrations.begin(trainer.model_wrapped, trainer.optimizer, self.compression)
        if self.active and self._given:
            folder = self._given if isinstance(self._given, str) else _checkpoint(args, state)
            integrations.resume(folder, trainer.optimizer)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Save residuals in the checkpoint that the Trainer has written."""
        if self.active:
            assert self.trainer.optimizer is not None
            integrations.save_beside(_checkpoint(args, state), self.trainer.optimizer)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
