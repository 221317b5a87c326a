"""Adam's part of an exchange: second moments of all tensors, and the measurements that the ranks add up for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.core.second_moment import GAIN, INTERVAL, POOLS, RATE, SAMPLES, STEPS, Moment
from dgc_horovod.errors import CheckpointError
from dgc_horovod.exchange.hierarchical import Topology
from dgc_horovod.kernels.contract import Accumulation, Array, ErrorFeedback, Kernels, SharedMoment
from dgc_horovod.stats import Traffic


class SecondMoments:
    """The second moments of all compressed tensors of one optimizer, and their part of each step.

    Args:
        shapes: shape of each tensor, by name, in one order on all ranks.
        seed: seed of the signs, the same on all ranks.
        place: engine and segment index of each tensor that this rank keeps elements of.
        topology: place of this worker; the gradients of its M nodes are combined.
        averages: whether they are averaged or summed.
        traffic: counter of the messages.

    Attributes:
        step: index of the present step, from 0.
        scale: factor of this rank's gradients in it (clipping, loss scale), > 0.

    Memory: 24 bytes for each row and column, and 8 for each column of the tensors that are measured at a step.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        seed: int,
        place: Mapping[str, tuple[BucketEngine, int]],
        topology: Topology,
        averages: bool,
        traffic: Traffic,
    ) -> None:
        self._seed, self._place, self._topology, self._traffic = seed, place, topology, traffic
        self._moments = {name: Moment(shapes[name], topology.nodes, averages, i) for i, name in enumerate(shapes)}
        self.step, self.scale = 0, 1.0
        self._learns = False
        self._measured: dict[str, tuple[Kernels, Array, int]] = {}
        self._signs: tuple[int, dict[str, np.ndarray]] | None = None  # step, and signs by tensor
        self._summed: np.ndarray | None = None  # sum of all ranks' messages

    def __getitem__(self, name: str) -> Moment:
        return self._moments[name]

    @property
    def known(self) -> bool:
        """Whether any tensor's moment is known."""
        return any(moment.known for moment in self._moments.values())

    @property
    def squares(self) -> float:
        """Sum of `Moment.squares` over all tensors."""
        return sum(moment.squares for moment in self._moments.values())

    # -- a step, in this order

    def feed(self, name: str, b2: float, eps: float, rate: float) -> Accumulation:
        """Return how the gradient of a tensor enters the residual at this step.

        The residual fades first if the learning rate has risen; that takes one pass over it.

        Args:
            name: name of the tensor.
            b2, eps: Adam's.
            rate: learning rate of this step, >= 0.
        """
        self._learns = True
        moment = self._moments[name]
        fading = moment.begin(b2, eps, rate)
        if name not in self._place:  # another worker of the node keeps it
            return ErrorFeedback()
        engine, i = self._place[name]
        if fading < 1:
            engine.state.fade(i, fading)
        return moment.fed_to(engine.kernels, engine.bucket.segments[i].offset)

    def measure(self, name: str, gradient: Array, accumulation: Accumulation) -> None:
        """Measure this rank's gradient of a tensor before it enters the residual, if it is due.

        Cost: one read of the gradient.
        """
        if isinstance(accumulation, SharedMoment) and self._is_due(name):
            kernels, at = self._place[name][0].kernels, accumulation.offset
            found = kernels.measure(gradient, at, kernels.from_host(self._signs_of(name)))
            self._measured[name] = kernels, found, at // self[name].b

    @property
    def due(self) -> list[str]:
        """The tensors to measure at this step, all at step 0; the same on every rank."""
        return [name for name in self._moments if self._is_due(name)]

    def _is_due(self, name: str) -> bool:
        """Whether a tensor is to be measured, by the step only: one rank alone may have loaded a moment."""
        return self.step == 0 or self[name].number % INTERVAL == self.step % INTERVAL

    def _signs_of(self, name: str) -> np.ndarray:
        """Return the signs of a tensor; they are drawn for all due tensors at once, while the code is in the cache."""
        if self._signs is None or self._signs[0] != self.step:
            self._signs = self.step, {due: self._drawn(self[due]) for due in self.due}
        return self._signs[1][name]

    def _drawn(self, moment: Moment) -> np.ndarray:
        seeds = self._seed, moment.number, self.step
        drawn = np.random.Generator(np.random.Philox(np.random.SeedSequence(seeds))).bytes(moment.b // 4 + 1)
        bits = np.unpackbits(np.frombuffer(drawn, np.uint8), count=2 * moment.b)
        return bits * np.float32(2) - np.float32(1)

    def message(self) -> np.ndarray | None:
        """Return the vector that the ranks add up after all buckets are compressed; None if nothing is due.

        It has sums of squares by row and column, and products with the signs, float32.
        """
        if not self._learns:
            return None
        told, measured = [], self._fetched()
        for name in self.due:
            rows, columns, pools = (np.zeros(n) for n in (self[name].a, self[name].b, POOLS))
            if name in measured:
                numbers, b = measured[name].astype(np.float64), columns.size
                first = self._measured[name][2]
                here = np.arange(first, first + (numbers.size - b) // 2)
                rows[here], columns[:], products = np.split(numbers, [here.size, here.size + b])
                pools[:] = np.bincount(here % POOLS, products, POOLS)  # a sum of products with random signs is one too
            told += [self.scale**2 * rows, self.scale**2 * columns, self.scale * pools]
        self._measured.clear()
        if not told:  # there are fewer tensors than steps between two measurements
            self._summed = np.empty(0, np.float32)
            return None
        message = np.concatenate(told).astype(np.float32)
        self._traffic.count_allreduce(message.nbytes, self._topology.workers)
        return message

    def _fetched(self) -> dict[str, np.ndarray]:
        """Return the measurements of this step on the host, with one wait for each backend."""
        found: dict[str, np.ndarray] = {}
        for kernels in {id(kernels): kernels for kernels, _, _ in self._measured.values()}.values():
            names = [name for name, (its, _, _) in self._measured.items() if its is kernels]
            found.update(zip(names, kernels.fetch([self._measured[name][1] for name in names]), strict=True))
        return found

    def receive(self, summed: np.ndarray) -> None:
        """Take the sum of all ranks' messages."""
        self._summed = summed

    def close(self, applied: bool, ranks_in_join: int = 0) -> None:
        """End the step; learn from it if it is applied. Ranks in join have no gradient."""
        if applied and self._summed is not None:
            self._learn(self._summed, self._topology.nodes * (1 - ranks_in_join / self._topology.workers))
        self._learns, self._summed = False, None
        self._measured.clear()

    def _learn(self, summed: np.ndarray, senders: float) -> None:
        """Learn from the sum of all ranks' messages. `senders`: number of gradients in it, in [0, M]."""
        at = 0
        for name in self.due:
            size = self[name].a + self[name].b + POOLS
            told = summed[at : at + size].astype(np.float64)
            at += size
            if senders:
                self[name].learn(told / senders)
        for moment in self._moments.values():
            moment.values[STEPS] += 1

    # -- state

    def take(self, name: str, square: np.ndarray, rest: np.ndarray, steps: int, b2: float, eps: float) -> None:
        """Start from stock Adam's second moment; convert the residual from gradients to directions.

        Args:
            name, square, steps, b2: see `Moment.take`.
            rest: gradient of the whole tensor, flat, that is still to be applied in addition to the residual.
            eps: Adam's eps.
        """
        moment = self[name]
        moment.take(square, steps, b2)
        if name in self._place:
            engine, i = self._place[name]
            segment, (rows, columns) = engine.bucket.segments[i], moment.factors(eps)
            row, column = np.divmod(np.arange(segment.offset, segment.offset + segment.numel), moment.b)
            v = engine.kernels.to_host(engine.state.v[segment.place]) + rest[segment.offset :][: segment.numel]
            v = v * rows[row] * columns[column] / GAIN  # its steps were without the gain
            engine.kernels.write(engine.state.v[segment.place], v.astype(np.float32))

    def clear(self) -> None:
        """Set all moments to zero."""
        self._measured.clear()
        for name in self._moments:
            self.forget(name)

    def forget(self, name: str) -> None:
        """Set the moment of a tensor to zero."""
        self._moments[name].know(0.0)

    def rescale(self, factor: float) -> None:
        """Scale the moments as if the gradients had been `factor` times as large."""
        for moment in self._moments.values():
            values, kept = moment.values * factor**2, [SAMPLES, STEPS, RATE]
            values[kept] = moment.values[kept]
            moment.know(values)

    def saved(self) -> dict[str, np.ndarray]:
        """Copy the values by tensor, the same on every rank; empty if nothing is known."""
        return {name: moment.values.copy() for name, moment in self._moments.items()} if self.known else {}

    def packed(self) -> np.ndarray:
        """Return all values as one vector for `unpack`, of one size on all ranks."""
        return np.concatenate([moment.values for moment in self._moments.values()] or [np.empty(0)])

    def unpack(self, values: np.ndarray) -> None:
        """Set all values from the `packed` vector of another rank."""
        at = 0
        for moment in self._moments.values():
            size = moment.values.size
            moment.know(values[at : at + size])
            at += size

    def check_fits(self, saved: Mapping[str, np.ndarray]) -> None:
        """Raise CheckpointError unless `load` can take `saved`."""
        for name, values, moment in self._found(saved):
            if values.size != moment.values.size:
                raise CheckpointError(
                    f"the second moment of {name!r} has {values.size} numbers in the checkpoint, expected "
                    f"{moment.values.size}: the checkpoint is of another model"
                )

    def load(self, saved: Mapping[str, np.ndarray]) -> None:
        """Set all values from `saved`; moments that are missing become zero."""
        self.clear()
        for name, values, _ in self._found(saved):
            self[name].know(values)

    def _found(self, saved: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray, Moment]]:
        """Yield name, saved values and moment of each tensor that `saved` has; earlier versions saved no rate."""
        for name, values in saved.items():
            if name in self._moments:
                moment = self[name]
                earlier = values.size == moment.values.size - 1
                yield name, np.insert(values, RATE, 0.0) if earlier else values, moment
