"""Adam's second moment by rows and columns, the same on every rank, learnt from small sums that the ranks exchange.

For a tensor seen as a matrix of a x b, of its gradient G_i on rank i::

    R = b2^E R + (1-b2^E) rowmeans(mean_i(G_i^2)),  C alike by columns,  m = mean(R)      Adafactor, arXiv 1804.04235
    M = b2^E M + (1-b2^E) |rowsums(mean_i(G_i) * S)|^2 / (a*b),  S: random signs          of the mean gradient
    den^2 = (M + eps^2) * (R / m) * (C / m);  what enters is 1.4 * G_i / den, bounded by 10

The squares of each rank's own gradient are larger than those of the mean gradient. Products with random signs can be
added up over ranks, and give the level of the mean gradient. A tensor is measured at every E-th step, a quarter of the
tensors at each step. A measurement takes effect at the next step; before its first measurement, a tensor's gradient
does not enter the residual.

When the learning rate rises, the residual fades by the old rate over the new one: its gradients keep the rate that they
came with. Those of a warm-up, which are the worst of a run, would be applied at the highest rate otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dgc_horovod.errors import CheckpointError
from dgc_horovod.kernels.contract import Array, Kernels, SharedMoment

INTERVAL = 4  # E, steps from one measurement of a tensor to the next
FLOOR = 1e-2  # least value of R and C over their means: else a row with rare gradients would move too far at the next
BOUND = 10.0  # largest magnitude that enters: Adam's own at b2 = .99, whose second moment has the present gradient
POOLS = 64  # number of sums of products: with more, the level of the mean gradient varies less by chance
GAIN = 1.4  # factor of Adam's learning rate: sent sums of many steps have less noise, and allow longer steps
_LEAST_COLUMNS = 16  # with fewer, the pass is several times slower than memory
_MEAN, _SAMPLES, _STEPS, _RATE, _NUMBERS = range(5)  # in `Moment.values`, before the rows and the columns
_SMALLEST = float(np.finfo(np.float64).tiny)  # in place of a rate of 0, which says that there was no step


def matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of a tensor as a matrix: leading by trailing dimensions, with the least sum of both.

    Rows are joined until there are 16 columns; the last row may then be incomplete.
    """
    numel = math.prod(shape)
    columns = min((math.prod(shape[i:]) for i in range(len(shape) + 1)), key=lambda b: numel // b + b)
    columns = min(columns * -(-_LEAST_COLUMNS // columns), numel)
    return -(-numel // columns), columns


class Moment:
    """The second moment of one tensor, the same on every rank, and the factors of its gradient in this rank's passes.

    Args:
        shape: shape of the tensor, of at least one element.
        gradients: M >= 1, number of gradients that are combined, of ranks or of nodes.
        averages: whether they are averaged or summed.
        number: index of the tensor; it decides at which steps the tensor is measured.

    Attributes:
        values: all values, float64: M (above), number of measurements in the averages, Adam's steps so far, the last
            step's learning rate (0: no step), R and C.
        feed: how the gradient enters the residual; None before the first gradient.
        b2, eps: Adam's, of the present step.
    """

    def __init__(self, shape: Sequence[int], gradients: int, averages: bool, number: int = 0) -> None:
        self.number, self.numel, (self.a, self.b) = number, math.prod(shape), matrix_of(shape)
        self.feed: SharedMoment | None = None
        self.kernels: Kernels | None = None  # of the feed
        self._factors: Array = None  # of rows, then of columns, which the feed has
        self.b2 = self.eps = 0.0
        self._gradients, self._sum = gradients, 1 if averages else gradients  # stock Adam sees the sum of so many
        self.values = np.zeros(_NUMBERS + self.a + self.b)
        self.rows, self.columns = self.values[_NUMBERS:][: self.a], self.values[_NUMBERS + self.a :]
        last = self.numel - (self.a - 1) * self.b  # elements of the last row
        self._per_row = np.where(np.arange(self.a) == self.a - 1, last, self.b)
        self._per_column = np.where(np.arange(self.b) < last, self.a, self.a - 1)

    @property
    def steps(self) -> int:
        """Adam's steps so far."""
        return int(self.values[_STEPS])

    def fading(self, rate: float) -> float:
        """Return the factor of the residual in a step with learning rate `rate`, in [0, 1]; remember the rate."""
        before, self.values[_RATE] = float(self.values[_RATE]), max(rate, _SMALLEST)
        return before / rate if 0 < before < rate else 1.0

    @property
    def known(self) -> bool:
        """Whether a gradient has been measured."""
        return bool(self.values[_SAMPLES]) and bool(self.rows.any())

    @property
    def squares(self) -> float:
        """Mean over the ranks of their gradients' squared norms, averaged over steps."""
        return float(self.rows @ self._per_row)

    def _mean_square(self) -> float:
        level = float(self.rows.mean())
        return min(max(float(self.values[_MEAN]), level / self._gradients), level)

    def factors(self, eps: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the factors of each row and each column that turn a gradient into a direction; zeros if not `known`.

        The ranks' directions are averaged, or summed, as gradients are.
        """
        if not self.known:
            return np.zeros(self.a), np.zeros(self.b)
        rows, columns = (np.maximum(x / x.mean(), FLOOR) for x in (self.rows, self.columns))
        return GAIN / (self._sum * np.sqrt((self._mean_square() + eps**2) * rows)), 1 / np.sqrt(columns)

    def square(self) -> np.ndarray:
        """Return stock Adam's second moment of every element, flat float32; zeros if not `known`."""
        if not self.known:
            return np.zeros(self.numel, np.float32)
        rows, columns = self.rows / self.rows.mean(), self.columns / self.columns.mean()
        return np.outer(self._sum**2 * self._mean_square() * rows, columns).astype(np.float32).reshape(-1)[: self.numel]

    def take(self, square: np.ndarray, steps: int, b2: float) -> None:
        """Start from stock Adam's second moment.

        Args:
            square: second moment, flat, divided by ``1-b2**steps``.
            steps: number of Adam's steps, >= 0.
            b2: decay of the second moment.
        """
        whole = np.zeros(self.a * self.b)
        whole[: self.numel] = square
        matrix = whole.reshape(self.a, self.b) / self._sum**2
        self.rows[:], self.columns[:] = matrix.sum(1) / self._per_row, matrix.sum(0) / self._per_column
        self.values[[_MEAN, _SAMPLES, _STEPS]] = self.rows.mean(), max(steps // INTERVAL, bool(steps)), steps
        self.refresh()

    def learn(self, told: np.ndarray) -> None:
        """Learn from a measurement: sums of squares by row and by column, and sums of products, means over ranks."""
        rows, columns = told[: self.a] / self._per_row, told[self.a :][: self.b] / self._per_column
        mean = np.square(told[self.a + self.b :]).sum() / self.numel
        if not (np.isfinite(told).all() and math.isfinite(mean)):
            return
        keep = self.b2**INTERVAL
        self.values[_SAMPLES] += 1
        share = (1 - keep) / (1 - keep ** self.values[_SAMPLES])
        self.values[_MEAN] += share * (mean - self.values[_MEAN])
        for average, x in ((self.rows, rows), (self.columns, columns)):
            average *= 1 - share
            average += share * x
        self.refresh()

    def know(self, values: np.ndarray | float) -> None:
        """Set `values`."""
        self.values[:] = values
        self.refresh()

    def fed_to(self, kernels: Kernels, offset: int) -> SharedMoment:
        """Return the feed, made at the first call; for arguments see `SecondMoments.feed`."""
        if self.feed is None:
            self.kernels, self._factors = kernels, kernels.new(self.a + self.b)
            self.feed = SharedMoment(self._factors[: self.a], self._factors[self.a :], BOUND, offset)
            self.refresh()
        return self.feed

    def refresh(self) -> None:
        """Update the factors for the next passes."""
        if self.kernels is not None:
            self.kernels.write(self._factors, np.concatenate(self.factors(self.eps)).astype(np.float32))


class SecondMoments:
    """The second moments of all compressed tensors of one optimizer.

    Args:
        shapes: shape of each tensor, by name, in one order on all ranks.
        seed: seed of the signs, the same on all ranks.
        gradients: M >= 1, number of gradients that are combined, of ranks or of nodes.
        averages: whether they are averaged or summed.

    Memory: 24 bytes for each row and column, and 8 for each column of the tensors that are measured at a step.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], seed: int, gradients: int, averages: bool) -> None:
        self._seed = seed
        self._moments = {name: Moment(shapes[name], gradients, averages, i) for i, name in enumerate(shapes)}
        self._measured: dict[str, tuple[Kernels, Array, int]] = {}
        self._signs: tuple[int, dict[str, np.ndarray]] | None = None  # step, and signs by tensor

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

    def begin(self, name: str, b2: float, eps: float) -> None:
        """Set Adam's b2 and eps of a tensor for the present step."""
        moment = self._moments[name]
        changed, moment.b2, moment.eps = moment.eps != eps, b2, eps
        if changed:
            moment.refresh()

    def feed(self, name: str, kernels: Kernels, offset: int) -> SharedMoment:
        """Return how the gradient of a tensor enters the residual.

        Args:
            name: name of the tensor.
            kernels: backend that holds the tensor.
            offset: index in the tensor of the first element that this rank keeps.
        """
        return self._moments[name].fed_to(kernels, offset)

    # -- measurements

    def due(self, step: int) -> list[str]:
        """Return the tensors to measure at a step of the exchange, all at step 0; the same on every rank."""
        return [name for name in self._moments if self.is_due(name, step)]

    def is_due(self, name: str, step: int) -> bool:
        """Return whether a tensor is to be measured, by the step only: one rank alone may have loaded a moment."""
        return step == 0 or self._moments[name].number % INTERVAL == step % INTERVAL

    def measure(self, name: str, gradient: Array, step: int) -> None:
        """Measure this rank's gradient of a tensor that has a feed, and is due.

        Cost: one read of the gradient.
        """
        moment = self._moments[name]
        assert moment.kernels is not None and moment.feed is not None
        signs = moment.kernels.from_host(self._signs_of(name, step))
        found = moment.kernels.measure(gradient, moment.feed.offset, signs)
        self._measured[name] = moment.kernels, found, moment.feed.offset // moment.b

    def _signs_of(self, name: str, step: int) -> np.ndarray:
        """Return the signs of a tensor; they are drawn for all due tensors at once, while the code is in the cache."""
        if self._signs is None or self._signs[0] != step:
            self._signs = step, {due: self._drawn(self._moments[due], step) for due in self.due(step)}
        return self._signs[1][name]

    def _drawn(self, moment: Moment, step: int) -> np.ndarray:
        seeds = self._seed, moment.number, step
        drawn = np.random.Generator(np.random.Philox(np.random.SeedSequence(seeds))).bytes(moment.b // 4 + 1)
        bits = np.unpackbits(np.frombuffer(drawn, np.uint8), count=2 * moment.b)
        return bits * np.float32(2) - np.float32(1)

    def message(self, step: int, scale: float) -> np.ndarray:
        """Return the vector that the ranks add up, float32: sums of squares by row and column, products with the signs.

        Call it after all due tensors are measured.

        Args:
            step: present step, from 0.
            scale: factor of this rank's gradients (clipping, loss scale), > 0.
        """
        told, measured = [], self._fetched()
        for name in self.due(step):
            rows, columns, pools = (np.zeros(n) for n in (self[name].a, self[name].b, POOLS))
            if name in measured:
                numbers, b = measured[name].astype(np.float64), columns.size
                first = self._measured[name][2]
                here = np.arange(first, first + (numbers.size - b) // 2)
                rows[here], columns[:], products = np.split(numbers, [here.size, here.size + b])
                pools[:] = np.bincount(here % POOLS, products, POOLS)  # a sum of products with random signs is one too
            told += [scale**2 * rows, scale**2 * columns, scale * pools]
        self._measured.clear()
        return np.concatenate(told).astype(np.float32) if told else np.empty(0, np.float32)

    def _fetched(self) -> dict[str, np.ndarray]:
        """Return the measurements of this step on the host, with one wait for each backend."""
        found: dict[str, np.ndarray] = {}
        for kernels in {id(kernels): kernels for kernels, _, _ in self._measured.values()}.values():
            names = [name for name, (its, _, _) in self._measured.items() if its is kernels]
            found.update(zip(names, kernels.fetch([self._measured[name][1] for name in names]), strict=True))
        return found

    def learn(self, step: int, summed: np.ndarray, senders: float) -> None:
        """Learn from the measurements of an applied step.

        Args:
            step: index of the step.
            summed: sum of all ranks' messages.
            senders: number of gradients in the sum, in [0, M]; ranks in join have none.
        """
        at = 0
        for name in self.due(step):
            size = self[name].a + self[name].b + POOLS
            told = summed[at : at + size].astype(np.float64)
            at += size
            if senders:
                self[name].learn(told / senders)
        for moment in self._moments.values():
            moment.values[_STEPS] += 1

    def drop(self) -> None:
        """Discard the measurements of the present step."""
        self._measured.clear()

    # -- state

    def clear(self) -> None:
        """Set all moments to zero."""
        self.drop()
        for name in self._moments:
            self.forget(name)

    def forget(self, name: str) -> None:
        """Set the moment of a tensor to zero."""
        self._moments[name].know(0.0)

    def rescale(self, factor: float) -> None:
        """Scale the moments as if the gradients had been `factor` times as large."""
        for moment in self._moments.values():
            values, kept = moment.values * factor**2, [_SAMPLES, _STEPS, _RATE]
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
                yield name, np.insert(values, _RATE, 0.0) if earlier else values, moment
