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
    """Wrap ``Trainer.compile``, once a process, so that ``set_right(model, explicit)`` follows it.

    Args:
        set_right: function of the compiled model, and of whether the user asked for XLA.
    """
    if not hasattr(Trainer.compile, "_dgc_installed"):
        Trainer.compile = _followed_by(set_right, Trainer.compile)


def _followed_by(set_right: Callable[[Any, bool], None], compile_: Any) -> Any:
    @functools.wraps(compile_)
    def compile(self: Any, *args: Any, **kwargs: Any) -> None:
        compile_(self, *args, **kwargs)
        set_right(self, kwargs.get("jit_compile") is True)

    compile._dgc_installed = True  # type: ignore[attr-defined]
    return compile
