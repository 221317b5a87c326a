"""The exchange of one optimizer: its buckets, their state on one rank, and its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dgc_horovod.config import DGCConfig, clip_limit, density_at
from dgc_horovod.core.adam import SecondMoments
from dgc_horovod.core.bucketing import TensorSpec, plan, within_budget
from dgc_horovod.core.ending import Ending, unscaled
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.core.meters import Meters
from dgc_horovod.core.workspace import Message
from dgc_horovod.errors import CheckpointError
from dgc_horovod.exchange.contract import ALL, INSIDE, Transport
from dgc_horovod.exchange.hierarchical import Topology
from dgc_horovod.kernels.contract import Accumulation, Array, ErrorFeedback, Kernels
from dgc_horovod.state.parts import is_flushed
from dgc_horovod.state.residual_state import (
    FROZEN_SINCE,
    MOMENTUM,
    RESIDUAL,
    Arrays,
    ResidualState,
    combining,
    released,
)
from dgc_horovod.stats import PROCESS, ExchangeStats
from dgc_horovod.wire.bucket import PADDING
from dgc_horovod.wire.packet import FLAG_CLIPS, FLAG_JOINED

_PLAIN: Accumulation = ErrorFeedback()


class OptimizerExchange:
    """The engines of one optimizer and their common steps.

    An adapter subclasses it, converts tensors to arrays, starts collectives and waits for them. A step is `begin`, with
    its `accumulations`; for each bucket `add_gradient`, `begin_compress`, `message`, `receive` after every round,
    `aggregate` and `settle`; then `end`. Several buckets may be between `begin_compress` and `message`.

    Args:
        specs: name, shape and boundary of every exchanged tensor, in the model's order.
        config: compression settings; the density may be lowered, see `within_budget`.
        kernels_of: function that returns the kernels for the device of a tensor, by name.
        transports: transport of each group of workers: of `ALL`, and with nodes of `BETWEEN` and `INSIDE`. The workers
            of a node combine their gradients before they are added here; each keeps a slice of every bucket.
        averages: whether the ranks' gradients are averaged (True) or summed.

    Attributes:
        compressed: shape of each tensor on the sparse path, by name.
        under_way: whether a step has begun and not ended.
        in_join, clips: whether this rank is in join, and whether its script clips updates; every rank is told.
        dense: whether the present step is the user's optimizer's own; set at its begin.
        accumulations: form in which gradients enter the residual in this step, by name, set after `begin`; error
            feedback for all other tensors.
        dense_residuals: residuals of tensors that are in no bucket any more, flat, by name; an adapter adds them to the
            next gradient.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        config: DGCConfig,
        kernels_of: Callable[[str], Kernels],
        transports: Mapping[str, Transport],
        averages: bool,
    ) -> None:
        rank, workers, traffic = transports[ALL].rank, transports[ALL].workers, transports[ALL].traffic
        node_size = transports[INSIDE].workers if INSIDE in transports else 1
        self.transports, self.averages, self.rank, self.workers = transports, averages, rank, workers
        self.topology = Topology(rank, workers, node_size)
        self.config = config = within_budget(specs, config, self.topology)
        self.specs = specs
        self.numel = {spec.name: spec.numel for spec in specs}
        self.layout = plan(specs, config, self.topology.nodes)
        self.engines = [
            BucketEngine(bucket, config, kernels_of(bucket.segments[0].name), rank, workers, node_size)
            for bucket in self.layout.buckets
        ]
        self.place = {  # of the tensors, or parts of tensors, that this rank keeps
            segment.name: (engine, i)
            for engine in self.engines
            for i, segment in enumerate(engine.bucket.segments)
            if segment.name != PADDING
        }
        compressed = [engine.whole for engine in self.engines if not engine.whole.uncompressed]
        sparse = {segment.name for bucket in compressed for segment in bucket.segments}
        self.compressed = {spec.name: spec.shape for spec in specs if spec.name in sparse}
        self.counts = ExchangeStats(workers, sum(self.numel.values()), traffic, config.density)
        self.meters = Meters(self.engines, self.counts)
        PROCESS.exchanges.append(self.counts)
        self.steps = 0  # completed steps of the whole training
        self.epoch: int | None = None  # the last epoch that the script has set, for the warm-up
        self.ending = Ending(self.engines)
        self.second = SecondMoments(self.compressed, config.seed, self.place, self.topology, averages, traffic)
        self.dense_residuals: Arrays = {}
        self.under_way = self.in_join = self.clips = self.dense = False
        self.accumulations: Mapping[str, Accumulation] = {}

    def density(self) -> float:
        """Return the density of the present step."""
        return density_at(self.config.density, self.config.warmup, self.steps, self.epoch)

    @property
    def as_stock(self) -> bool:
        """Whether this step can be the optimizer's own: density 1, and no direction of Adam is in a residual."""
        return self.density() == 1.0 and not self.second.known

    def begin(self) -> None:
        """Begin a step; roll back the one before if it was not ended. With local steps u and v decay."""
        if self.under_way:
            self.rollback()
        self.second.step, self.under_way = self.steps, True
        factor = self.config.local_decay if self.config.exchanges_weights else 1.0
        for engine in self.engines if factor < 1 else ():
            engine.state.rescale(factor)
        for v in self.dense_residuals.values():
            v *= factor

    def add_gradient(self, engine: BucketEngine, i: int, gradient: Array) -> None:
        """`BucketEngine.add_gradient`, after a measurement for Adam's second moment."""
        name = engine.bucket.segments[i].name
        accumulation = self.accumulations.get(name, _PLAIN)
        self.second.measure(name, gradient, accumulation)
        engine.add_gradient(i, gradient, accumulation)

    def compress(self, engine: BucketEngine, clip: float = 1.0, loss_scale: float = 1.0) -> Message:
        """`begin_compress`, then `message`."""
        self.begin_compress(engine, clip, loss_scale)
        return self.message(engine)

    def begin_compress(self, engine: BucketEngine, clip: float = 1.0, loss_scale: float = 1.0) -> None:
        """`BucketEngine.begin_compress` at the present step.

        Args:
            engine: engine of this exchange, with every gradient added.
            clip: factor of the gradients, in (0, 1], from `clip_factor`.
            loss_scale: factor of the loss, hence of every gradient, > 0.
        """
        self.second.scale = scale = clip / loss_scale
        self.ending.begin()
        engine.flags = (FLAG_JOINED if self.in_join else 0) | (FLAG_CLIPS if self.clips else 0)
        self.meters.diagnostics.before(engine, scale)
        with self.meters.timing(engine, "compressing"):
            engine.begin_compress(scale, self.steps, self.density())

    def message(self, engine: BucketEngine) -> Message:
        """`BucketEngine.message`; the time until it is called is not counted as compression."""
        with self.meters.timing(engine, "compressing"):
            message = engine.message()
        self.meters.compressed(engine, message)
        return message

    def receive(self, engine: BucketEngine, received: np.ndarray) -> np.ndarray | None:
        """Check the result of a round of `engine`; return the buffer of the next round, None after the last.

        Args:
            engine: engine of this exchange.
            received: result of the round, see `BucketEngine.receive`.
        """
        with self.meters.timing(engine, "decoding"):
            buffer = engine.receive(received)
        if buffer is not None:
            self.meters.count(engine, engine.round)
        return buffer

    def aggregate(self, engine: BucketEngine, loss_scale: float = 1.0) -> None:
        """`BucketEngine.aggregate_into`, after the last round; `loss_scale` as in `compress`."""
        with self.meters.timing(engine, "decoding"):
            engine.aggregate_into((1 / self.topology.nodes if self.averages else 1.0) * loss_scale)

    def settle(self, engine: BucketEngine) -> bool:
        """`BucketEngine.settle`, after `aggregate` of all buckets; return whether gradients and update are finite."""
        with self.counts.traffic.timing("decoding"):
            finite = engine.settle() and engine.outcome.finite
        self.meters.diagnostics.settled(engine)
        return finite

    def clip_factor(self, other_squares: float = 0.0) -> float:
        """Return the factor that clips this rank's whole gradient; every gradient must have been added.

        Elements that are not finite count as zero, as they enter the residual.

        Args:
            other_squares: sum of squares of the gradients that are in no bucket, >= 0; with nodes of several workers,
                whose engines have slices, of all gradients.
        """
        assert self.config.clip_norm is not None
        limit = clip_limit(self.config.clip_norm, self.topology.nodes, self.averages)
        squares = self.squares(other_squares) if self.topology.node_size == 1 else other_squares
        norm = math.sqrt(squares)
        return limit / norm if norm > limit else 1.0

    def squares(self, other_squares: float = 0.0) -> float:
        """Return the squared norm of all added gradients, with zero for elements not finite, plus `other_squares`."""
        return other_squares + sum(engine.gradients.squared_norm() for engine in self.engines)

    @property
    def all_clip(self) -> bool:
        """Whether every rank's script clips updates, as the last messages say; the same on every rank."""
        return bool(self.engines) and self.engines[0].outcome.ranks_that_clip == self.workers

    @property
    def ranks_in_join(self) -> int:
        """Number of ranks in join at the last step, as its messages say; the same on every rank."""
        return self.engines[0].outcome.ranks_in_join if self.engines else 0

    def end(self, updates: bool, others: bool = True, loss_scale: Callable[[], float] = unscaled) -> bool:
        """End the step; return whether it may be applied, the same on every rank. For arguments see `Ending.judge`."""
        finite = self.ending.judge(updates, others, loss_scale)
        self.close(finite)
        return finite

    def close(self, finite: bool) -> None:
        """End the step; unless `finite`, roll back or drop the sent elements, the same on every rank."""
        skipped_at = None if finite else (self.steps, self.ending.where())
        density = self.density()
        self.meters.close(finite, advises=self.rank == 0 and density == self.config.density < 1)
        if finite or self.ending.leaves_out:
            for engine in self.engines:
                engine.commit()
            if self.ending.empties:
                self.empty()
        else:
            for engine in self.engines:
                engine.rollback()
        if finite:
            self.dense_residuals.clear()
        elif self.dense:  # what is not applied is dropped, as stock does
            for engine in self.engines:
                engine.kernels.fill_zero(engine.state.v)
        self.second.close(finite, self.ranks_in_join)
        self.accumulations, self.under_way = {}, False
        self.counts.density_now = density
        self.steps += 1
        self.counts.end_step(skipped_at)

    def rollback(self) -> None:
        """Roll back the present step, which is given up."""
        self.meters.close(finite=False, advises=False)
        self.second.close(False)
        self.accumulations, self.under_way = {}, False
        for engine in self.engines:
            engine.rollback()

    def empty(self) -> None:
        """Set u and v of all buckets to zero."""
        for engine in self.engines:
            engine.clear()

    def clear(self) -> None:
        """Set u, v and Adam's second moments to zero, before a change of weights."""
        self.empty()
        self.second.clear()
        self.dense_residuals.clear()

    def clip_first(self, limit: float, factor: float) -> None:
        """Clip the gradients of the first step afterwards: each rank's norm to `limit`, this rank's by `factor`."""
        for engine in self.engines:
            if engine.bucket.uncompressed or not self.second.known:  # directions do not depend on a gradient's size
                engine.state.rescale(factor)
        norm = math.sqrt(self.second.squares)
        if norm > limit:  # the same decision on every rank: the moments are shared
            self.second.rescale(limit / norm)

    def residuals(self) -> ResidualState:
        """Copy the state of this rank, between two steps."""
        node_size = self.topology.node_size
        state = ResidualState(self.rank, self.workers, self.averages, self.steps, self.epoch, node_size=node_size)
        for name, (engine, i) in self.place.items():
            state.tensors[name], kept = engine.state.read(i), engine.bucket.segments[i]
            if node_size > 1:
                state.runs[name] = [kept.offset, self.numel[name]]
        for name in self.numel.keys() - self.place.keys() - set(self.layout.dense):  # kept by other workers of the node
            state.tensors[name], state.runs[name] = {RESIDUAL: np.empty(0, np.float32)}, [0, self.numel[name]]
        for name, v in self.dense_residuals.items():
            state.tensors[name] = {RESIDUAL: v.copy()}
        state.thresholds = {_key(engine): engine.thresholds for engine in self.engines}
        state.second = self.second.saved()
        return state

    def load(self, state: ResidualState) -> None:
        """Load `state` of this rank; tensors that it does not name become zero. Of whole tensors load this rank's part.

        Residuals of tensors that are in no bucket any more (it depends on the number of ranks) go to `dense_residuals`.

        Raises:
            CheckpointError: `state` is of another rank, number of ranks or model; nothing is changed.
        """
        self.check_fits(state)
        self.clear()
        self.steps, self.epoch, self.under_way = state.step, state.epoch, False
        self.second.load(state.second)
        for name, arrays in state.tensors.items():
            self.keep(name, arrays, state.runs.get(name, [0])[0])
        for engine in self.engines:
            engine.thresholds = state.thresholds.get(_key(engine), np.empty(0))
        dense = set(self.layout.dense)
        left = {name: released(arrays)[RESIDUAL] for name, arrays in state.tensors.items() if name in dense}
        self.dense_residuals.update((name, v.copy()) for name, v in left.items() if v.any())

    def fade(self, name: str, factor: float) -> None:
        """Multiply the residual of a tensor by `factor`, in [0, 1]; drop its entry in `dense_residuals`."""
        self.dense_residuals.pop(name, None)
        if name in self.place:
            engine, i = self.place[name]
            engine.state.fade(i, factor)

    def keep(self, name: str, arrays: Arrays, first: int = 0) -> None:
        """Set this rank's part of a tensor's state.

        Args:
            name: name of the tensor.
            arrays: arrays of the tensor, or of a range of it that includes this rank's part, by name of the part.
            first: index in the tensor of the arrays' first element.
        """
        if name in self.place:
            engine, i = self.place[name]
            kept = engine.bucket.segments[i]
            engine.state.write(i, {part: array[kept.offset - first :][: kept.numel] for part, array in arrays.items()})

    def _keeps(self, name: str) -> tuple[int, int]:
        """Return start and end, in a tensor, of the elements that this rank keeps."""
        if name in self.place:
            engine, i = self.place[name]
            kept = engine.bucket.segments[i]
            return kept.offset, kept.offset + kept.numel
        return 0, self.numel[name] if name in self.layout.dense else 0

    def check_fits(self, state: ResidualState) -> None:
        """Raise CheckpointError unless `load` can take `state`."""
        ours = self.workers, self.rank, self.averages, (node_size := self.topology.node_size)
        if ours != (state.workers, state.rank, state.averages, state.node_size):
            raise CheckpointError(
                f"the residuals are of rank {state.rank} of {state.workers} in nodes of {state.node_size}, "
                f"{combining(state.averages)} gradients; this is rank {self.rank} of {self.workers} in nodes of "
                f"{node_size}, {combining(self.averages)}; use load_checkpoint, which redistributes residuals"
            )
        # after a flush other layers may be trained
        anew = self.numel.keys() != state.tensors.keys() and is_flushed(state)
        for name in self.numel.keys() & state.tensors.keys() if anew else state.tensors:
            state.check_fits(name, self.numel.get(name), *self._keeps(name))
        self.second.check_fits(state.second)
        ours_to_keep = [name for name in self.compressed if name in self.place]
        ours_to_keep += [name for name in self.layout.dense if name in state.tensors]
        missing = [name for name in ours_to_keep if RESIDUAL not in state.tensors.get(name, {})]
        if missing and state.tensors and not anew:
            names = ", ".join(map(repr, missing[:3]))
            raise CheckpointError(f"there are no residuals of {names}: {FROZEN_SINCE}")

    def stats(self) -> dict[str, Any]:
        """Return counters, figures of the last sampled step, and under ``buckets`` the counts of every bucket."""
        return {**self.counts.stats(), **self.counts.figures, "buckets": self.meters.bucket_stats()}

    def state_arrays(self) -> dict[str, dict[str, np.ndarray]]:
        """Copy this rank's u and v of every tensor, by name, for tests and tools."""
        arrays = {}
        for name, (engine, i) in self.place.items():
            kept = engine.state.read(i)
            arrays[name] = {part: kept.get(part, np.zeros_like(kept[RESIDUAL])) for part in (MOMENTUM, RESIDUAL)}
        return arrays


def _key(engine: BucketEngine) -> str:
    """Return a bucket's key in a record of thresholds; it differs for another layout, whose thresholds do not fit."""
    bucket = engine.bucket  # "scope bucket": as in records of runs that could have another scope
    return f"bucket {bucket.index}, {bucket.numel} elements, {engine.config.rule}, scope bucket"
