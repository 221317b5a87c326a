"""``Compression.auto`` in a graph: comparisons of the ranks' times, and the branches of the exchange that is chosen."""

from __future__ import annotations

import dataclasses
import statistics
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from dgc_horovod.notices import SEVERAL, SPARSE, tell_stock
from dgc_horovod.planning.trial import COMPRESSED, DENSE, fitted
from dgc_horovod.session.auto import REPEATS, Choice
from dgc_horovod.state.parts import StatePart
from dgc_horovod.state.residual_state import RESIDUAL, SECOND, UNDECIDED, ResidualState
from dgc_horovod.tensorflow.gradients.exchange import Exchanged, GradientExchange, StepInputs
from dgc_horovod.tensorflow.gradients.host_steps import HostSteps
from dgc_horovod.tensorflow.gradients.paths import DensePath
from dgc_horovod.tensorflow.gradients.transport import Collectives, behind
from dgc_horovod.tensorflow.settings import STOCK, Settings, averages_clipped, clipped
from dgc_horovod.tensorflow.variables import Gradient

HANDED_BACK = "handed back"  # a dense step, before which the ranks' residuals are applied
BRANCHES = (DENSE, COMPRESSED, HANDED_BACK)  # kinds of a step, by number


def for_a_choice(settings: Settings, kinds: Sequence[str], run_steps: int | None) -> Settings:
    """Return the settings of an exchange of compression auto, once gradients are known; two collectives.

    Args:
        settings: settings with ``automatic`` compression.
        kinds: kind of each gradient that is exchanged, over all ranks.
        run_steps: number of steps of the run, if this rank knows it; the ranks take the largest.

    Returns:
        Settings without compression, if gradients are sparse; else with the density that fits the run.
    """
    config, collectives = settings.config, Collectives(settings.process_set, "start")
    assert config is not None
    if "sparse" in kinds and not settings.sparse_as_dense:
        if collectives.rank == 0:
            tell_stock(SPARSE, STOCK)
        return settings.as_stock()
    told = [int(data) for data in collectives.gather_bytes(b"%d" % (run_steps or 0), "run")]
    if config.total_steps is None and max(told):
        config = config.replace(total_steps=max(told))
    return dataclasses.replace(settings, config=fitted(config))


class AutomaticExchange(GradientExchange, StatePart):
    """The exchange of an optimizer with compression auto, which takes the fastest one by its own times.

    Until it compresses, the optimizer's slots have all of its momentum, and its arithmetic is stock Horovod's. When
    compression begins, the engines take the slots over; when it ends, they hand their state back.

    The optimizer clips averages, or each rank's gradient if it compresses.

    Args:
        steps: see `GradientExchange`.

    Attributes:
        choice: trial of the exchanges.
    """

    def __init__(self, steps: HostSteps) -> None:
        super().__init__(steps)
        self.choice = Choice(steps.buckets, STOCK, bool(hvd.gloo_enabled()))
        self.keeps_state = False  # whether the engines may hold state that must be handed back before a stock step
        self._seen = steps.buckets.steps  # number of steps whose times were counted
        self._given_at = self._waited = 0.0
        self._asks = False  # whether the ranks compare in the dense step, where the link is timed
        steps.counts.mode = DENSE
        weak: Any = weakref.proxy(self)  # or it would be a cycle
        self.kept.parts.append(weak)
        self._stock_path = DensePath(self.collectives, self.settings, hvd.Compression.none, self.sources)

    @property
    def compresses(self) -> bool:
        """Whether the next step may be compressed, so that no rank may be in join."""
        return self.keeps_state and not self.choice.given_up

    def follow(self, other: GradientExchange) -> None:
        """Hand back the state of `other` too, which may hold residuals of these variables."""
        super().follow(other)
        assert isinstance(other, AutomaticExchange)
        for each in (other, self):
            each.choice.give_up(SEVERAL)
        self.keeps_state |= other.keeps_state
        self._seen = self.steps.buckets.steps

    def put(self, state: ResidualState) -> None:
        """See `StatePart`: the choice, if it was made."""
        choice = self.choice
        state.mode = choice.mode if choice.ended else UNDECIDED
        if choice.given_up:
            state.mode = UNDECIDED if self.keeps_state else DENSE

    def resume(self, state: ResidualState) -> None:
        """See `StatePart`."""
        self._seen = self.steps.buckets.steps
        self.choice.resume(state.mode)
        self.keeps_state = state.mode == UNDECIDED or self.choice.mode == COMPRESSED

    def _graph(self, gradients: list[Gradient], inputs: StepInputs) -> Exchanged:
        which, probes = self._branch(inputs.iterations)
        # errors that all ranks have are raised before anything is sent
        inputs = inputs._replace(iterations=behind(which, inputs.iterations))
        gradients = [behind(which, tf.convert_to_tensor(gradient)) for gradient in gradients]
        compress = super()._graph

        def compressed() -> list[tf.Tensor]:
            own = [clipped(gradient, self.update.optimizer, self.settings, local=False) for gradient in gradients]
            results, finite, dense = compress(own, inputs)
            return [*results, finite, tf.constant(False) if dense is None else dense]

        branches = [  # in the order of `BRANCHES`
            lambda: self._stock(gradients, probes),
            compressed,
            lambda: self._stock(gradients, probes, *self._handed_back(which, inputs)),
        ]
        *results, finite, dense = tf.switch_case(which, branches)
        return Exchanged(results, finite, dense if self.update.arithmetic.is_split else None)

    def _stock(
        self,
        gradients: Sequence[tf.Tensor],
        probes: tf.Tensor,
        owed: Mapping[int, tf.Tensor] | None = None,
        after: Sequence[tf.Tensor] = (),
    ) -> list[tf.Tensor]:
        """Return the averages of `gradients`, whether they may be applied, and True: the step is the optimizer's own.

        Args:
            gradients: gradients of this rank.
            probes: whether the ranks compare in this step.
            owed: tensors that are added to some of the averages, by number.
            after: tensors that must be there before the step ends.
        """
        owed = owed or {}
        # otherwise every operation of the branch would wait for all
        gradients = [tf.identity(gradient) for gradient in gradients]
        with tf.control_dependencies(gradients):
            (given,) = self.steps.call(self._given, [probes])
        found = self._stock_path(dict(enumerate(gradients)))
        results = [found[i] for i in range(len(gradients))]
        with tf.control_dependencies([given, *after, *results]):
            ends = tf.cond(probes, self._timed_link, lambda: tf.constant(True))
            (applied,) = self.steps.call(self._ended, [ends])  # stock arithmetic skips nothing
        results = averages_clipped(results, self.update.optimizer, self.settings)
        results = [tf.cast(result, self._dtype(i, result.dtype)) for i, result in enumerate(results)]
        # `owed` is of many steps: a limit for one step would cut it
        results = [result + tf.cast(owed[i], result.dtype) if i in owed else result for i, result in enumerate(results)]
        return [*results, applied, tf.constant(True)]

    def _handed_back(self, which: tf.Tensor, inputs: StepInputs) -> tuple[dict[int, tf.Tensor], list[tf.Tensor]]:
        """Hand the state of all ranks' engines back to the optimizer.

        Returns:
            Tensors that are added to its gradients, by number; a tensor that is there once all is handed back.
        """
        owed: dict[int, tf.Tensor] = {}
        (armed,) = self.steps.call(self.steps.arm, [which])
        after = [armed]
        for run in self.steps.runs:
            engine, collectives = run.engine, self.collectives
            parts = (RESIDUAL,) if engine.bucket.uncompressed else self.update.parts
            kept = self.steps.call(self._kept, [armed], [tf.float32] * len(parts), run.index, parts)
            whole = {}
            for part, vector in zip(parts, kept, strict=True):
                vector.set_shape([engine.whole.numel])
                if part != SECOND:
                    op = hvd.Average if self.settings.averages else hvd.Sum
                    vector = collectives.allreduce(vector, f"left.{engine.bucket.index}.{part}", op)
                whole[part] = vector
            after += whole.values()
            for segment, i in zip(engine.whole.segments, run.members, strict=True):
                source = self.sources[i]
                left = {part: tf.reshape(x[segment.place], source.shape) for part, x in whole.items()}
                is_compressed = source.key in self.compressed
                later = self.update.hand_back(source.key, inputs.weights[i], left, inputs.rate, is_compressed)
                if later is not None:
                    owed[i] = later
        with tf.control_dependencies(after):
            return owed, self.steps.call(self._emptied, [armed])

    def _kept(self, index: int, parts: Sequence[str], _: np.ndarray) -> list[Any]:
        """Return this rank's state of a bucket, by part, see `BucketEngine.as_one_of_all`, and clear it."""
        run = self.steps.runs[index]
        second = [self.steps.second_of(run)] if SECOND in parts else []
        kept = [run.engine.as_one_of_all(part) for part in parts if part != SECOND]
        self.steps.counts.traffic.count_allreduce(sum(part.nbytes for part in kept), self.collectives.workers)
        run.engine.clear()
        return kept + second

    # -- before a step

    def _branch(self, iterations: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the number of the step's branch in `BRANCHES`, and whether the ranks compare in it.

        Args:
            iterations: number of steps that the optimizer has made.
        """
        (meets,) = self.steps.call(self._due, [iterations])
        done = tf.cond(meets, lambda: self._compared([iterations]), lambda: tf.constant(True))
        with tf.control_dependencies([done]):
            which, probes = self.steps.call(self._which, [iterations], [tf.int32, tf.bool])
        return which, probes

    def _due(self, _: np.ndarray) -> list[Any]:
        """Return whether the ranks meet before the step: to compare, or as one may be in join, to begin to compress."""
        choice, made, compares = self.choice, self.steps.buckets.steps, False
        if made != self._seen:  # a step has ended
            self._seen, waited, self._waited = made, self._waited, 0.0
            compares = choice.step_ended(time.perf_counter(), waited)
        is_dense = choice.mode == DENSE
        self._asks |= compares and is_dense
        begins = not (is_dense or self.keeps_state or choice.given_up)
        return [np.bool_(begins or (compares and not is_dense))]

    def _which(self, iterations: np.ndarray) -> list[Any]:
        if self.choice.given_up:
            self.choice.stay(DENSE)
        mode = self.choice.mode
        if mode == COMPRESSED:
            self.keeps_state = True
        else:
            self.steps.start_as_stock(iterations)
        self.steps.counts.mode = mode
        branch = HANDED_BACK if self.keeps_state and mode != COMPRESSED else mode
        return [np.int32(BRANCHES.index(branch)), np.bool_(self._asks)]

    def _emptied(self, _: np.ndarray) -> None:
        """Note that the engines' state is in the optimizer's slots, the weights, and the gradients of the step now."""
        self.keeps_state = False
        self.steps.buckets.second.clear()
        self.steps.in_slots = True

    # -- the optimizer's own step

    def _given(self, _: np.ndarray) -> None:
        """Note that all gradients of this rank are there, and that it waits for the others'."""
        self.collectives.arm("gradients")
        self._given_at = time.perf_counter()

    def _ended(self, _: np.ndarray) -> None:
        """Note that the gradients of all ranks are there."""
        self._waited = time.perf_counter() - self._given_at
        self.collectives.watch.disarm()
        self.choice.count()

    # -- comparisons

    def _compared(self, clock: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return True once the ranks have compared; `clock`: see `_own`."""
        (own,) = self.steps.call(self._own, clock, [tf.float64])
        (taken,) = self.steps.call(self._take, [self.collectives.sum_in_time(own, "auto.times")])
        return taken

    def _own(self, *clock: np.ndarray) -> list[Any]:
        """Return this rank's vector; `clock`: in a dense step, the times at which allreduces began, and the end."""
        times = np.diff(np.array(clock)).tolist()
        link = [statistics.median(times[first : first + REPEATS]) for first in (1, 2 + REPEATS) if times]
        return [np.array(self.choice.own(*link))]

    def _take(self, sums: np.ndarray) -> None:
        self._asks = False
        self.choice.compare(sums.tolist())

    def _timed_link(self) -> tf.Tensor:
        """Time the link, and compare; in a dense step, after its gradients have arrived.

        Earlier, forward and backward pass would use the threads that a small allreduce needs.
        """
        clock, received, dtypes = [], tf.zeros([1]), [tf.float64, tf.float32]
        for numel in (1, self.choice.probed):
            for i in range(1 + REPEATS):  # the first one is not timed: ranks arrive, and Horovod learns the name
                # made by a call: TensorFlow would run a collective on a constant once, when it optimizes the graph
                began, sent = self.steps.call(self._probe, [received[:1]], dtypes, numel)
                received = self.collectives.allreduce(sent, f"auto.link.{numel}.{i}")
                clock.append(began)
        ended, _ = self.steps.call(self._probe, [received[:1]], dtypes, 0)
        return self._compared([*clock, ended])

    def _probe(self, numel: int, _: np.ndarray) -> list[Any]:
        """Return the time, and what is sent next: `numel` elements."""
        self.collectives.arm("auto.link")
        return [np.float64(time.perf_counter()), np.zeros(numel, np.float32)]
