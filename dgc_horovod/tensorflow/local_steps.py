"""The strategy of ``Compression.local``: H steps on each rank alone, then an exchange of their changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from dgc_horovod import at_end
from dgc_horovod.config import DGCConfig
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.notices import clips_alone, leave_out
from dgc_horovod.stats import ExchangeStats
from dgc_horovod.tensorflow.gradients.exchange import GradientExchange, StepInputs
from dgc_horovod.tensorflow.gradients.transport import host_call
from dgc_horovod.tensorflow.session import Own, Session, Strategy, passes_of
from dgc_horovod.tensorflow.settings import clipping_of
from dgc_horovod.tensorflow.variables import (
    Gradient,
    Key,
    all_finite,
    assign,
    broadcast_variables,
    is_frozen,
    key_of,
    mapped,
    native,
    shared_variables,
    values_of,
)


class LocalSteps(Strategy):
    """The optimizer steps on each rank alone, and after every H-th step the weights are exchanged.

    A step is one of the optimizer's: several accumulated passes are one. Rounds end where the optimizer's
    ``iterations`` are a multiple of H, so that all ranks agree without a message.
    """

    no_scaler = "local steps do not support a LossScaleOptimizer: use mixed_bfloat16, which needs none"
    _rounds: LocalRounds | None = None
    _exchange: GradientExchange | None = None

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        config = session.distribution.settings.config
        assert config is not None and config.local_steps is not None
        self._config, self._steps = config, config.local_steps
        self._means: list[tf.Variable] = []  # of `_seconds`, at the last exchange

    def apply(self, grads: list[Gradient], variables: list[Any], own: Own) -> None:
        """See `Strategy`; on this rank alone, then the exchange at the end of a round."""
        session, optimizer = self.session, self.session.optimizer
        if not optimizer.built:
            with tf.init_scope(), keras.name_scope(optimizer.name):
                optimizer.build(variables)
        if not self.rounds.variables:  # no variable is exchanged
            return own(grads, variables)
        exchange = self._agreed()
        trained = {key_of(variable) for variable in variables}
        session.distribution.let_go_of_frozen(trained)
        self.rounds.begin(trained)
        if self._config.on_nonfinite == "skip":
            grads = _finite_or_zero(grads, variables, exchange.steps.counts)
        own(grads, variables)
        every = self._steps * passes_of(optimizer)
        tf.cond(tf.equal(native(optimizer._iterations) % every, 0), self._end_round, lambda: tf.constant(False))
        return None

    def _agreed(self) -> GradientExchange:
        """Return the exchange of all variables of the rounds, agreed on by all ranks."""
        if self._exchange is None:
            optimizer = self.session.optimizer
            agreed = self.session.distribution.variable_set(self.rounds.variables, self.rounds.weights).exchange
            assert isinstance(agreed, GradientExchange)
            self._exchange, counts, clips = agreed, agreed.steps.counts, clipping_of(optimizer)
            calls, passes = self.rounds.calls, passes_of(optimizer)  # alone: the others may be deleted by then
            counts.count_pending = lambda: int(calls.numpy()) // passes
            at_end.watch(hvd.rank(), self._config)
            if clips is not None:
                self.session.tell_once("clipping", clips_alone("the optimizer", clips[1], counts.workers))
        return self._exchange

    @property
    def rounds(self) -> LocalRounds:
        """The rounds of all variables that the optimizer was built with, also of those that a step does not change."""
        if self._rounds is None:
            built, local = self.session.optimizer._trainable_variables, self.session.local
            self._rounds = LocalRounds([each for each in built if key_of(each) not in local], self._config)
        return self._rounds

    def _end_round(self) -> tf.Tensor:
        """Make the weights equal on every rank; if a change was not finite, restore those before the round."""
        rounds, exchange, optimizer, slots = self.rounds, self._agreed(), self.session.optimizer, self.slots
        everything = [*rounds.anchors, *rounds.outer, *slots]
        made = optimizer.iterations - 1  # before the last step, as at an exchange of gradients
        found = exchange(rounds.changes(), StepInputs(made, 1.0, rounds.anchors, everything))
        counted = exchange.steps.call(exchange.steps.count_alone, [rounds.calls], [tf.bool], passes_of(optimizer))

        def apply() -> tf.Tensor:
            rounds.apply(found.gradients)
            for second, mean in self._seconds():
                mean.assign(tf.reduce_mean(second))
            return tf.constant(True)

        def clean() -> tf.Tensor:
            # One that is not finite would spoil the weights again. Adam's first moment is useless without the second,
            # and with an empty one Adam, whose step count goes on, would take several times its step
            sound = all_finite(slot for slot in slots if slot.dtype.is_floating)
            for slot in slots:
                slot.assign(tf.where(sound, slot, tf.zeros_like(slot)))
            for second, mean in self._seconds():
                second.assign(tf.where(sound, second, tf.fill(second.shape, mean)))
            return tf.constant(False)

        with tf.control_dependencies([*counted, tf.cond(found.finite, apply, clean)]):
            rounds.end()
        return tf.constant(True)

    def _seconds(self) -> list[tuple[tf.Variable, tf.Variable]]:
        """Return the second moments of Adam and its like, each with its mean at the last exchange."""
        seconds = [native(variable) for variable in getattr(self.session.optimizer, "_velocities", ())]
        if len(self._means) != len(seconds):
            with tf.init_scope():
                self._means = [tf.Variable(tf.zeros((), second.dtype), trainable=False) for second in seconds]
        return list(zip(seconds, self._means, strict=True))

    @property
    def slots(self) -> list[tf.Variable]:
        """The inner optimizer's variables that are each rank's own."""
        optimizer = self.session.optimizer
        alike = {id(native(variable)) for variable in (optimizer._iterations, optimizer._learning_rate)}
        return [native(variable) for variable in shared_variables(optimizer) if id(native(variable)) not in alike]

    @property
    def apart(self) -> bool:
        """See `Strategy`."""
        return self._rounds is not None and int(self._rounds.calls) > 0

    def conclude(self) -> None:
        """See `Strategy`: exchange the changes of the weights since the last exchange."""
        if self._exchange is not None:
            tf.cond(self.rounds.calls > 0, self._end_round, lambda: tf.constant(False))

    def before_flush(self) -> None:
        """See `Strategy`; the round under way ends, then `e` is exchanged densely."""
        if self.session.distribution.ownership.holds_loaded:  # of all variables, frozen ones too
            self._agreed()
        self.conclude()

    def outer(self) -> list[tf.Variable]:
        """See `Strategy`."""
        return self.rounds.outer

    def begin_anew(self) -> None:
        """See `Strategy`."""
        if self._rounds is not None:
            self._rounds.begin_anew()

    def forget(self) -> None:
        """See `Strategy`; the round under way and outer momentum are dropped."""
        if self._rounds is not None:
            self._rounds.restart()

    def weights_set(self, sent: Sequence[Any]) -> None:
        """See `Strategy`."""
        if self._rounds is not None:
            self._rounds.restart_of({key_of(variable) for variable in sent})

    @property
    def _of_round(self) -> list[tf.Variable]:
        return [self.rounds.calls, self.rounds.fresh, *self.rounds.anchors, *self.rounds.outer]

    def remembered(self) -> list[np.ndarray]:
        """See `Strategy`: anchor, outer momentum and the place in the round; weights and slots are saved apart."""
        return values_of(self._of_round)

    def go_back(self, to: list[np.ndarray]) -> None:
        """See `Strategy`."""
        assign(self._of_round, to)

    def meet(self, share: Callable[[], None]) -> None:
        """See `Strategy`; a round begins with the weights of rank 0, whose outer momentum is shared as well.

        Changes of other ranks since their last exchange are lost; only a commit right after an exchange loses nothing.
        `e` and the inner optimizer stay with each rank; a newcomer takes over the inner optimizer of rank 0.
        """
        kept = [*(self.slots if self.session.iterations else ()), *self.rounds.outer]
        values = values_of(kept)
        share()  # setting weights clears outer momentum
        assign(kept, values)
        if self.rounds.outer:
            broadcast_variables(self.rounds.outer, root_rank=0)
        self.rounds.begin_anew()

    def check_not_begun(self) -> None:
        """See `Strategy`."""
        if self._rounds is not None:
            raise UnsupportedUse("local steps: call register_local_var before the first step; rounds have begun")


class LocalRounds:
    """The rounds of one rank: the anchor, and its update by an exchange.

    Args:
        variables: Keras variables whose changes are exchanged.
        config: compression settings; ``outer_rate`` and ``outer_momentum`` are used.

    Attributes:
        calls: number of times that the optimizer was called since the last exchange.
        fresh: whether the next step stores the weights as the anchor: after an exchange, or a load of weights.
        anchors: weights of the last exchange, one for each variable.
        outer: outer momentum, one for each variable, the same on every rank; none without.

    Memory: the anchor, as much as the weights, and as much again with outer momentum.
    """

    def __init__(self, variables: Sequence[Any], config: DGCConfig) -> None:
        self.variables, self.weights = list(variables), [native(variable) for variable in variables]
        self._rate, self._momentum = config.outer_rate, config.outer_momentum
        self._frozen: set[int] = set()
        with tf.init_scope():
            self.calls = tf.Variable(0, trainable=False, dtype=tf.int64)
            self.fresh = tf.Variable(True, trainable=False)
            self.anchors = [_like(weight) for weight in self.weights]
            self.outer = [_like(weight) for weight in self.weights] if self._momentum else []

    def begin(self, trained: Collection[Key]) -> None:
        """Prepare a step; the first of a round stores the weights, which are equal on all ranks, as the anchor.

        Args:
            trained: keys of the variables that it changes. Frozen ones among the others keep their values from now on.
        """
        self._frozen = {i for i, v in enumerate(self.variables) if is_frozen(v) and key_of(v) not in trained}
        self._remember()
        self.calls.assign_add(1)

    def _remember(self) -> None:
        def remember() -> tf.Tensor:
            for anchor, weight in zip(self.anchors, self.weights, strict=True):
                anchor.assign(weight)
            self.fresh.assign(False)
            return tf.constant(True)

        tf.cond(self.fresh, remember, lambda: tf.constant(True))

    def changes(self) -> list[tf.Tensor]:
        """Return the changes of the weights in this round; of frozen ones none."""
        self._remember()  # if weights were loaded and no step was made
        pairs = enumerate(zip(self.anchors, self.weights, strict=True))
        return [tf.zeros_like(anchor) if i in self._frozen else anchor - weight for i, (anchor, weight) in pairs]

    def apply(self, means: Sequence[tf.Tensor]) -> None:
        """Step the anchor; `means`: mean of the ranks' changes, one for each variable."""
        for i, (anchor, mean) in enumerate(zip(self.anchors, means, strict=True)):
            step = tf.cast(mean, anchor.dtype)
            if self.outer:
                momentum = self.outer[i].assign(self._momentum * self.outer[i] + step)
                step = step + self._momentum * momentum
            if i not in self._frozen:
                anchor.assign_sub(self._rate * step)
            elif self.outer:
                self.outer[i].assign(tf.zeros_like(momentum))

    def end(self) -> None:
        """End the round: the weights are those of the anchor."""
        for variable, anchor, weight in zip(self.variables, self.anchors, self.weights, strict=True):
            weight.assign(anchor.read_value())
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))
        self.begin_anew()

    def begin_anew(self) -> None:
        """Begin a round: all ranks have the weights of a checkpoint, or of a script."""
        self.fresh.assign(True)
        self.calls.assign(0)

    def restart(self) -> None:
        """Begin a round at the next step, without outer momentum: the weights were replaced."""
        self.fresh.assign(True)
        for momentum in self.outer:
            momentum.assign(tf.zeros_like(momentum))

    def restart_of(self, keys: Collection[Key]) -> None:
        """Do the same for the variables of these keys only; the others continue their round.

        Outer momentum whose own key is among them was set as well, and stays.
        """
        for i, weight in enumerate(self.weights):
            if key_of(weight) in keys:
                self.anchors[i].assign(weight)
                for momentum in self.outer[i : i + 1]:
                    if key_of(momentum) not in keys:
                        momentum.assign(tf.zeros_like(momentum))


def _finite_or_zero(grads: list[Gradient], variables: list[Any], counts: ExchangeStats) -> list[Gradient]:
    """Return these gradients, or zeros if any element of any is not finite; such a step still counts.

    Weights that are not finite would spoil the model's outputs until the round is undone, and running statistics for
    ever. Cost: a read of every gradient.
    """
    there = [grad for grad in grads if grad is not None]
    finite = all_finite(grad.values if isinstance(grad, tf.IndexedSlices) else grad for grad in there)
    names = [getattr(variable, "path", variable.name) for variable in variables]

    def left_out() -> tf.Tensor:
        sound = tf.stack([all_finite([native(variable)]) for variable in variables])
        return host_call(partial(_left_out, counts, names), [sound])[0]

    def or_zeros(elements: tf.Tensor) -> tf.Tensor:
        elements = tf.convert_to_tensor(elements)
        return tf.where(finite, elements, tf.zeros_like(elements))

    tf.cond(finite, lambda: tf.constant(True), left_out)
    return [None if grad is None else mapped(grad, or_zeros) for grad in grads]


def _left_out(counts: ExchangeStats, names: list[str], sound: np.ndarray) -> None:
    leave_out(counts, hvd.rank(), next((name for name, is_sound in zip(names, sound, strict=True) if not is_sound), ""))


def _like(variable: tf.Variable) -> tf.Variable:
    return tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
