"""How the arithmetic of Keras' SGD is split."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import tensorflow as tf

from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.kernels.contract import Accumulation, MomentumCorrection
from dgc_horovod.state.residual_state import MOMENTUM, RESIDUAL
from dgc_horovod.tensorflow.updates.base import Left, SplitUpdate, index_of, kept_of, part_of
from dgc_horovod.tensorflow.wrapping.variables import Key


class SGDUpdate(SplitUpdate):
    """SGD with momentum: the engine's u carries the local momentum, without the learning rate."""

    @property
    def parts(self) -> tuple[str, ...]:  # type: ignore[override]
        return (RESIDUAL, MOMENTUM) if self._optimizer.momentum else (RESIDUAL,)

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self._optimizer = optimizer

    def accumulation(self, buckets: OptimizerExchange, name: str) -> Accumulation:
        return MomentumCorrection(float(self._optimizer.momentum), bool(self._optimizer.nesterov))

    def slots(self, key: Key) -> list[Any]:
        optimizer = self._optimizer
        return [optimizer.momentums[index_of(optimizer, key)]] if optimizer.momentums else []

    def take_over(
        self, buckets: OptimizerExchange, name: str, slots: list[np.ndarray], rate: float, iterations: int
    ) -> None:
        if name in buckets.place and rate and slots[0].any():  # Keras' velocity is -lr times the sum of past gradients
            engine, i = buckets.place[name]
            engine.state.add_momentum(i, kept_of(engine, i, slots[0] / np.float32(-rate)))

    def for_slots(self, buckets: OptimizerExchange, name: str, rate: float) -> list[np.ndarray]:
        if buckets.topology.node_size > 1:  # slices, and zeros in the place of the others would not be momentum
            return []
        engine, i = buckets.place[name]
        return [] if engine.state.u is None else [np.float32(-rate) * part_of(engine, i, engine.state.u)]

    def hand_back(self, key: Key, variable: Any, left: Left, rate: Any, compressed: bool) -> Any:
        """All of v is applied, and u joins the velocity, from which it is taken over again: nothing is lost.

        Of an uncompressed variable v is a gradient, whose momentum is still to come.
        """
        if not compressed:
            return left[RESIDUAL]
        if MOMENTUM in left:
            for slot in self.slots(key):
                slot.assign_add(tf.cast(-rate * left[MOMENTUM], slot.dtype))
        variable.assign_sub(tf.cast(rate * left[RESIDUAL], variable.dtype))
        return None

    def _flushed(self, variable: Any, left: Left, rate: float, key: Key, compressed: Collection[Key]) -> Any:
        """Without a next step, a gradient is a step with its momentum."""
        v = self.hand_back(key, variable, left, rate, key in compressed)
        if v is not None:
            for slot in self.slots(key):
                slot.assign_add(tf.cast(-rate * v, slot.dtype))
            ahead = 1 + float(self._optimizer.momentum) if self._optimizer.nesterov else 1.0
            variable.assign_sub(tf.cast(rate * ahead * v, variable.dtype))
        return None
