"""What ``model.compile`` must know of a distributed optimizer.

Keras decides two things there that would break a job: on a GPU it compiles the step with XLA, in which no Horovod
operation runs, and under mixed_float16 it puts a LossScaleOptimizer around the optimizer, which would skip a step on
one rank only. After Keras' own ``compile``, both are set right. Models without our optimizer are not touched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from keras.src.trainers.trainer import Trainer


def install(set_right: Callable[[Any, bool], None]) -> None:
    """Wrap ``Trainer.compile``, so that ``set_right(model, explicit)`` follows it.

    Args:
        set_right: function of the compiled model, and of whether the user asked for XLA.
    """
    stock = Trainer.compile

    @functools.wraps(stock)
    def compile(self: Trainer, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        set_right(self, kwargs.get("jit_compile") is True)

    Trainer.compile = compile
