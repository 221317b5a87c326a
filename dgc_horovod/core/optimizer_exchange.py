"""The exchange of one optimizer: its buckets, what a rank keeps of them, and the step that they are at."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dgc_horovod.config import RULES, DGCConfig
from dgc_horovod.core.adam import AdamStep
from dgc_horovod.core.bucketing import TensorSpec, plan
from dgc_horovod.core.budget import card_bytes, within_budget
from dgc_horovod.core.clipping import clip_limit
from dgc_horovod.core.ending import Ending, unscaled
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.core.meters import Meters
from dgc_horovod.core.second_moment import SecondMoments
from dgc_horovod.core.workspace import Message
from dgc_horovod.errors import CheckpointError
from dgc_horovod.exchange.hierarchical import Topology
from dgc_horovod.kernels.contract import Accumulation, Array, ErrorFeedback, Kernels
from dgc_horovod.schedule import density_at
from dgc_horovod.state.parts import is_flushed, refuse_missing
from dgc_horovod.state.residual_state import MOMENTUM, RESIDUAL, Arrays, ResidualState, combining, released
from dgc_horovod.stats import PROCESS, ExchangeStats, Traffic
from dgc_horovod.wire.bucket import PADDING

_PLAIN: Accumulation = ErrorFeedback()


class OptimizerExchange:
    """The engines of one optimizer, and what they have in common at each step.

    An adapter's exchange is one of these, which turns tensors into arrays, starts collectives and waits for them. A
    step is `begin` and its `accumulations`; for each bucket `add_gradient`, `compress`, `receive` after every round,
    `aggregate`; then `end`.

    Args:
        specs: name, shape and boundary of every tensor that takes part, in the model's order.
        config: compression settings; the density may be lowered, see `within_budget`.
        kernels_of: function that gives the kernels on the device of the tensor of that name.
        rank: index of this worker, 0 <= rank < workers.
        workers: N >= 1.
        averages: whether the ranks' gradients are averaged (True) or summed.
        traffic: counter of the messages; the adapter's collectives count there too.
        node_size: G >= 1, the workers of a node, which combine their gradients before they are added here; each keeps a
            slice of every bucket.

    Attributes:
        under_way: whether a step has begun, and has not ended.
        accumulations: form in which gradients enter the residual in this step, by name, set after `begin`; plain error
            feedback for all that are not named.
        dense_residuals: what tensors in no bucket have from when they were in one, flat, by name; an adapter adds it to
            their next gradient.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        config: DGCConfig,
        kernels_of: Callable[[str], Kernels],
        rank: int,
        workers: int,
        averages: bool,
        traffic: Traffic,
        node_size: int = 1,
    ) -> None:
        self.rank, self.workers, self.averages = rank, workers, averages
        self.topology = Topology(rank, workers, node_size)
        self.config = config = within_budget(specs, config, self.topology)
        self.specs = specs
        self.numel = {spec.name: spec.numel for spec in specs}
        self.layout = plan(specs, config, self.topology.nodes)
        self.engines = [
            BucketEngine(bucket, config, kernels_of(bucket.segments[0].name), rank, workers, node_size)
            for bucket in self.layout.buckets
        ]
        self.place = {  # of the tensors, or runs of tensors, that this rank keeps
            segment.name: (engine, i)
            for engine in self.engines
            for i, segment in enumerate(engine.bucket.segments)
            if segment.name != PADDING
        }
        self._compressed = {
            segment.name
            for engine in self.engines
            for segment in engine.whole.segments
            if not engine.whole.uncompressed
        }
        self.counts = ExchangeStats(workers, sum(self.numel.values()), traffic, config.final_density)
        self.meters = Meters(self.engines, self.counts)
        PROCESS.exchanges.append(self.counts)
        self.steps = 0  # finished so far, of the whole training
        self.epoch: int | None = None  # that the warm-up was told last
        self.ending = Ending(self.engines)
        shapes = {spec.name: spec.shape for spec in specs if spec.name in self._compressed}
        self.second = SecondMoments(shapes, config.seed, self.topology.nodes, averages)
        self.adam = AdamStep(self.second, self.place, workers, self.topology.nodes, traffic)
        self.dense_residuals: Arrays = {}
        self.under_way = False
        self.accumulations: Mapping[str, Accumulation] = {}

    def is_compressed(self, name: str) -> bool:
        """Whether a tensor is on the sparse path."""
        return name in self._compressed

    @property
    def compressed(self) -> list[str]:
        """Tensors on the sparse path."""
        return [name for name in self.numel if self.is_compressed(name)]

    def card_bytes(self) -> int:
        """`budget.card_bytes` of these tensors."""
        return card_bytes(self.specs, self.config, self.topology)

    def density(self) -> float:
        """Density of the step under way."""
        return density_at(self.config.final_density, self.config.warmup, self.steps, self.epoch)

    @property
    def as_stock(self) -> bool:
        """Whether the step under way may be the optimizer's own: all is sent, and no direction of Adam has waited."""
        return RULES[self.config.rule].sets_density and self.density() == 1.0 and not self.second.known

    def drop_residuals(self) -> None:
        """Empty the residuals: of a dense step that is not applied nothing is kept."""
        for engine in self.engines:
            engine.state.drop_residual()

    def begin(self) -> None:
        """Begin a step. One before it that was not finished has sent nothing that counts."""
        if self.under_way:
            self.rollback()
        self.adam.step, self.under_way = self.steps, True

    def add_gradient(self, engine: BucketEngine, i: int, gradient: Array) -> None:
        """`BucketEngine.add_gradient`; of Adam's gradients the ranks learn something beside."""
        name = engine.bucket.segments[i].name
        accumulation = self.accumulations.get(name, _PLAIN)
        self.adam.measure(name, gradient, accumulation)
        engine.add_gradient(i, gradient, accumulation)

    def compress(self, engine: BucketEngine, clip: float = 1.0, loss_scale: float = 1.0) -> Message:
        """`BucketEngine.compress` at the present step.

        Args:
            engine: engine of this exchange, with every gradient added.
            clip: factor of the gradients, in (0, 1], from `clip_factor`.
            loss_scale: factor of the loss, hence of every gradient, > 0.
        """
        self.adam.scale = scale = clip / loss_scale
        self.ending.begin()
        self.meters.compressing(engine, scale)
        with self.counts.traffic.timing("compressing"):
            message = engine.compress(scale, self.steps, self.density())
        self.meters.compressed(engine, message)
        return message

    def receive(self, engine: BucketEngine, received: np.ndarray) -> np.ndarray | None:
        """Take what a round of the exchange of `engine` has brought; what the next one sends, None after the last.

        Args:
            engine: engine of this exchange.
            received: buffer that the round has brought, see `BucketEngine.receive`.
        """
        self.meters.decoding(engine)
        with self.counts.traffic.timing("decoding"):
            buffer = engine.receive(received)
        self.meters.received(engine, sends=buffer is not None)
        return buffer

    def aggregate(self, engine: BucketEngine, loss_scale: float = 1.0) -> bool:
        """Put what all ranks sent together, into the outputs of `engine`; returns whether it is finite.

        Args:
            engine: engine of this exchange, all of whose rounds are through.
            loss_scale: factor of the gradients, > 0, see `compress`.
        """
        self.meters.decoding(engine)
        with self.counts.traffic.timing("decoding"):
            finite = engine.aggregate_into(self.mean_scale * loss_scale) and engine.outcome.finite
        self.meters.aggregated(engine)
        return finite

    def clip_factor(self, other_squares: float = 0.0) -> float:
        """The factor that brings this rank's whole gradient within its limit; every gradient must have been added.

        What is not finite enters as zero, so it counts as zero here.

        Args:
            other_squares: sum of the squares of the gradients that are in no bucket, >= 0; on nodes of several workers,
                whose engines have slices, of all gradients.
        """
        assert self.config.clip_norm is not None
        limit = clip_limit(self.config.clip_norm, self.topology.nodes, self.averages)
        squares = self.squares(other_squares) if self.topology.node_size == 1 else other_squares
        norm = math.sqrt(squares)
        return limit / norm if norm > limit else 1.0

    def squares(self, other_squares: float = 0.0) -> float:
        """Squared norm of all gradients that were added, what is not finite as zero, and of `other_squares`."""
        return other_squares + sum(engine.gradients.squared_norm() for engine in self.engines)

    @property
    def in_join(self) -> bool:
        """Whether this rank is in join, so that its steps are those of the others."""
        return any(engine.in_join for engine in self.engines)

    @property
    def all_clip(self) -> bool:
        """Whether every rank's script clips updates, according to the last messages; the same on every rank."""
        return bool(self.engines) and self.engines[0].outcome.ranks_that_clip == self.workers

    @property
    def ranks_in_join(self) -> int:
        """How many ranks were in join at the last step, according to its messages; the same on every rank."""
        return self.engines[0].outcome.ranks_in_join if self.engines else 0

    @property
    def mean_scale(self) -> float:
        """What the sum over nodes is multiplied by."""
        return 1 / self.topology.nodes if self.averages else 1.0

    def end(self, updates: bool, others: bool = True, loss_scale: Callable[[], float] = unscaled) -> bool:
        """End the step; returns whether it may be applied, the same on every rank: see `Ending.judge` for the rest."""
        finite = self.ending.judge(updates, others, loss_scale)
        self.close(finite)
        return finite

    def close(self, finite: bool) -> None:
        """End the step; unless `finite`, take back what was sent in it, or leave it out, as every rank does."""
        skipped_at = None if finite else (self.steps, self.ending.where())
        density = self.density()
        self.meters.close(finite, advises=self.rank == 0 and density == self.config.final_density < 1)
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
        self.adam.close(finite, self.ranks_in_join)
        self.accumulations, self.under_way = {}, False
        self.counts.density_now = density
        self.steps += 1
        self.counts.end_step(skipped_at)

    def rollback(self) -> None:
        """Take back what the step under way has sent, which is given up."""
        self.meters.close(finite=False, advises=False)
        self.adam.close(False)
        self.accumulations, self.under_way = {}, False
        for engine in self.engines:
            engine.rollback()

    def empty(self) -> None:
        """Empty u and v: all that was not sent is applied, or lost."""
        for engine in self.engines:
            engine.clear()

    def clear(self) -> None:
        """Empty u and v, and know nothing of Adam's second moment: the weights are about to be others."""
        self.empty()
        self.second.clear()
        self.dense_residuals.clear()

    def decay(self, factor: float) -> None:
        """Multiply all that waits on this rank by `factor`, in (0, 1]."""
        for engine in self.engines if factor < 1 else ():
            engine.state.rescale(factor)
        for v in self.dense_residuals.values():
            v *= factor

    def clip_first(self, limit: float, factor: float) -> None:
        """The first step, which is over, should have kept to a `limit` of each rank's norm: here by a `factor`."""
        for engine in self.engines:
            if engine.bucket.uncompressed or not self.second.known:  # a direction is the same for any size
                engine.state.rescale(factor)
        norm = math.sqrt(self.second.squares)
        if norm > limit:  # the same on every rank, as what is shared must stay
            self.second.rescale(limit / norm)

    def residuals(self) -> ResidualState:
        """A copy of all that this rank keeps. Between two steps only."""
        node_size = self.topology.node_size
        state = ResidualState(self.rank, self.workers, self.averages, self.steps, self.epoch, node_size=node_size)
        for name, (engine, i) in self.place.items():
            state.tensors[name], kept = engine.state.read(i), engine.bucket.segments[i]
            if node_size > 1:
                state.runs[name] = [kept.offset, self.numel[name]]
        for name in self.numel.keys() - self.place.keys() - set(self.layout.dense):  # other workers of the node have it
            state.tensors[name], state.runs[name] = {RESIDUAL: np.empty(0, np.float32)}, [0, self.numel[name]]
        for name, v in self.dense_residuals.items():
            state.tensors[name] = {RESIDUAL: v.copy()}
        state.thresholds = {_key(engine): engine.thresholds for engine in self.engines}
        state.second = self.second.saved()
        return state

    def load(self, state: ResidualState) -> None:
        """Go on from `state`, of this rank; what it does not name is zero. Of whole tensors it takes what it keeps.

        What it has of tensors that are in no bucket any more, as the number of ranks decides, is in `dense_residuals`.

        Raises:
            CheckpointError: it is of another rank, another number of ranks or another model; nothing is changed then.
        """
        self.check_fits(state)
        self.clear()
        self.steps, self.epoch, self.under_way = state.step, state.epoch, False
        self.second.load(state.second)
        for name, arrays in state.tensors.items():
            self.keep(name, arrays, state.runs.get(name, [0])[0])
        for engine in self.engines:
            memory = state.thresholds.get(_key(engine), np.empty(0))
            engine.thresholds = memory
        dense = set(self.layout.dense)
        left = {name: released(arrays)[RESIDUAL] for name, arrays in state.tensors.items() if name in dense}
        self.dense_residuals.update((name, v.copy()) for name, v in left.items() if v.any())

    def fade(self, name: str, factor: float) -> None:
        """Multiply what waits here of a tensor by `factor`, in [0, 1]; what an uncompressed one has left ends."""
        self.dense_residuals.pop(name, None)
        if name in self.place:
            engine, i = self.place[name]
            engine.state.fade(i, factor)

    def keep(self, name: str, arrays: Arrays, first: int = 0) -> None:
        """Keep of a tensor what this rank keeps of it.

        Args:
            name: name of the tensor.
            arrays: arrays of it, by part, or of a run of it that holds what is kept.
            first: index in the tensor of their first element.
        """
        if name in self.place:
            engine, i = self.place[name]
            kept = engine.bucket.segments[i]
            engine.state.write(i, {part: array[kept.offset - first :][: kept.numel] for part, array in arrays.items()})

    def _keeps(self, name: str) -> tuple[int, int]:
        """Index of the first element of a tensor of which this rank keeps something, and that behind the last."""
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
                f"{node_size}, {combining(self.averages)}; load_checkpoint hands them on"
            )
        # after a flush other layers may be trained
        anew = self.numel.keys() != state.tensors.keys() and is_flushed(state, self.config.exchanges_weights)
        for name in self.numel.keys() & state.tensors.keys() if anew else state.tensors:
            state.check_fits(name, self.numel.get(name), *self._keeps(name))
        self.second.check_fits(state.second)
        ours_to_keep = [name for name in self.compressed if name in self.place]
        ours_to_keep += [name for name in self.layout.dense if name in state.tensors]
        missing = [name for name in ours_to_keep if RESIDUAL not in state.tensors.get(name, {})]
        if missing and state.tensors and not anew:
            refuse_missing(missing)

    def stats(self) -> dict[str, Any]:
        """Counters, figures of the last step that was looked at, and under ``buckets`` those of every bucket."""
        return {**self.counts.stats(), **self.counts.figures, "buckets": self.meters.bucket_stats()}

    def state_arrays(self) -> dict[str, dict[str, np.ndarray]]:
        """Copies of u and v of what this rank keeps of tensors, by name: what tests and tools look at."""
        arrays = {}
        for name, (engine, i) in self.place.items():
            kept = engine.state.read(i)
            arrays[name] = {part: kept.get(part, np.zeros_like(kept[RESIDUAL])) for part in (MOMENTUM, RESIDUAL)}
        return arrays


def _key(engine: BucketEngine) -> str:
    """A bucket's name in a record of thresholds, of which those of another layout are of no use."""
    bucket, config = engine.bucket, engine.config
    return f"bucket {bucket.index}, {bucket.numel} elements, {config.rule}, scope {config.scope}"
