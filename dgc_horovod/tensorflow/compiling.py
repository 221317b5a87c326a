"""What ``model.compile`` must know of a distributed optimizer.

Keras decides two things there that would break a job: on a GPU it compiles the step with XLA, in which no Horovod
operation runs, and under mixed_float16 it puts a LossScaleOptimizer around the optimizer, which would skip a step on
one rank only. After Keras' own ``compile``, both are set right. Models without our optimizer are not touched.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import keras
from keras.src.trainers.trainer import Trainer


def install() -> None:
    """Wrap ``Trainer.compile``, once a process."""
    if not hasattr(Trainer.compile, "_dgc_installed"):
        Trainer.compile = _setting_right(Trainer.compile)


def _setting_right(compile_: Any) -> Any:
    @functools.wraps(compile_)
    def compile(self: Any, *args: Any, **kwargs: Any) -> None:
        compile_(self, *args, **kwargs)
        set_right(self, explicit=kwargs.get("jit_compile") is True)

    compile._dgc_installed = True  # type: ignore[attr-defined]
    return compile


def set_right(model: Any, explicit: bool = False) -> None:
    """Make a compiled `model` fit for a distributed optimizer, if it has one.

    Args:
        model: compiled.
        explicit: whether the user asked for XLA.
    """
    from dgc_horovod.tensorflow.optimizer import distribute, is_distributed

    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and is_distributed(optimizer.inner_optimizer):
        if not is_distributed(optimizer):
            model.optimizer = optimizer = distribute(optimizer, optimizer.inner_optimizer._dgc.settings)
    if is_distributed(optimizer) and model.jit_compile:
        if explicit:
            warnings.warn(
                "jit_compile=True is ignored: no Horovod operation runs inside XLA, which a DistributedOptimizer needs",
                stacklevel=4,
            )
        model.jit_compile = False
