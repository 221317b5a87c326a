"""Comparison of weights between ranks, and checks that weights are finite."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from dgc_horovod.errors import NotFinite
from dgc_horovod.notices import LOOKS, made_not_finite
from dgc_horovod.session import replicas
from dgc_horovod.tensorflow.gradients.host_steps import HostSteps
from dgc_horovod.tensorflow.gradients.transport import Collectives
from dgc_horovod.tensorflow.variables import assign_from, native

if TYPE_CHECKING:
    from dgc_horovod.tensorflow.gradients.exchange import StepInputs


class WeightsWatch:
    """Checks whether the weights of one exchange are finite if a gradient is not, for the message.

    For an optimizer of unknown arithmetic it also checks them after its first compressed steps: before the next one is
    applied, since Keras applies the one before by itself.

    Args:
        steps: steps of the exchange on this rank.
    """

    def __init__(self, steps: HostSteps) -> None:
        self._names, self._steps = [source.name for source in steps.sources], steps
        self._looks, self._seen = LOOKS if steps.update.unknown else 0, 0

    def due(self) -> bool:
        """Whether the weights after the step before are checked even if all gradients are finite."""
        counts, seen = self._steps.buckets.counts, self._seen
        self._seen = counts.steps - counts.skipped
        is_due = self._looks > 0 and self._seen > seen and counts.density_now < 1
        self._looks -= is_due
        return is_due

    def __call__(self, due: tf.Tensor, flags: Sequence[tf.Tensor], weights: Sequence[Any]) -> tf.Tensor:
        """Return a tensor that the end of the step must depend on.

        Args:
            due: result of `due` at the begin of the step.
            flags: whether each part of the exchanged update is finite.
            weights: variables, one for each of the sources.
        """
        if self._steps.buckets.config.exchanges_weights or not weights:  # weights are exchanged: not checked here
            return due

        def look() -> tf.Tensor:
            sound = tf.stack([tf.reduce_all(tf.math.is_finite(weight)) for weight in weights])
            (looked,) = self._steps.call(self._judge, [due, sound])
            return looked

        done: tf.Tensor = tf.cond(tf.reduce_all(flags) & ~due, lambda: tf.constant(False), look)
        return done

    def _judge(self, due: np.ndarray, sound: np.ndarray) -> None:
        """Raise NotFinite if the optimizer made such weights; on every rank, as they are the same."""
        buckets, update = self._steps.buckets, self._steps.update
        name = next((name for name, is_sound in zip(self._names, sound, strict=True) if not is_sound), "")
        if due and name:
            raise NotFinite(made_not_finite(buckets.steps - 1, name, update.unknown))
        buckets.ending.spoilt = lambda: name


_log = logging.getLogger("dgc_horovod")


class Replicas:
    """Comparison of the weights of one exchange, see `ReplicaCheck`.

    Args:
        steps: steps of the exchange on this rank.
    """

    def __init__(self, steps: HostSteps) -> None:
        self._steps, self._collectives = steps, steps.collectives
        names = [source.name for source in steps.sources]
        sizes = [source.numel * tf.as_dtype(source.dtype).size for source in steps.sources]
        self._check = replicas.ReplicaCheck(names, sizes, steps.config, steps.collectives)
        self.due = self._check.due  # of the number of steps before

    def __call__(self, part: tf.Tensor, step: tf.Tensor, inputs: StepInputs) -> tf.Tensor:
        """Compare `part`, if there is one; return a tensor that the step must depend on.

        Args:
            part: index of the part, from `due`; -1: none.
            step: number of steps finished.
            inputs: inputs of the exchange: where weights differ, `everything` is set to the first rank's values.
        """
        compared = [partial(self._compared, i, step, inputs) for i in range(len(self._check.parts))]
        same = tf.switch_case(part + 1, [lambda: tf.constant(True), *compared])
        if self._check.stops:
            return same
        return tf.cond(same, lambda: tf.constant(True), lambda: self._set_right(inputs.everything))

    def _compared(self, part: int, step: tf.Tensor, inputs: StepInputs) -> tf.Tensor:
        weights = [_plain(inputs.weights[i]) for i in self._check.parts[part]]
        values = [tf.reshape(tf.bitcast(weight, tf.uint8), [-1]) for weight in weights]
        (own,) = self._steps.call(self._record, [step, *values], [tf.uint8])
        theirs = self._collectives.allgather(own, "replicas")
        (same,) = self._steps.call(self._judge, [theirs], [tf.bool], part)
        return same

    def _record(self, step: np.ndarray, *values: np.ndarray) -> list[np.ndarray]:
        """Return this rank's record, see `replicas.record`."""
        self._collectives.watch.arm(f"{self._collectives.full_name('replicas')}, the weights after step {int(step)}")
        return [replicas.record(int(step), values)]

    def _judge(self, part: int, theirs: np.ndarray) -> list[Any]:
        """Return whether the records of all ranks are equal, see `ReplicaCheck.judge`."""
        self._collectives.watch.disarm()
        return [np.bool_(self._check.judge(part, theirs))]

    def _set_right(self, everything: Sequence[Any]) -> tf.Tensor:
        process_set, first = self._collectives.process_set, self._collectives.global_rank(0)
        name = self._collectives.full_name("replicas")

        def assigned(armed: tf.Tensor) -> Any:
            set_right = assign_from(everything, first, process_set, name)
            if self._steps.update.arithmetic.has_second:
                (own,) = self._steps.call(self._second, [armed], [tf.float64])
                theirs = self._collectives.broadcast(own, "replicas.second")
                set_right += self._steps.call(self._take_second, [theirs])
            with tf.control_dependencies(set_right):
                return tf.constant(True)

        done: tf.Tensor = self._collectives.in_time("replicas.*", [tf.constant(True)], assigned)
        return done

    def _second(self, _: np.ndarray) -> list[Any]:
        return [self._steps.buckets.second.packed()]

    def _take_second(self, theirs: np.ndarray) -> None:
        self._steps.buckets.second.unpack(theirs)


def _plain(variable: tf.Variable) -> tf.Tensor:
    """Return the value of a variable, in a dtype that can be cast to bytes."""
    value = variable.read_value()
    return tf.cast(value, tf.uint8) if value.dtype == tf.bool else value


def compare_weights(collectives: Collectives, variables: Sequence[Any]) -> None:
    """Warn if the ranks begin with different weights, as none were broadcast, or will be after this step only."""
    if collectives.alone:
        return
    digest = hashlib.blake2b(digest_size=8)
    try:
        with tf.init_scope():
            for variable in variables:
                digest.update(np.ascontiguousarray(native(variable).numpy()).tobytes())
        own = digest.digest()
    except Exception:  # made by the graph that is being traced: they have no values yet
        own = b""
    theirs = set(collectives.gather_bytes(own, "weights"))
    if len(theirs) > 1 and b"" not in theirs and collectives.rank == 0:
        _log.warning(
            "dgc_horovod: the ranks begin with DIFFERENT WEIGHTS and would keep the difference: give fit() "
            "callbacks.BroadcastGlobalVariablesCallback(0), or call broadcast_variables before the first step"
        )
