"""The exchange of the gradients of one set of variables, inside a TensorFlow graph.

compress (Python, one call for each bucket) -> Horovod's operation -> decode (Python) -> the updates. The Python parts
hold u and v (`host_steps`); the graph holds no state, so it may be traced any number of times.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from dgc_horovod.arithmetic import without_own
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.exchange.contract import ALL, INSIDE
from dgc_horovod.state.parts import StatePart, StateRegister
from dgc_horovod.state.residual_state import ResidualState
from dgc_horovod.tensorflow.gradients.host_calls import HeldCalls, behind, host_call
from dgc_horovod.tensorflow.gradients.host_steps import HostSteps
from dgc_horovod.tensorflow.gradients.paths import TRIPLE, BucketRun, DensePath
from dgc_horovod.tensorflow.gradients.replica_check import Replicas, WeightsWatch
from dgc_horovod.tensorflow.gradients.transport import Collectives
from dgc_horovod.tensorflow.updates import Update
from dgc_horovod.tensorflow.wrapping.settings import Settings
from dgc_horovod.tensorflow.wrapping.slot_ownership import SlotOwnership
from dgc_horovod.tensorflow.wrapping.variables import Gradient, Source, native, numel_of

_NARROW = (tf.float16, tf.bfloat16)
_NOTHING = np.empty(0, np.float32)


class Exchanged(NamedTuple):
    """The result of an exchange.

    Args:
        gradients: one for each given gradient.
        finite: whether the step may be applied; None: not checked.
        dense: whether the step is the optimizer's own; None: its arithmetic is split at every step, or at none.
    """

    gradients: list[Gradient]
    finite: tf.Tensor | None
    dense: tf.Tensor | None


class GradientExchange:
    """The exchange of the gradients of `sources`, always in that order.

    Args:
        sources, settings, transports, update, ownership, number, calls: see `HostSteps`.
        keeps_fp32: whether compressed float16 variables get float32 updates: times the learning rate they fit.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        settings: Settings,
        transports: Mapping[str, Collectives],
        update: Update,
        ownership: SlotOwnership,
        number: int,
        calls: HeldCalls,
        keeps_fp32: bool,
    ) -> None:
        collectives = transports[ALL]
        self.sources, self.settings, self.collectives = list(sources), settings, collectives
        self._transports, self._inside = transports, transports.get(INSIDE)
        self.update, self._keeps_fp32 = update, keeps_fp32
        self.steps = HostSteps(sources, settings, transports, update, ownership, number, calls)
        self.compressed = {i for i, run in self.steps.place.items() if not run.engine.bucket.uncompressed}
        compression = settings.compression
        if settings.config is not None:
            half = settings.config.dense_values == "fp16"
            compression = hvd.Compression.fp16 if half else hvd.Compression.none
        groups = dict(enumerate(settings.group_numbers(sources)))
        self._dense_path = DensePath(collectives, settings, compression, groups)
        self._replicas = None
        if settings.config is not None and settings.config.check_every and not update.is_tapes:
            self._replicas = Replicas(sources, settings.config, self.steps)
        self._weights = WeightsWatch(sources, self.steps)
        self.kept: StateRegister | None = None  # without compression
        if settings.config is not None:
            self.kept = StateRegister(self.steps, update.arithmetic.holds)
            self.kept.register(OwnSlots(update, sources))
        weak: Any = weakref.proxy(self)  # or it would be a cycle
        self._function = tf.function(partial(type(self)._graph, weak), autograph=False, reduce_retracing=True)

    @property
    def keeps_state(self) -> bool:
        """Whether the engines hold u and v, and not the optimizer's slots."""
        return True

    @property
    def compresses(self) -> bool:
        """Whether the next step may be compressed, so that no rank may be in join."""
        return True

    def give_up(self, why: str) -> None:
        """End a trial of compression auto, and go back to stock Horovod's exchange; `why`: reason, for the log."""

    def joins(self) -> None:
        """End a trial of compression auto without a choice: this rank is about to call ``hvd.join()``."""

    def follow(self, other: GradientExchange) -> None:
        """Continue the warm-up of `other`, if it had some of these variables, and their residuals, before."""
        ours, theirs = self.steps.buckets, other.steps.buckets
        shared = {source.key for source in self.sources} & {source.key for source in other.sources}
        if ours is not None and theirs is not None and shared and theirs.steps > ours.steps:
            ours.steps = theirs.steps

    def __call__(
        self,
        gradients: Sequence[Gradient],
        iterations: tf.Tensor | int = 0,
        learning_rate: tf.Tensor | float = 1.0,
        weights: Sequence[Any] = (),
        everything: Sequence[Any] = (),
    ) -> Exchanged:
        """Exchange one gradient for each source.

        Args:
            gradients: tensors or IndexedSlices, one for each source.
            iterations: number of steps that the optimizer has made, >= 0.
            learning_rate: present learning rate; it and `iterations` are used to take over a checkpoint.
            weights: variables, one for each source.
            everything: variables that are set to those of rank 0 where ranks differ; see `Replicas`.

        Raises:
            UnsupportedUse: in a graph that XLA compiles.
            ConfigError: the warm-up needs an epoch, and none was set.
            DGCError: an error in eager mode; inside a graph TensorFlow raises an error with its text.
        """
        if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise UnsupportedUse(
                "XLA compiles this step (jit_compile=True), and no Horovod operation runs inside XLA; pass "
                "jit_compile=False to tf.function or model.compile"
            )
        if self.steps.buckets is not None:
            self.steps.buckets.density()  # raises its error now, and not when the graph runs
        numbers = tf.cast(iterations, tf.int64), tf.cast(learning_rate, tf.float32)
        arguments = list(gradients), *numbers, list(weights), list(everything)
        if not tf.executing_eagerly():
            return Exchanged(*self._graph(*arguments))
        self.steps.error = None
        try:
            return Exchanged(*self._function(*arguments))
        except tf.errors.OpError as error:
            self.collectives.watch.disarm()
            raise self.steps.error or self.collectives.watch.error or error from None

    def _call(self, function: Callable[..., Any], inputs: Sequence[Any], dtypes: Sequence[Any], *first: object) -> Any:
        return host_call(self.steps.noting(function, *first), inputs, dtypes)

    def _graph(
        self, gradients: list[Gradient], iterations: tf.Tensor, rate: Any, weights: list[Any], everything: list[Any]
    ) -> tuple[list[Gradient], tf.Tensor | None, tf.Tensor | None]:
        dtypes = [tf.int64, tf.bool, tf.int64, tf.bool, tf.int32, tf.bool]
        started, fresh, step, dense, part, look = self._call(self._start, [iterations], dtypes)
        if self.settings.config is None:
            return self._all_dense(gradients, started), None, None
        if self._replicas is not None:
            part.set_shape([])
            with tf.control_dependencies([self._replicas(part, step, rate, weights, everything)]):
                started = tf.identity(started)
        started = self._taken_over(started, fresh, rate)
        # errors that all ranks have are raised before anything is sent
        gradients = [behind(started, tf.convert_to_tensor(gradient)) for gradient in gradients]
        if self._inside is not None and self.settings.config.clip_norm is not None:
            started, gradients = self._averaged(started, gradients)
        messages, whole = self._compressed(started, gradients)
        second = self._second(started, messages)
        results = self._dense_path(whole)
        flags = [tf.reduce_all(tf.math.is_finite(result)) for result in results.values()]
        dense_path = self._dense_path.nbytes(whole.values()), len(flags)
        for run, message in zip(self.steps.runs, messages, strict=True):
            *updates, flag = self._decoded(run, message)
            flags.append(flag)
            for i, update in zip(run.members, updates, strict=True):
                update = tf.reshape(update, self.sources[i].shape)
                results[i] = tf.cast(update, self._dtype(i, gradients[i].dtype))
                if results[i].dtype in _NARROW:
                    flags.append(tf.reduce_all(tf.math.is_finite(results[i])))
        with tf.control_dependencies([self._weights(look, flags, weights)]):
            (finite,) = self._call(self.steps.end, [second, *flags], [tf.bool], *dense_path)
        finite.set_shape([])
        dense.set_shape([])
        own = dense if self.update.arithmetic.dense_is_stock else None
        return [results[i] for i in range(len(gradients))], finite, own

    def _start(self, iterations: np.ndarray) -> list[Any]:
        """Call `HostSteps.start`; add the part of the weights to compare (-1: none), and whether to check them."""
        started = self.steps.start(iterations)
        part = -1 if self._replicas is None else self._replicas.due(int(started[2]))
        look = self.settings.config is not None and self._weights.due()
        return [*started, np.int32(part), np.bool_(look)]

    def _dtype(self, i: int, dtype: tf.DType) -> tf.DType:
        """Return the dtype of the result for gradient `i`, which has `dtype`."""
        wide = self._keeps_fp32 and i in self.steps.place and dtype in _NARROW
        return tf.float32 if wide else dtype

    def _all_dense(self, gradients: Sequence[Gradient], started: tf.Tensor) -> list[Gradient]:
        gradients = [
            behind(started, gradient) for gradient in gradients
        ]  # and after an earlier collective of these names
        given = dict(enumerate(gradients))
        results = self.collectives.in_time("dense.*", gradients, lambda _: self._dense_path(given))
        results = [results[i] for i in range(len(gradients))]
        with tf.control_dependencies([started, *tf.nest.flatten(results, expand_composites=True)]):
            ended = self._call(self.steps.end, [_NOTHING, True], [tf.bool], self._dense_path.nbytes(gradients), 1)
        with tf.control_dependencies(ended):
            return [tf.identity(result) for result in results]

    def _taken_over(self, started: tf.Tensor, fresh: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        """Move the optimizer's slots into the engines, at the first step and after a checkpoint was loaded."""
        slots = {i: [native(slot) for slot in self.update.slots(self.sources[i].key)] for i in sorted(self.compressed)}
        everything = [slot for mine in slots.values() for slot in mine]
        if not everything:
            return started
        counts = [(i, len(mine)) for i, mine in slots.items()]

        def take_over() -> tf.Tensor:
            with tf.control_dependencies(self._call(self.steps.take_over, [rate, *everything], [tf.bool], counts)):
                changed = [slot.assign(tf.zeros_like(slot)) for slot in everything]
            with tf.control_dependencies(changed):
                return tf.identity(started)

        return tf.cond(fresh, take_over, lambda: started)

    def _compressed(
        self, started: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> tuple[list[list[tf.Tensor]], dict[int, tf.Tensor]]:
        """Return a message of each bucket, and the gradients of the dense path."""
        runs, steps = self.steps.runs, self.steps
        whole = {i: gradient for i, gradient in enumerate(gradients) if i not in self.steps.place}
        flat = [tf.reshape(tf.cast(gradient, tf.float32), [-1]) for gradient in gradients]
        assert self.settings.config is not None
        if self.settings.config.clip_norm is None:
            messages = []
            for run in runs:
                inputs = [started, *(flat[i] for i in run.members)]
                if self._inside is not None:
                    inputs = [started, self._slice(run, started, inputs[1:])]
                messages.append(host_call(steps.noting(steps.compress, run), inputs, TRIPLE, run.kernels))
            return messages, whole
        # the norm needs every gradient first
        inputs = [started, *(flat[i] for run in runs for i in run.members), *(flat[i] for i in whole)]
        kernels = runs[0].kernels if runs else None
        dtypes = [*TRIPLE * len(runs), tf.float32]
        *tensors, clip = host_call(steps.noting(steps.compress_clipped), inputs, dtypes, kernels)
        whole = {i: gradient * tf.cast(clip, gradient.dtype) for i, gradient in whole.items()}
        return [tensors[n : n + 3] for n in range(0, len(tensors), 3)], whole

    def _second(self, started: tf.Tensor, messages: Sequence[Sequence[tf.Tensor]]) -> tf.Tensor:
        """Return the sum over the ranks of their parts of Adam's second moment, once all buckets are compressed."""
        if not (self.update.arithmetic.dense_is_stock and self.compressed):
            return _NOTHING
        with tf.control_dependencies([part for message in messages for part in message]):
            (own,) = self._call(self.steps.second_message, [started], [tf.float32])
        own.set_shape([None])
        reduced = partial(self.collectives.allreduce, own, "second")
        return tf.cond(tf.size(own) > 0, reduced, lambda: own)  # it is empty on all ranks, or on none

    def _armed(self, started: tf.Tensor, given: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return `started` once `given` is there, and start the clock for the other workers of the node."""
        with tf.control_dependencies(list(given)):
            (armed,) = self._call(self.steps.arm, [started], [tf.int64])
        return armed

    def _averaged(self, started: tf.Tensor, gradients: Sequence[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Return the node's averages of all gradients: the limit of clipping is for them."""
        inside, armed = self._inside, self._armed(started, gradients)
        assert inside is not None
        with tf.control_dependencies([armed]):
            whole = [tf.cast(gradient, tf.float32) for gradient in gradients]
        averages = [inside.allreduce(gradient, f"node.{i}", hvd.Average) for i, gradient in enumerate(whole)]
        return armed, [tf.cast(x, gradient.dtype) for x, gradient in zip(averages, gradients, strict=True)]

    def _slice(self, run: BucketRun, started: tf.Tensor, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return this worker's slice of the mean of the node's gradients of a bucket."""
        engine, inside = run.engine, self._inside
        assert inside is not None
        padding = inside.workers * engine.bucket.numel - engine.whole.numel
        with tf.control_dependencies([self._armed(started, gradients)]):
            flat = tf.concat([*gradients, tf.zeros([padding])], 0)
        received = inside.alltoall(flat, f"{engine.bucket.name}.slices")
        return tf.reduce_mean(tf.reshape(received, [inside.workers, engine.bucket.numel]), 0)

    def _decoded(self, run: BucketRun, triple: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return the updates of a bucket, and whether they are finite."""
        steps, rounds = self.steps, len(run.alternatives)
        for number in range(rounds):
            received = run.carried(self._transports, number, triple)
            if number + 1 < rounds:
                call = steps.noting(steps.next_round, run, number + 1)
                triple = host_call(call, received, TRIPLE, run.kernels)
        dtypes = [*[tf.float32] * len(run.members), tf.bool]
        return host_call(steps.noting(steps.decode, run), received, dtypes, run.kernels)


class OwnSlots(StatePart):
    """The optimizer's slots that are this rank's alone, in a record whose tensors have the numbers of variables.

    Args:
        update: form in which gradients enter the residual.
        sources: variables that are exchanged.
    """

    in_optimizer = True

    def __init__(self, update: Update, sources: Sequence[Source]) -> None:
        self._update, self._keys = update, {str(i): source.key for i, source in enumerate(sources)}
        self._numel = {str(i): numel_of([source]) for i, source in enumerate(sources)}

    def put(self, state: ResidualState) -> None:
        """See `StatePart`."""
        for number, key in self._keys.items():
            if slots := self._update.own(key):
                state.tensors[number] = {**state.tensors.get(number, {}), **slots}

    def without(self, state: ResidualState) -> ResidualState:
        """See `StatePart`."""
        return without_own(state, self._update.arithmetic.own, self._numel)[0]

    def resume(self, state: ResidualState) -> None:
        """See `StatePart`."""
        for number in self._keys.keys() & state.tensors.keys():
            self._update.take_own(self._keys[number], state.tensors[number])
