"""A Keras optimizer's arithmetic (`dgc_horovod.arithmetic`) in its slots and variables, and the place of its momentum.

With plain error feedback the user's optimizer steps with the exchanged update as its gradient. If its arithmetic is
split, only the plain step ``w -= lr * mean(s)`` remains. Keras' weight decay is decoupled for every optimizer, and
stays as it is.

A checkpoint's slots (velocity, moments) are taken over by the engine at the first step after loading, and emptied. When
Keras saves, the file gets the engine's values. The reverse is `hand_back`, inside a graph or out of it.

`SlotOwnership` knows where the momentum of a variable is, in an engine or in the slots, and detects reloads: a state
machine of one optimizer; docs/decisions/tensorflow.md has its diagram. Holders refer to it weakly: u and v are freed
with the optimizer at once.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from dgc_horovod.arithmetic import SGD, Adam, Arithmetic, Change, Left, Options, choose
from dgc_horovod.config import DGCConfig
from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.kernels.contract import Accumulation
from dgc_horovod.state.residual_state import FIRST, MOMENTUM, RESIDUAL, SECOND, ResidualState
from dgc_horovod.tensorflow.variables import Key, native

_log = logging.getLogger("dgc_horovod")
STOCK: dict[type[keras.optimizers.Optimizer], Arithmetic] = {keras.optimizers.SGD: SGD(), keras.optimizers.Adam: Adam()}
# attributes of an optimizer, lists, by part
SLOTS = {MOMENTUM: "momentums", FIRST: "_momentums", SECOND: "_velocities"}


def update_of(
    optimizer: keras.optimizers.Optimizer, user_class: type[keras.optimizers.Optimizer], config: DGCConfig | None
) -> Update:
    """Return the update of `optimizer`; a subclass that overrides ``update_step`` has known slots, not arithmetic.

    Args:
        optimizer: wrapped Keras optimizer.
        user_class: class of the user's optimizer.
        config: compression settings; None: nothing is compressed.

    Raises:
        UnsupportedUse: Adafactor; Adam's amsgrad under momentum correction.
    """
    local = config is not None and config.exchanges_weights
    known = (kind for base, kind in STOCK.items() if (issubclass if local else _steps_as)(user_class, base))
    stock = next(known, Arithmetic())
    unknown = "" if local or stock.is_split else user_class.__name__
    if config is None:
        return Update(Arithmetic(), optimizer, unknown=unknown)
    if _steps_as(user_class, keras.optimizers.Adafactor) and not (local or config.sends_all):
        raise UnsupportedUse(
            f"{unknown} of Keras divides by its statistics of the gradient's rows and columns: where compression sends "
            "nothing of a row and a column, weights become NaN. Use Adam or AdamW; or local steps, "
            "Compression.local(...), which give the optimizer plain gradients; or Compression.none"
        )
    arithmetic, notices = choose(stock, user_class, map(options_of, [optimizer]), config)
    return Update(arithmetic, optimizer, notices, unknown)


def _steps_as(user_class: type[keras.optimizers.Optimizer], base: type[keras.optimizers.Optimizer]) -> bool:
    return issubclass(user_class, base) and user_class.update_step is base.update_step


def options_of(optimizer: keras.optimizers.Optimizer) -> Options:
    """Return the options of an optimizer of known arithmetic; one that it lacks has no effect."""
    found = {name: getattr(optimizer, name, 0) for name in ("momentum", "nesterov", "amsgrad")}
    b1, b2, eps = (getattr(optimizer, name, 0) for name in ("beta_1", "beta_2", "epsilon"))
    return Options.read({**found, "b1": b1, "b2": b2, "eps": eps})


class Update:
    """The application of exchanged updates by an optimizer.

    Args:
        arithmetic: arithmetic of the exchange.
        optimizer: wrapped Keras optimizer; None: the gradients go back to a tape's script.
        notices: texts for the user, each logged once.
        unknown: name of an optimizer of unknown arithmetic; "" for others.

    Attributes:
        is_tapes: whether there is no optimizer.
    """

    optimizer: keras.optimizers.Optimizer

    def __init__(
        self,
        arithmetic: Arithmetic,
        optimizer: keras.optimizers.Optimizer | None = None,
        notices: Collection[str] = (),
        unknown: str = "",
    ) -> None:
        self.arithmetic, self.notices, self.unknown = arithmetic, list(notices), unknown
        self.is_tapes, self.optimizer = optimizer is None, optimizer

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts of a compressed variable's state in the engine, which are handed back."""
        momentum = self.arithmetic.momentum(self._options)
        return tuple(part for part in self.arithmetic.parts if part != MOMENTUM or momentum)

    @property
    def _options(self) -> Options:
        return options_of(self.optimizer) if self.arithmetic.is_split else Options()

    def slots(self, key: Key, parts: Collection[str]) -> dict[str, tf.Variable]:
        """Return the optimizer's slots of the variable `key`, by part; none for SGD without momentum."""
        lists = {part: getattr(self.optimizer, SLOTS[part]) for part in parts}
        index = self.optimizer._trainable_variables_indices if parts else {}
        return {part: native(variables[index[key[0]]]) for part, variables in lists.items() if variables}

    def entering(self, buckets: OptimizerExchange, rate: float) -> dict[str, Accumulation]:
        """Return, by name, the way in which gradients of compressed variables enter the residual in this step.

        Args:
            buckets: exchange of the optimizer.
            rate: learning rate of this step.
        """
        options = self._options._replace(rate=rate)  # made once for all of them
        return {name: self.arithmetic.accumulation(options, buckets, name) for name in buckets.compressed}

    # -- the optimizer's slots that the engine replaces

    def take_over(
        self, buckets: OptimizerExchange, name: str, slots: list[np.ndarray], rate: float, iterations: int
    ) -> None:
        """Move the values of `slots` into `buckets`; the caller empties the slots.

        Args:
            buckets: exchange of the optimizer.
            name: name of the variable there.
            slots: values of the optimizer's variables that ``arithmetic.slots`` names, whole and flat, float32.
            rate: learning rate.
            iterations: number of steps that the optimizer has made, >= 0.
        """
        if buckets.second[name].known or not slots[-1].any():
            return
        share = 1 if buckets.averages else buckets.workers  # each rank has its part of a sum
        owed: np.ndarray = slots[0] * np.float32(self.arithmetic.owes(self._options) / share)
        if MOMENTUM in self.arithmetic.slots:  # Keras' velocity is -lr times the sum of past gradients
            owed = slots[0] / np.float32(-rate * share) if rate else np.zeros_like(slots[0])
        taken = dict(zip(self.arithmetic.slots, [owed, *slots[1:]], strict=True))
        self.arithmetic.take_over(buckets, name, taken, self._options, max(1, iterations))

    def for_slots(self, buckets: OptimizerExchange, name: str, rate: float) -> list[np.ndarray]:
        """Return the engine's state as values of the optimizer's slots, for a file; [] if the slots have it."""
        found = self.arithmetic.give_back(buckets, name, self._options, int(self.optimizer.iterations))
        factor = np.float32(-rate * (1 if buckets.averages else buckets.workers))  # a sum is shared out
        return [factor * x if part == MOMENTUM else x for part, x in found.items()]

    # -- nothing left behind

    def hand_back(
        self, key: Key, variable: tf.Variable, left: Left, rate: tf.Tensor | float, compressed: bool, ends: bool = False
    ) -> Any:
        """Apply the combined state of all ranks for a variable, before a step of the user's own optimizer.

        Args:
            key, variable: key of the variable, and the tf.Variable.
            left: combined state of it, in its shape, by part: arrays or tensors.
            rate: learning rate, a number or a scalar tensor.
            compressed: whether it is on the sparse path.
            ends: whether no such step follows.

        Returns:
            A gradient that cannot be applied, to be added to that of the next step; or None.
        """
        options = self._options

        def changed(left: Left, is_gradient: bool) -> Any:
            change = self.arithmetic.flushed(left, options, is_gradient, ends)
            return self._apply(change, key, variable, rate)

        if not (compressed and SECOND in left):
            return changed(left, not compressed)
        steps = tf.cast(native(self.optimizer.iterations), tf.float64)
        bias = 1 - tf.pow(tf.constant(options.b2, tf.float64), steps)
        stock = {**left, SECOND: tf.cast(bias, tf.float32) * left[SECOND]}

        def apply() -> tf.Tensor:
            changed(stock, False)
            return tf.zeros_like(left[RESIDUAL])

        known = tf.reduce_any(tf.not_equal(left[SECOND], 0.0))  # otherwise the slots have everything
        return tf.cond(known, apply, lambda: tf.identity(left[RESIDUAL]))

    def _apply(self, change: Change, key: Key, variable: tf.Variable, rate: tf.Tensor | float) -> Any:
        slots, rate = self.slots(key, self.arithmetic.slots), rate if change.rate is None else change.rate
        if change.momentum is not None and MOMENTUM in slots:
            slots[MOMENTUM].assign_add(tf.cast(-rate * change.momentum, slots[MOMENTUM].dtype))
        for part, x in change.slots.items():
            slots[part].assign(tf.cast(x, slots[part].dtype))
        if change.step is not None:
            variable.assign_sub(tf.cast(rate * change.ahead * change.step, variable.dtype))
        return change.kept


_SKIPPED_AT_MOST = 100  # exchanges that a script may leave out between two
Place = tuple[int, Key]  # of a variable: index among the exchanges with states of their own, and key


class Holder:
    """The state of one exchange's variables.

    Args:
        places: places of the variables.
        names: names of the variables in `buckets`.
        buckets: u, v and the second moment; replaced when the ranks change.

    Attributes:
        in_slots: whether the momentum is in the optimizer's slots, which the next step takes over.
    """

    def __init__(self, places: Sequence[Place], names: Sequence[str], buckets: OptimizerExchange) -> None:
        self.places, self.names, self.buckets, self.in_slots = places, names, buckets, True

    def begins(self, own_step: bool) -> bool:
        """Begin a step, or an `own_step` of the optimizer; returns whether the slots are to be taken over."""
        takes_over, self.in_slots = self.in_slots and not own_step, own_step
        return takes_over

    def bring(self, i: int, source: Holder, j: int) -> None:
        """Move the state of variable j of `source` to variable i."""
        here, there, name, its_name = self.buckets, source.buckets, self.names[i], source.names[j]
        if name in here.place and its_name in there.place:
            (engine, k), (other, m) = here.place[name], there.place[its_name]
            engine.state.move_in(k, other.state, m)
        if name in here.compressed:
            here.second[name].know(there.second[its_name].values)
            there.second.forget(its_name)


class SlotOwnership:
    """The holders of one optimizer, or of all tapes with the same settings.

    A reload of a checkpoint is reported by `reloaded`, or detected by a jump of the optimizer's iterations.

    Args:
        stride: iterations from one exchange to the next, >= 1.
        grows: whether iterations grow with every applied step. A tape has none, and local steps may have the same at
            two exchanges.
        ranks: ranks that exchange; the first one logs messages.

    Attributes:
        loaded: record of this rank for the first exchange, which is not made yet.
    """

    def __init__(self, stride: int, grows: bool, ranks: hvd.ProcessSet) -> None:
        self.stride, self._grows, self._ranks = stride, grows, ranks
        self.loaded: ResidualState | None = None
        self._holders: list[Holder] = []
        self._at: dict[Place, tuple[Holder, int]] = {}  # the last exchange of the variable
        self._last: int | None = None  # iterations at the last exchange
        self._applied = 0  # applied steps of all exchanges at that time
        self._again_at: int | None = None  # the same at the last repeated iteration
        self._untold = False  # whether a reload is not logged yet

    def add(self, holder: Holder) -> Holder:
        """Add the holder of a new exchange."""
        self._holders.append(holder)
        return holder

    def forget(self, holder: Holder) -> None:
        """Remove the holder of a deleted exchange."""
        self._holders.remove(holder)
        self._at = {place: at for place, at in self._at.items() if at[0] is not holder}

    # -- events

    def reloaded(self) -> None:
        """Drop the engines' state, which belongs to the weights before: the optimizer's variables were loaded.

        The next step takes over the slots; a flush or a save may come before it.
        """
        self.clear()
        self._untold = True
        for holder in self._holders:
            holder.in_slots = True

    def look(self, iterations: int) -> None:
        """Call `reloaded` if the optimizer's iterations have jumped. For use between steps, before state is read."""
        if self._jump_to(iterations):
            self.reloaded()

    def resumed(self, iterations: int) -> None:
        """Note that weights, optimizer and residuals were loaded together, at `iterations`."""
        # as if the last step had been exchanged: local steps may exchange before the next one
        self._last, self._untold = iterations - 1, False

    def step_begins(self, holder: Holder, iterations: int) -> None:
        """Begin a step of `holder` at the optimizer's `iterations`: move its variables' state from other holders."""
        if self._stays_at(iterations) or self._jump_to(iterations):
            self.reloaded()
        if self._untold or (self._last is None and iterations >= self.stride):
            self._untold = False
            if self._ranks.rank() == 0:
                _log.warning(
                    "dgc_horovod: a checkpoint was loaded, the optimizer is at iteration %d; u and v, which belong to "
                    "the weights before, start from zero",
                    iterations,
                )
        self._last = iterations
        for i, place in enumerate(holder.places):
            there = self._at.get(place)
            if there is not None and there[0] is not holder:
                holder.bring(i, *there)
            self._at[place] = holder, i

    def clear(self) -> None:
        """Empty u, v and the second moment, before the weights are replaced."""
        for holder in self._holders:
            holder.buckets.clear()
        if self.loaded is not None:
            self.loaded = dataclasses.replace(self.loaded, tensors={}, runs={}, second={})

    def empty(self, key: Key) -> None:
        """Empty u and v of a frozen variable; Adam's second moment stays, as in an optimizer's slot."""
        found = self.find(key)
        if found is not None:
            found[0].buckets.keep(found[1], {})

    # -- queries

    def find(self, key: Key) -> tuple[Holder, str] | None:
        """Return the holder of a variable's state, and the variable's name there."""
        holder, i = self._at.get((0, key), (None, 0))
        return None if holder is None else (holder, holder.names[i])

    @property
    def holds_loaded(self) -> bool:
        """Whether residuals were loaded for the first step, which is not made yet."""
        return self.loaded is not None and bool(self.loaded.tensors)

    def _jump_to(self, iterations: int) -> bool:
        return self._last is not None and not 0 <= iterations - self._last <= _SKIPPED_AT_MOST * self.stride

    def _stays_at(self, iterations: int) -> bool:
        """Whether iterations are those of the last exchange, although its step was applied: weights were reloaded.

        A failed step is repeated. A script that sets iterations itself, at every step, is detected at the second one.
        """
        counts = [holder.buckets.counts for holder in self._holders]
        before, self._applied = self._applied, sum(each.steps - each.skipped for each in counts)
        if not (self._grows and iterations == self._last and self._applied > before):
            return False
        self._grows = self._again_at is None or self._applied - self._again_at > 2 * len(counts)
        self._again_at = self._applied
        return self._grows
