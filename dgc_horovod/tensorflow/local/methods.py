"""The methods of a Keras optimizer with local steps, over those of `DistributedMethods`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.tensorflow.distribution import VariableSet
from dgc_horovod.tensorflow.local.rounds import LocalRounds
from dgc_horovod.tensorflow.optimizer_mixin import DistributedMethods, not_converted
from dgc_horovod.tensorflow.wrapping.variables import Gradient, key_of, native


class LocalMethods(DistributedMethods):
    """Over a Keras optimizer: it steps on each rank alone, and after every H-th step the weights are exchanged.

    A step is one of the optimizer's: several passes that are accumulated are one. Rounds end where the optimizer's
    ``iterations`` are a multiple of H steps, so that all ranks agree without a message.
    """

    _dgc_rounds: LocalRounds | None = None
    _dgc_set: VariableSet

    @not_converted
    def apply(self: Any, grads: Iterable[Gradient], trainable_variables: Iterable[Any] | None = None) -> None:
        """As Keras', on this rank alone; then the exchange, if a round is full."""
        grads = list(grads)
        known = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if not self._dgc.takes_part or not known:
            return self._dgc_apply_as_stock(grads, known)
        self._dgc_check(known)
        rounds = self._dgc_make_rounds(known)
        rounds.begin()
        self._dgc_apply_as_stock(grads, known)
        every = self._dgc.settings.config.local_steps * self._dgc_stride
        full = tf.equal(native(self.iterations) % every, 0)
        tf.cond(full, self._dgc_exchange, lambda: tf.constant(False))
        return None

    def _dgc_make_rounds(self: Any, known: Sequence[Any]) -> LocalRounds:
        shared = [variable for variable in known if key_of(variable) not in self._dgc_local]
        rounds: LocalRounds | None = self._dgc_rounds
        if rounds is None:
            if not self.built:
                with tf.init_scope():
                    self.build(known)
            rounds = LocalRounds(shared, self._dgc.settings.config)
            whole = self._dgc.variable_set(shared, [native(variable) for variable in shared])
            whole.exchange.steps.passes = self._dgc_stride
            for name, value in {"_dgc_rounds": rounds, "_dgc_set": whole}.items():
                object.__setattr__(self, name, value)  # Keras need not know
        elif [key_of(variable) for variable in shared] != [key_of(variable) for variable in rounds.variables]:
            raise UnsupportedUse(
                "with local steps an optimizer is given the same variables at every step; give each set an optimizer "
                "of its own, and freeze layers before the first step"
            )
        return rounds

    def _dgc_exchange(self: Any) -> tf.Tensor:
        # counted before the last step, as at an exchange of gradients
        slots = list(map(native, self.variables))
        self._dgc_rounds.exchange(self._dgc_set.exchange, self.iterations - 1, slots)
        return tf.constant(True)

    def exchange(self: Any) -> None:
        """Exchange what the weights have changed by since the last time; every rank calls it, between two steps.

        Afterwards the weights are the same on every rank. ``apply`` does it every ``local_steps`` steps.
        """
        if self._dgc_rounds is not None and bool(self._dgc_rounds.begun):
            self._dgc_exchange()

    def _dgc_finish_round(self: Any) -> None:
        self.exchange()

    def flush(self: Any) -> None:
        """Apply everything that the ranks have kept: the round under way ends, then `e` goes densely."""
        self.exchange()
        super().flush()

    def load_own_variables(self: Any, store: Any) -> None:
        """As Keras'; the round under way is given up, and what the ranks have kept."""
        super().load_own_variables(store)
        if self._dgc_rounds is not None:
            self._dgc_rounds.begun.assign(False)
