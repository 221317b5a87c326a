"""The exchange of the gradients of one set of variables, inside a TensorFlow graph.

compress (Python, one call for each bucket) -> Horovod's operation -> decode (Python) -> the updates. The Python parts
hold u and v (`host_steps`); the graph holds no state, so it may be traced any number of times.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow.compression import Compressor
from tensorflow.python.ops import control_flow_util

from dgc_horovod.arithmetic import without_own
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.exchange.contract import INSIDE
from dgc_horovod.state.parts import StatePart, StateRegister
from dgc_horovod.state.residual_state import ResidualState
from dgc_horovod.tensorflow.gradients.host_steps import HostCalls, HostSteps, StockSteps
from dgc_horovod.tensorflow.gradients.paths import MESSAGE, BucketRun, DensePath
from dgc_horovod.tensorflow.gradients.replica_check import Replicas, WeightsWatch
from dgc_horovod.tensorflow.gradients.transport import Collectives, behind
from dgc_horovod.tensorflow.variables import Gradient, Key

_NARROW = (tf.float16, tf.bfloat16)
_NOTHING = np.empty(0, np.float32)


class StepInputs(NamedTuple):
    """The inputs of an exchange beside the gradients.

    Args:
        iterations: number of steps that the optimizer has made, >= 0.
        rate: learning rate of this step.
        weights: variables, one for each source.
        everything: variables that are set to those of rank 0 where ranks differ; see `Replicas`.
    """

    iterations: tf.Tensor | int = 0
    rate: tf.Tensor | float = 1.0
    weights: Sequence[Any] = ()
    everything: Sequence[Any] = ()


class Exchanged(NamedTuple):
    """The result of an exchange.

    Args:
        gradients: one for each given gradient.
        finite: whether the step may be applied; None: not checked.
        dense: whether the step is the optimizer's own; None: its arithmetic is split at every step, or at none.
    """

    gradients: list[Gradient]
    finite: tf.Tensor | None = None
    dense: tf.Tensor | None = None


class Exchange:
    """The exchange of the gradients of some variables, always in their order.

    Args:
        steps: its calls to Python on this rank.
        compression: compression of the dense path, Horovod's.

    Attributes:
        compressed: keys of the variables whose gradients are compressed.
    """

    def __init__(self, steps: HostCalls, compression: type[Compressor]) -> None:
        self.steps, self.collectives = steps, steps.collectives
        self.sources, self.settings = steps.sources, steps.settings
        self.compressed: set[Key] = set()
        self._dense_path = DensePath(self.collectives, self.settings, compression, self.sources)
        weak: Any = weakref.proxy(self)  # or it would be a cycle
        self._function = tf.function(partial(type(self)._graph, weak), autograph=False, reduce_retracing=True)

    def __call__(self, gradients: Sequence[Gradient], inputs: StepInputs) -> Exchanged:
        """Exchange one gradient for each source.

        Args:
            gradients: tensors or IndexedSlices, one for each source.
            inputs: the other inputs of the step.

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
        self.steps.check()
        numbers = tf.cast(inputs.iterations, tf.int64), tf.cast(inputs.rate, tf.float32)
        inputs = StepInputs(*numbers, list(inputs.weights), list(inputs.everything))
        if not tf.executing_eagerly():
            return self._graph(list(gradients), inputs)
        self.steps.error = None
        try:
            return self._function(list(gradients), inputs)
        except tf.errors.OpError as error:
            self.collectives.watch.disarm()
            raise self.steps.error or self.collectives.watch.error or error from None

    def _graph(self, gradients: list[Gradient], inputs: StepInputs) -> Exchanged:
        """Return the result of a call; in a graph."""
        raise NotImplementedError


class StockExchange(Exchange):
    """The exchange without compression: Horovod's allreduces, with a deadline."""

    steps: StockSteps

    def __init__(self, steps: StockSteps) -> None:
        super().__init__(steps, steps.settings.compression)

    def _graph(self, gradients: list[Gradient], inputs: StepInputs) -> Exchanged:
        (started,) = self.steps.call(self.steps.start, [inputs.iterations])
        # also after an earlier collective of these names
        gradients = [behind(started, gradient) for gradient in gradients]
        given = dict(enumerate(gradients))
        results = self.collectives.in_time("dense.*", gradients, lambda _: self._dense_path(given))
        results = [results[i] for i in range(len(gradients))]
        nbytes = self._dense_path.nbytes(gradients)
        with tf.control_dependencies(tf.nest.flatten(results, expand_composites=True)):
            ended = self.steps.call(self.steps.end, [started], [tf.bool], nbytes)
        with tf.control_dependencies(ended):
            return Exchanged([tf.identity(result) for result in results])


class GradientExchange(Exchange):
    """The exchange of compressed gradients.

    Args:
        steps: its steps on this rank.

    Attributes:
        bucketed: indices of the variables in buckets; the others are on the dense path.
        kept: its state, in parts.
        keeps_state: whether the engines hold u and v, and not the optimizer's slots.
    """

    steps: HostSteps
    keeps_state = True

    def __init__(self, steps: HostSteps) -> None:
        half = steps.config.dense_values == "fp16"
        super().__init__(steps, hvd.Compression.fp16 if half else hvd.Compression.none)
        self.config, self.update, self._inside = steps.config, steps.update, steps.transports.get(INSIDE)
        self.bucketed = {i for run in steps.runs for i in run.members}
        self.compressed = {self.sources[i].key for i in self.bucketed if steps.names[i] in steps.buckets.compressed}
        self._replicas = Replicas(steps) if self.config.check_every and not self.update.is_tapes else None
        self._weights = WeightsWatch(steps)
        self.kept = StateRegister(steps, self.update.arithmetic.holds, [OwnSlots(steps)])

    def follow(self, other: GradientExchange) -> None:
        """Continue the warm-up of `other`, if it had some of these variables, and their residuals, before."""
        ours, theirs = self.steps.buckets, other.steps.buckets
        shared = {source.key for source in self.sources} & {source.key for source in other.sources}
        if shared:
            ours.steps = max(ours.steps, theirs.steps)

    def _graph(self, gradients: list[Gradient], inputs: StepInputs) -> Exchanged:
        dtypes = [tf.int64, tf.bool, tf.int64, tf.bool, tf.int32, tf.bool]
        started, fresh, step, dense, part, look = self.steps.call(self._start, [inputs.iterations, inputs.rate], dtypes)
        if self._replicas is not None:
            with tf.control_dependencies([self._replicas(part, step, inputs)]):
                started = tf.identity(started)
        started = self._taken_over(started, fresh, inputs.rate)
        # errors that all ranks have are raised before anything is sent
        gradients = [behind(started, tf.convert_to_tensor(gradient)) for gradient in gradients]
        if self._inside is not None and self.config.clip_norm is not None:
            started, gradients = self._averaged(self._inside, started, gradients)
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
        with tf.control_dependencies([self._weights(look, flags, inputs.weights)]):
            (finite,) = self.steps.call(self.steps.end, [second, *flags], [tf.bool], *dense_path)
        own = dense if self.update.arithmetic.dense_is_stock else None
        return Exchanged([results[i] for i in range(len(gradients))], finite, own)

    def _start(self, iterations: np.ndarray, rate: np.ndarray) -> list[Any]:
        """Call `HostSteps.start`; add the part of the weights to compare (-1: none), and whether to check them."""
        started = self.steps.start(iterations, rate)
        part = -1 if self._replicas is None else self._replicas.due(int(started[2]))
        return [*started, np.int32(part), np.bool_(self._weights.due())]

    def _dtype(self, i: int, dtype: tf.DType) -> tf.DType:
        """Return the dtype of the result for gradient `i`, which has `dtype`."""
        # times the learning rate float32 updates fit into the variable
        wide = self.update.arithmetic.is_split and i in self.bucketed and dtype in _NARROW
        return tf.float32 if wide else dtype

    def _taken_over(self, started: tf.Tensor, fresh: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        """Move the optimizer's slots into the engines, at the first step and after a checkpoint was loaded."""
        indices = [i for i, source in enumerate(self.sources) if source.key in self.compressed]
        parts = self.update.arithmetic.slots
        slots = [slot for i in indices for slot in self.update.slots(self.sources[i].key, parts).values()]
        if not slots:
            return started

        def take_over() -> tf.Tensor:
            with tf.control_dependencies(self.steps.call(self.steps.take_over, [rate, *slots], [tf.bool], indices)):
                changed = [slot.assign(tf.zeros_like(slot)) for slot in slots]
            with tf.control_dependencies(changed):
                return tf.identity(started)

        return tf.cond(fresh, take_over, lambda: started)

    def _compressed(
        self, started: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> tuple[list[list[tf.Tensor]], dict[int, tf.Tensor]]:
        """Return a message of each bucket, and the gradients of the dense path."""
        runs, steps = self.steps.runs, self.steps
        whole = {i: gradient for i, gradient in enumerate(gradients) if i not in self.bucketed}
        flat = [tf.reshape(tf.cast(gradient, tf.float32), [-1]) for gradient in gradients]
        if self.config.clip_norm is None:
            messages = []
            for run in runs:
                mine = [flat[i] for i in run.members]
                if self._inside is not None:
                    mine = [self._slice(run, self._inside, started, mine)]
                messages.append(steps.call(steps.compress, [started, *mine], MESSAGE, run.index, kernels=run.kernels))
            return messages, whole
        # the norm needs every gradient first
        inputs = [started, *(flat[i] for run in runs for i in run.members), *(flat[i] for i in whole)]
        kernels = runs[0].kernels if runs else None
        dtypes = [*MESSAGE * len(runs), tf.float32]
        *tensors, clip = steps.call(steps.compress_clipped, inputs, dtypes, kernels=kernels)
        whole = {i: gradient * tf.cast(clip, gradient.dtype) for i, gradient in whole.items()}
        return [tensors[n : n + 2] for n in range(0, len(tensors), 2)], whole

    def _second(self, started: tf.Tensor, messages: Sequence[Sequence[tf.Tensor]]) -> tf.Tensor:
        """Return the sum over the ranks of their parts of Adam's second moment, once all buckets are compressed."""
        if not (self.update.arithmetic.has_second and self.compressed):
            return _NOTHING
        with tf.control_dependencies([part for message in messages for part in message]):
            (own,) = self.steps.call(self.steps.second_message, [started], [tf.float32])
        own.set_shape([None])
        reduced = partial(self.collectives.allreduce, own, "second")
        return tf.cond(tf.size(own) > 0, reduced, lambda: own)  # it is empty on all ranks, or on none

    def _armed(self, started: tf.Tensor, given: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return `started` once `given` is there, and start the clock for the other workers of the node."""
        with tf.control_dependencies(list(given)):
            (armed,) = self.steps.call(self.steps.arm, [started])
        return armed

    def _averaged(
        self, inside: Collectives, started: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Return the node's averages of all gradients: the limit of clipping is for them."""
        armed = self._armed(started, gradients)
        with tf.control_dependencies([armed]):
            whole = [tf.cast(gradient, tf.float32) for gradient in gradients]
        averages = [inside.allreduce(gradient, f"node.{i}", hvd.Average) for i, gradient in enumerate(whole)]
        return armed, [tf.cast(x, gradient.dtype) for x, gradient in zip(averages, gradients, strict=True)]

    def _slice(
        self, run: BucketRun, inside: Collectives, started: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """Return this worker's slice of the mean of the node's gradients of a bucket."""
        engine = run.engine
        padding = inside.workers * engine.bucket.numel - engine.whole.numel
        with tf.control_dependencies([self._armed(started, gradients)]):
            flat = tf.concat([*gradients, tf.zeros([padding])], 0)
        received = inside.alltoall(flat, f"{engine.bucket.name}.slices")
        return tf.reduce_mean(tf.reshape(received, [inside.workers, engine.bucket.numel]), 0)

    def _decoded(self, run: BucketRun, message: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return the updates of a bucket, and whether they are finite."""
        steps, last = self.steps, len(run.alternatives) - 1
        for number in range(last):
            received = [run.carried(steps.transports, number, message)]
            message = steps.call(steps.next_round, received, MESSAGE, run.index, number, kernels=run.kernels)
        received = [run.carried(steps.transports, last, message)]
        dtypes = [*[tf.float32] * len(run.members), tf.bool]
        return steps.call(steps.decode, received, dtypes, run.index, last, kernels=run.kernels)


class OwnSlots(StatePart):
    """The optimizer's slots that are this rank's alone, in a record whose tensors have the numbers of variables.

    Args:
        steps: steps of the exchange of these variables.
    """

    in_optimizer = True

    def __init__(self, steps: HostSteps) -> None:
        self._update, self._sources = steps.update, {str(i): source for i, source in enumerate(steps.sources)}

    def put(self, state: ResidualState) -> None:
        """See `StatePart`."""
        for number, source in self._sources.items():
            slots = self._update.slots(source.key, self._update.arithmetic.own)
            own = {part: slot.numpy().astype(np.float32).reshape(-1) for part, slot in slots.items()}
            if own and all(np.isfinite(x).all() for x in own.values()):  # files refuse values that are not finite
                state.tensors[number] = {**state.tensors.get(number, {}), **own}

    def without(self, state: ResidualState) -> ResidualState:
        """See `StatePart`."""
        numel = {number: source.numel for number, source in self._sources.items()}
        return without_own(state, self._update.arithmetic.own, numel)

    def resume(self, state: ResidualState) -> None:
        """See `StatePart`."""
        for number in self._sources.keys() & state.tensors.keys():
            arrays = state.tensors[number]
            slots = self._update.slots(self._sources[number].key, self._update.arithmetic.own)
            with tf.init_scope():  # the first step may be under construction
                for part in slots.keys() & arrays.keys():
                    slots[part].assign(tf.cast(arrays[part].reshape(slots[part].shape), slots[part].dtype))
