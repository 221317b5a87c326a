"""Comparison of weights between ranks, and checks that weights are finite."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dgc_horovod.config import DGCConfig
from dgc_horovod.errors import NotFinite
from dgc_horovod.notices import LOOKS, made_not_finite
from dgc_horovod.session import replicas
from dgc_horovod.tensorflow.broadcast import assign_from
from dgc_horovod.tensorflow.gradients.host_calls import host_call
from dgc_horovod.tensorflow.gradients.host_steps import HostSteps
from dgc_horovod.tensorflow.gradients.transport import Collectives
from dgc_horovod.tensorflow.wrapping.variables import Source, native, numel_of


class WeightsWatch:
    """Checks whether the weights of one exchange are finite if a gradient is not, for the message.

    For an optimizer of unknown arithmetic it also checks them after its first compressed steps: before the next one is
    applied, since Keras applies the one before by itself.

    Args:
        sources: variables of the exchange, in its order.
        steps: its steps on this rank.
    """

    def __init__(self, sources: Sequence[Source], steps: HostSteps) -> None:
        self._names, self._steps = [source.name for source in sources], steps
        self._looks, self._seen = LOOKS if steps.update.unknown else 0, 0

    def due(self) -> bool:
        """Whether the weights after the step before are checked even if all gradients are finite."""
        assert self._steps.buckets is not None
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
        assert self._steps.buckets is not None
        due.set_shape([])
        if self._steps.buckets.config.exchanges_weights or not weights:  # weights are exchanged: not checked here
            return due

        def look() -> tf.Tensor:
            sound = tf.stack([tf.reduce_all(tf.math.is_finite(weight)) for weight in weights])
            (looked,) = host_call(self._steps.noting(self._judge), [due, sound], [tf.bool])
            looked.set_shape([])
            return looked

        done: tf.Tensor = tf.cond(tf.reduce_all(flags) & ~due, lambda: tf.constant(False), look)
        return done

    def _judge(self, due: np.ndarray, sound: np.ndarray) -> list[Any]:
        """Raise NotFinite if the optimizer made such weights; on every rank, as they are the same."""
        assert self._steps.buckets is not None
        buckets, update = self._steps.buckets, self._steps.update
        name = next((name for name, is_sound in zip(self._names, sound, strict=True) if not is_sound), "")
        if due and name:
            raise NotFinite(made_not_finite(buckets.steps - 1, name, update.unknown))
        buckets.ending.spoilt = lambda: name
        return [np.bool_(True)]


_log = logging.getLogger("dgc_horovod")


class Replicas:
    """Comparison of the weights of one exchange, see `ReplicaCheck`.

    Args:
        sources: variables of the exchange, in its order.
        config: compression settings.
        steps: its steps on this rank.
    """

    def __init__(self, sources: Sequence[Source], config: DGCConfig, steps: HostSteps) -> None:
        self._steps, self._noting = steps, steps.noting
        self._names = [source.name for source in sources]
        self._collectives = steps.collectives
        sizes = [numel_of([source]) * tf.as_dtype(source.dtype).size for source in sources]
        self._check = replicas.ReplicaCheck(sizes, config, steps.collectives)
        self.due = self._check.due  # of the number of steps before

    def __call__(
        self, part: tf.Tensor, step: tf.Tensor, rate: tf.Tensor, weights: Sequence[Any], everything: Sequence[Any]
    ) -> tf.Tensor:
        """Compare `part`, if there is one; return a tensor that the step must depend on.

        Args:
            part: index of the part, from `due`; -1: none.
            step: number of steps finished.
            rate: learning rate, a float32 scalar.
            weights: variables, one for each of the sources.
            everything: variables set to the first rank's values where weights differ: `weights`, and the optimizer's.
        """
        branches = [
            lambda: tf.constant(True),
            *(self._compared(i, step, rate, weights) for i in range(len(self._check.parts))),
        ]
        same = tf.switch_case(part + 1, branches)
        if self._check.stops:
            return same
        return tf.cond(same, lambda: tf.constant(True), lambda: self._set_right(everything))

    def _compared(
        self, part: int, step: tf.Tensor, rate: tf.Tensor, weights: Sequence[tf.Variable]
    ) -> Callable[[], tf.Tensor]:
        def compared() -> tf.Tensor:
            values = [tf.reshape(tf.bitcast(_plain(weights[i]), tf.uint8), [-1]) for i in self._check.parts[part]]
            (own,) = host_call(self._noting(self._record), [step, rate, *values], [tf.uint8])
            theirs = self._collectives.allgather(own, "replicas")
            judge = self._noting(functools.partial(self._judge, part))
            (same,) = host_call(judge, [step, theirs], [tf.bool])
            same.set_shape([])
            return same

        return compared

    def _record(self, step: np.ndarray, rate: np.ndarray, *values: np.ndarray) -> list[np.ndarray]:
        """Return this rank's record: the learning rate, the step and a checksum of each tensor."""
        self._collectives.watch.arm(f"{self._collectives.full_name('replicas')}, the weights after step {int(step)}")
        sums = [replicas.checksum([value]) for value in values]
        return [np.array([int(np.float32(rate).view(np.uint32)), int(step), *sums], np.uint32).view(np.uint8)]

    def _judge(self, part: int, step: np.ndarray, theirs: np.ndarray) -> list[Any]:
        """Return whether the records of all ranks are equal.

        Raises:
            ReplicaMismatch: on every rank, if weights differ and ``on_mismatch`` is "stop".
        """
        self._collectives.watch.disarm()
        records = np.ascontiguousarray(theirs).view(np.uint32).reshape(self._collectives.workers, -1)
        names = [self._names[i] for i in self._check.parts[part]]
        found = replicas.compared(int(step), names, records[:, 1:].tolist())
        self._check.note(part, int(step), found is None)
        if found is not None:
            rates = np.ascontiguousarray(records[:, 0]).view(np.float32)
            alike_after = self._check.alike_after.get(part, 0)
            told = [replicas.Circumstances({"learning rate": str(each)}, alike_after=alike_after) for each in rates]
            for each in told if self._check.own_options else ():
                each.options.clear()
            self._check.stop_or_tell(found, told)
        return [np.bool_(found is None)]

    def _set_right(self, everything: Sequence[Any]) -> tf.Tensor:
        process_set, first = self._collectives.process_set, self._collectives.first_rank
        name = self._collectives.full_name("replicas")

        def assigned(armed: tf.Tensor) -> Any:
            set_right = assign_from(everything, first, process_set, name)
            if self._steps.update.arithmetic.dense_is_stock:
                (own,) = host_call(self._noting(self._second), [armed], [tf.float64])
                theirs = self._collectives.broadcast(own, "replicas.second")
                set_right += host_call(self._noting(self._take_second), [theirs], [tf.bool])
            with tf.control_dependencies(set_right):
                return tf.constant(True)

        done: tf.Tensor = self._collectives.in_time("replicas.*", [tf.constant(True)], assigned)
        return done

    def _second(self, _: np.ndarray) -> list[Any]:
        assert self._steps.buckets is not None
        return [self._steps.buckets.second.packed()]

    def _take_second(self, theirs: np.ndarray) -> list[Any]:
        assert self._steps.buckets is not None
        self._steps.buckets.second.unpack(theirs)
        return [np.bool_(True)]


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
