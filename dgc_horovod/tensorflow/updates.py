"""A Keras optimizer's arithmetic (`dgc_horovod.arithmetic`) in its slots and its variables.

For plain error feedback the user's optimizer takes what the exchange brings as a gradient. Where its arithmetic is
split, what is left is the plain step ``w -= lr * mean(s)``. Keras' weight decay is decoupled for every optimizer, and
stays its own.

A checkpoint's slots (velocity, moments) are taken over by the engine at the first step after they were loaded, and
emptied. When Keras saves, they get what the rank has. The reverse is `hand_back`, inside a graph or out of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dgc_horovod.arithmetic import SGD, Adam, Arithmetic, Change, Left, Options, choose
from dgc_horovod.config import DGCConfig
from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.kernels.contract import Accumulation
from dgc_horovod.state.residual_state import FIRST, MOMENTUM, RESIDUAL, SECOND, Arrays
from dgc_horovod.tensorflow.wrapping.variables import Key, key_of, native

STOCK: dict[type[keras.optimizers.Optimizer], Arithmetic] = {keras.optimizers.SGD: SGD(), keras.optimizers.Adam: Adam()}
SLOTS = {MOMENTUM: "momentums", FIRST: "_momentums", SECOND: "_velocities"}  # lists of an optimizer's, by part


def update_of(
    optimizer: keras.optimizers.Optimizer, user_class: type[keras.optimizers.Optimizer], config: DGCConfig | None
) -> Update:
    """How `optimizer` is updated; of a subclass that overrides ``update_step`` no arithmetic is known, but its slots.

    Args:
        optimizer: wrapped Keras optimizer.
        user_class: class of the user's.
        config: compression settings; None: nothing is compressed.

    Raises:
        UnsupportedUse: Adafactor; Adam's amsgrad under momentum correction.
    """
    local = config is not None and config.exchanges_weights
    bases = [base for base in STOCK if (issubclass if local else _steps_as)(user_class, base)]
    stock = STOCK[bases[0]] if bases else Arithmetic()
    unknown = "" if local or stock.is_split else user_class.__name__
    if config is None:
        return Update(Arithmetic(), optimizer, unknown=unknown)
    if _steps_as(user_class, keras.optimizers.Adafactor) and not (local or config.sends_all):
        raise UnsupportedUse(
            f"{unknown} of Keras divides by what it knows of rows and columns of a gradient: where nothing of a "
            "row and a column is sent, as happens under compression, its weights become NaN. Use Adam or AdamW; or "
            "local steps, Compression.local(...), which leave its steps to it; or Compression.none"
        )
    arithmetic, notices = choose(stock, user_class, map(options_of, [optimizer]), config)
    return Update(arithmetic, optimizer, notices, unknown)


def _steps_as(user_class: type[keras.optimizers.Optimizer], base: type[keras.optimizers.Optimizer]) -> bool:
    return issubclass(user_class, base) and user_class.update_step is base.update_step


def options_of(optimizer: keras.optimizers.Optimizer) -> Options:
    """Those of an optimizer that is known."""
    if isinstance(optimizer, keras.optimizers.SGD):
        return Options(momentum=float(optimizer.momentum), nesterov=bool(optimizer.nesterov))
    b1, b2, eps = map(float, (optimizer.beta_1, optimizer.beta_2, optimizer.epsilon))
    return Options(b1=b1, b2=b2, eps=eps, amsgrad=bool(optimizer.amsgrad))


class Update:
    """What an optimizer does with what was exchanged.

    Args:
        arithmetic: that of what is exchanged.
        optimizer: wrapped Keras optimizer; None: the gradients go back to a tape's script.
        notices: texts for the user, each said once.
        unknown: name of an optimizer of whose arithmetic nothing is known; "" for others.

    Attributes:
        is_tapes: whether no optimizer is known.
    """

    _optimizer: keras.optimizers.Optimizer

    def __init__(
        self,
        arithmetic: Arithmetic,
        optimizer: keras.optimizers.Optimizer | None = None,
        notices: Collection[str] = (),
        unknown: str = "",
    ) -> None:
        self.arithmetic, self.notices, self.unknown = arithmetic, list(notices), unknown
        self.is_tapes, self._optimizer = optimizer is None, optimizer

    @property
    def parts(self) -> tuple[str, ...]:
        """What a rank keeps of a compressed variable, and hands back."""
        return tuple(part for part in self.arithmetic.parts if part != MOMENTUM or self._options.momentum)

    @property
    def _options(self) -> Options:
        return options_of(self._optimizer) if self.arithmetic.is_split else Options()

    def _slots(self, key: Key, parts: Collection[str]) -> dict[str, tf.Variable]:
        """What the optimizer keeps of the variable `key`, of these parts; nothing in SGD without momentum."""
        lists = {part: getattr(self._optimizer, SLOTS[part]) for part in parts}
        index = self._optimizer._trainable_variables_indices if parts else {}
        return {part: native(variables[index[key[0]]]) for part, variables in lists.items() if variables}

    def entering(self, buckets: OptimizerExchange) -> dict[str, Accumulation]:
        """How the gradients of compressed variables enter the residual in the step that begins, by name."""
        options = self._options  # made once for all of them
        return {name: self.arithmetic.accumulation(options, buckets, name) for name in buckets.compressed}

    # -- the optimizer's slots

    def slots(self, key: Key) -> list[tf.Variable]:
        """The optimizer's own variables for the variable `key` whose place the engine takes."""
        return list(self._slots(key, self.arithmetic.slots).values())

    def take_over(
        self, buckets: OptimizerExchange, name: str, slots: list[np.ndarray], rate: float, iterations: int
    ) -> None:
        """Put into `buckets` what stood in `slots`, which are emptied.

        Args:
            buckets: all that this rank keeps.
            name: name of the variable there.
            slots: values of the optimizer's variables that `slots` names, whole and flat, float32.
            rate: learning rate; for a sum over ranks, times their number.
            iterations: number of steps that the optimizer has made, >= 0.
        """
        if buckets.second[name].known or not slots[-1].any():
            return
        share = 1 if buckets.averages else buckets.workers  # each rank has its part of a sum
        owed: np.ndarray = slots[0] * np.float32(self.arithmetic.owes(self._options) / share)
        if MOMENTUM in self.arithmetic.slots:  # Keras' velocity is -lr times the sum of past gradients
            owed = slots[0] / np.float32(-rate) if rate else np.zeros_like(slots[0])
        taken = dict(zip(self.arithmetic.slots, [owed, *slots[1:]], strict=True))
        self.arithmetic.take_over(buckets, name, taken, self._options, max(1, iterations))

    def for_slots(self, buckets: OptimizerExchange, name: str, rate: float) -> list[np.ndarray]:
        """The reverse: what this rank has, as the optimizer's slots would hold it, for a file; [] if they have it."""
        found = self.arithmetic.give_back(buckets, name, self._options, int(self._optimizer.iterations))
        return [np.float32(-rate) * x if part == MOMENTUM else x for part, x in found.items()]

    def own(self, key: Key) -> Arrays:
        """The slots of the variable `key` that are this rank's alone, for its record."""
        slots = self._slots(key, self.arithmetic.own)
        own = {part: slot.numpy().astype(np.float32).reshape(-1) for part, slot in slots.items()}
        return own if all(np.isfinite(x).all() for x in own.values()) else {}  # no file takes others

    def take_own(self, key: Key, arrays: Arrays) -> None:
        """Put the slots in `arrays` back."""
        with tf.init_scope():  # the first step may be under construction
            for part, slot in self._slots(key, self.arithmetic.own).items():
                if part in arrays:
                    slot.assign(tf.cast(arrays[part].reshape(slot.shape), slot.dtype))

    # -- nothing left behind

    def hand_back(
        self, key: Key, variable: tf.Variable, left: Left, rate: tf.Tensor | float, compressed: bool, ends: bool = False
    ) -> Any:
        """Apply what all ranks together had kept of a variable, before a step of the user's own optimizer.

        Args:
            key, variable: key of the variable, and the tf.Variable.
            left: what is left of it, in its shape, by part: arrays or tensors.
            rate: learning rate, a number or a scalar tensor.
            compressed: whether it is on the sparse path.
            ends: whether no such step follows.

        Returns:
            What cannot be applied, as it is a gradient, to be added to that of the next step; or None.
        """
        options = self._options

        def changed(left: Left, is_gradient: bool) -> Any:
            change = self.arithmetic.flushed(left, options, is_gradient, ends)
            return self._apply(change, key, variable, rate)

        if not (compressed and self.arithmetic.dense_is_stock):
            return changed(left, not compressed)
        steps = tf.cast(native(self._optimizer.iterations), tf.float64)
        bias = 1 - tf.pow(tf.constant(options.b2, tf.float64), steps)
        stock = {**left, SECOND: tf.cast(bias, tf.float32) * left[SECOND]}

        def apply() -> tf.Tensor:
            changed(stock, False)
            return tf.zeros_like(left[RESIDUAL])

        known = tf.reduce_any(tf.not_equal(left[SECOND], 0.0))  # else the slots have everything
        return tf.cond(known, apply, lambda: tf.identity(left[RESIDUAL]))

    def _apply(self, change: Change, key: Key, variable: tf.Variable, rate: tf.Tensor | float) -> Any:
        slots, rate = self._slots(key, self.arithmetic.slots), rate if change.rate is None else change.rate
        if change.momentum is not None and MOMENTUM in slots:
            slots[MOMENTUM].assign_add(tf.cast(-rate * change.momentum, slots[MOMENTUM].dtype))
        for part, x in change.slots.items():
            slots[part].assign(tf.cast(x, slots[part].dtype))
        if change.step is not None:
            variable.assign_sub(tf.cast(rate * change.ahead * change.step, variable.dtype))
        return change.kept

    def flush(self, left: Sequence[tuple[Any, Left]], compressed: Collection[Key]) -> list[Any]:
        """Apply what all ranks together had kept, where that is no step of the user's optimizer.

        Args:
            left: variables and what is left of each, in its shape, by part.
            compressed: keys of the variables on the sparse path.

        Returns:
            For each variable what cannot be applied, and is to be kept on every rank; or None.
        """
        rate, keyed = float(self._optimizer.learning_rate), [(key_of(v), native(v), parts) for v, parts in left]
        return [self.hand_back(key, v, parts, rate, key in compressed, ends=True) for key, v, parts in keyed]
