"""The strategy of ``Compression.local``: H steps on each rank alone, then an exchange of what they have changed."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from dgc_horovod import at_end
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.notices import MID_ROUND, clips_alone, step_not_made
from dgc_horovod.stats import ExchangeStats
from dgc_horovod.tensorflow.broadcast import shared_variables
from dgc_horovod.tensorflow.clipping.of_optimizer import clipping_of
from dgc_horovod.tensorflow.flush import passes_of
from dgc_horovod.tensorflow.gradients.exchange import GradientExchange
from dgc_horovod.tensorflow.gradients.host_calls import host_call
from dgc_horovod.tensorflow.local.rounds import LocalRounds
from dgc_horovod.tensorflow.session.strategy import Own, Strategy
from dgc_horovod.tensorflow.wrapping.variables import Gradient, all_finite, key_of, native

_log = logging.getLogger("dgc_horovod")


class LocalSteps(Strategy):
    """The optimizer steps on each rank alone, and after every H-th step the weights are exchanged.

    A step is one of the optimizer's: several passes that are accumulated are one. Rounds end where the optimizer's
    ``iterations`` are a multiple of H, so that all ranks agree without a message.
    """

    no_scaler = "local steps with a LossScaleOptimizer: use mixed_bfloat16, which needs none"
    _rounds: LocalRounds | None = None
    _exchange: GradientExchange | None = None

    def apply(self, grads: list[Gradient], variables: list[Any], own: Own) -> None:
        """See `Strategy`; on this rank alone, then the exchange, if a round is full."""
        session, optimizer = self.session, self.session.optimizer
        if not optimizer.built:
            with tf.init_scope(), keras.name_scope(optimizer.name):
                optimizer.build(variables)
        if not self.rounds.variables:  # all are this rank's own
            return own(grads, variables)
        exchange, config = self._agreed(), session.distribution.settings.config
        assert config is not None and config.local_steps is not None
        trained = {key_of(variable) for variable in variables}
        session.distribution.let_go_of_frozen(trained)
        self.rounds.begin(trained)
        if config.on_nonfinite == "skip":
            grads = _finite_or_zero(grads, variables, exchange.steps.counts)
        own(grads, variables)
        every = config.local_steps * passes_of(optimizer)
        tf.cond(tf.equal(native(optimizer._iterations) % every, 0), self._end_round, lambda: tf.constant(False))
        return None

    def _agreed(self) -> GradientExchange:
        """The exchange of all variables of the rounds, agreed on by all ranks."""
        if self._exchange is None:
            optimizer = self.session.optimizer
            agreed = self.session.distribution.variable_set(self.rounds.variables, self.rounds.weights).exchange
            assert agreed is not None
            self._exchange, counts, clips = agreed, agreed.steps.counts, clipping_of(optimizer)
            self.rounds.tell_of_pending(counts, passes_of(optimizer))
            at_end.watch(hvd.rank())
            if clips is not None and hvd.rank() == 0:
                _log.info("dgc_horovod: %s", clips_alone("the optimizer", clips[1], counts.workers))
        return self._exchange

    @property
    def rounds(self) -> LocalRounds:
        """The rounds of all variables that Keras has built the optimizer with, whichever of them a step changes."""
        if self._rounds is None:
            session, config = self.session, self.session.distribution.settings.config
            assert config is not None
            built = session.optimizer._trainable_variables
            self._rounds = LocalRounds([each for each in built if key_of(each) not in session.local], config)
        return self._rounds

    def _end_round(self) -> tf.Tensor:
        optimizer = self.session.optimizer  # iterations counted before the last step, as at an exchange of gradients
        seconds = [native(variable) for variable in getattr(optimizer, "_velocities", ())]  # of Adam and its like
        passes = passes_of(optimizer)
        self.rounds.exchange(self._agreed(), optimizer.iterations - 1, self.slots, seconds, passes)
        return tf.constant(True)

    @property
    def slots(self) -> list[tf.Variable]:
        """The inner optimizer's variables that each rank has for itself."""
        optimizer = self.session.optimizer
        alike = {id(native(variable)) for variable in (optimizer._iterations, optimizer._learning_rate)}
        return [native(variable) for variable in shared_variables(optimizer) if id(native(variable)) not in alike]

    def finish_round(self) -> None:
        """See `Strategy`: exchange what the weights have changed by since the last time."""
        if self._exchange is not None:
            tf.cond(self.rounds.calls > 0, self._end_round, lambda: tf.constant(False))

    def before_flush(self) -> None:
        """See `Strategy`; the round under way ends, then `e` goes densely."""
        if self.session.distribution.holds_loaded:  # of all variables, frozen ones too
            self._agreed()
        self.finish_round()

    def outer(self) -> list[tf.Variable]:
        """See `Strategy`."""
        return self.rounds.outer

    def begin_anew(self) -> None:
        """See `Strategy`."""
        if self._rounds is not None:
            self._rounds.begin_anew()

    def restart(self) -> None:
        """See `Strategy`; the round under way is given up, and outer momentum."""
        if self._rounds is not None:
            self._rounds.restart()

    def check_not_begun(self) -> None:
        """See `Strategy`."""
        if self._rounds is not None:
            raise UnsupportedUse("local steps: call register_local_var before the first step; rounds have begun")

    def check_between_rounds(self) -> None:
        """See `Strategy`."""
        if self._rounds is not None and int(self._rounds.calls):
            raise UnsupportedUse(MID_ROUND)


def _finite_or_zero(grads: list[Gradient], variables: list[Any], counts: ExchangeStats) -> list[Gradient]:
    """These gradients, or zeros where any element of any is not finite: such a step still counts.

    Weights that are not finite would spoil what the model computes until the round is undone, and a running statistic
    for ever. Costs a read of every gradient.
    """
    given = [tf.convert_to_tensor(_elements(grad)) for grad in grads if grad is not None]
    finite, names = all_finite(given), [getattr(variable, "path", variable.name) for variable in variables]

    def left_out() -> tf.Tensor:
        sound = tf.stack([all_finite([native(variable)]) for variable in variables])
        return host_call(partial(_left_out, counts, names), [finite, sound], [tf.bool])[0]

    tf.cond(finite, lambda: tf.constant(True), left_out)
    return [None if grad is None else _or_zeros(grad, finite) for grad in grads]


def _elements(grad: Any) -> Any:
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


def _or_zeros(grad: Any, finite: tf.Tensor) -> Gradient:
    elements = tf.convert_to_tensor(_elements(grad))
    elements = tf.where(finite, elements, tf.zeros_like(elements))
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(elements, grad.indices, grad.dense_shape)
    return elements


def _left_out(counts: ExchangeStats, names: list[str], finite: Any, sound: Any) -> list[Any]:
    counts.left_out += 1
    spoilt = next((name for name, is_sound in zip(names, sound, strict=True) if not is_sound), "")
    if text := step_not_made(hvd.rank(), counts.left_out, spoilt):
        _log.warning("dgc_horovod: %s", text)
    return [finite]
