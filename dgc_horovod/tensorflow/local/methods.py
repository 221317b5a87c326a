"""The methods of a Keras optimizer with local steps, over those of `DistributedMethods`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
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
from dgc_horovod.tensorflow.optimizer_mixin import DistributedMethods, not_converted
from dgc_horovod.tensorflow.wrapping.variables import Gradient, all_finite, key_of, native

_log = logging.getLogger("dgc_horovod")
NO_SCALER = "local steps with a LossScaleOptimizer: use mixed_bfloat16, which needs none"


class LocalMethods(DistributedMethods):
    """Over a Keras optimizer: it steps on each rank alone, and after every H-th step the weights are exchanged.

    A step is one of the optimizer's: several passes that are accumulated are one. Rounds end where the optimizer's
    ``iterations`` are a multiple of H, so that all ranks agree without a message.
    """

    _dgc_rounds: LocalRounds | None = None
    _dgc_changes: GradientExchange | None = None  # their exchange

    @not_converted
    def apply(self, grads: Iterable[Gradient], trainable_variables: Iterable[Any] | None = None) -> None:
        """As Keras', on this rank alone; then the exchange, if a round is full."""
        grads = list(grads)
        known = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if not self._dgc.takes_part or not known:
            return self._dgc_apply_as_stock(grads, known)
        if self.__dict__.get("_dgc_scaled_by_another"):
            raise UnsupportedUse(NO_SCALER)
        self._dgc_check(known)
        if not self.built:
            with tf.init_scope(), keras.name_scope(self.name):
                self.build(known)
        rounds = self._dgc_make_rounds()
        if not rounds.variables:  # all are this rank's own
            return self._dgc_apply_as_stock(grads, known)
        exchange, config = self._dgc_make_set(rounds), self._dgc.settings.config
        assert config is not None and config.local_steps is not None
        trained = {key_of(variable) for variable in known}
        self._dgc.let_go_of_frozen(trained)
        rounds.begin(trained)
        if config.on_nonfinite == "skip":
            grads = _finite_or_zero(grads, known, exchange.steps.counts)
        self._dgc_apply_as_stock(grads, known)
        every = config.local_steps * passes_of(self)
        tf.cond(tf.equal(native(self._iterations) % every, 0), self._dgc_exchange, lambda: tf.constant(False))
        return None

    def _dgc_make_set(self, rounds: LocalRounds) -> GradientExchange:
        """The exchange of all variables of the rounds, agreed on by all ranks."""
        if self._dgc_changes is None:
            agreed = self._dgc.variable_set(rounds.variables, rounds.weights).exchange
            assert agreed is not None
            object.__setattr__(self, "_dgc_changes", agreed)  # Keras need not know
            counts, clips = agreed.steps.counts, clipping_of(self)
            rounds.tell_of_pending(counts, passes_of(self))
            at_end.watch(hvd.rank())
            if clips is not None and hvd.rank() == 0:
                _log.info("dgc_horovod: %s", clips_alone("the optimizer", clips[1], counts.workers))
            return agreed
        return self._dgc_changes

    def _dgc_make_rounds(self) -> LocalRounds:
        """The rounds of all variables that Keras has built it with, whichever of them a step changes."""
        rounds: LocalRounds | None = self._dgc_rounds
        if rounds is None:
            shared = [variable for variable in self._trainable_variables if key_of(variable) not in self._dgc_local]
            config = self._dgc.settings.config
            assert config is not None
            rounds = LocalRounds(shared, config)
            object.__setattr__(self, "_dgc_rounds", rounds)
        return rounds

    def _dgc_exchange(self) -> tf.Tensor:
        # iterations counted before the last step, as at an exchange of gradients
        seconds = [native(variable) for variable in getattr(self, "_velocities", ())]  # of Adam and its like
        rounds = self._dgc_make_rounds()
        rounds.exchange(self._dgc_make_set(rounds), self.iterations - 1, self._dgc_slots(), seconds, passes_of(self))
        return tf.constant(True)

    def _dgc_slots(self) -> list[tf.Variable]:
        """The inner optimizer's variables that each rank has for itself."""
        alike = {id(native(variable)) for variable in (self._iterations, self._learning_rate)}
        return [native(variable) for variable in shared_variables(self) if id(native(variable)) not in alike]

    @not_converted
    def exchange(self) -> None:
        """Exchange what the weights have changed by since the last time; every rank calls it, between two steps.

        Afterwards the weights are the same on every rank. ``apply`` does it every ``local_steps`` steps.
        """
        if self._dgc_changes is not None:
            tf.cond(self._dgc_make_rounds().calls > 0, self._dgc_exchange, lambda: tf.constant(False))

    def _dgc_finish_round(self) -> None:
        self.exchange()

    def _dgc_outer(self) -> list[Any]:
        return self._dgc_make_rounds().outer

    def _dgc_weights_loaded(self) -> None:
        self._dgc_make_rounds().begin_anew()

    def flush(self) -> None:
        """Apply everything that the ranks have kept: the round under way ends, then `e` goes densely."""
        if self._dgc.holds_loaded:  # of all variables, frozen ones too
            self._dgc_make_set(self._dgc_make_rounds())
        self.exchange()
        super().flush()

    def load_own_variables(self, store: Any) -> None:
        """As Keras'; the round under way is given up, outer momentum, and what the ranks have kept."""
        super().load_own_variables(store)
        self._dgc_restart()

    def clear_residuals(self) -> None:
        """Empty `e` and outer momentum, and begin a round with the weights that a script has set.

        Every rank calls it, and has set them to the same.
        """
        super().clear_residuals()
        self._dgc_restart()
        if self._dgc_rounds is not None:
            self._dgc_rounds.begin_anew()

    def _dgc_restart(self) -> None:
        if self._dgc_rounds is not None:
            self._dgc_rounds.restart()

    def register_local_var(self, var: Any) -> None:
        """Leave `var` to each rank: what it changes by is not exchanged. Before the first step."""
        if self._dgc_rounds is not None:
            raise UnsupportedUse("local steps: call register_local_var before the first step; rounds have begun")
        super().register_local_var(var)

    def residual_state_dict(self) -> dict[str, Any]:
        """See `DistributedMethods`; between two rounds. The slots of SGD, Adam and AdamW are in it, too."""
        self._dgc_check_between_rounds()
        return super().residual_state_dict()

    def load_residual_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `DistributedMethods`; between two rounds."""
        self._dgc_check_between_rounds()
        super().load_residual_state_dict(state_dict)

    def _dgc_check_between_rounds(self) -> None:
        if self._dgc_rounds is not None and int(self._dgc_rounds.calls):
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
