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
from collections.abc import Sequence

import numpy as np

from dgc_horovod.kernels.contract import Array, Kernels, SharedMoment

INTERVAL = 4  # E, steps from one measurement of a tensor to the next
FLOOR = 1e-2  # least value of R and C over their means: else a row with rare gradients would move too far at the next
BOUND = 10.0  # largest magnitude that enters: Adam's own at b2 = .99, whose second moment has the present gradient
POOLS = 64  # number of sums of products: with more, the level of the mean gradient varies less by chance
GAIN = 1.4  # factor of Adam's learning rate: sent sums of many steps have less noise, and allow longer steps
_LEAST_COLUMNS = 16  # with fewer, the pass is several times slower than memory
_MEAN, SAMPLES, STEPS, RATE, _NUMBERS = range(5)  # in `Moment.values`, before the rows and the columns
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
        return int(self.values[STEPS])

    def begin(self, b2: float, eps: float, rate: float) -> float:
        """Begin a step with these options of Adam; return the factor of the residual at this rate, in [0, 1]."""
        changed, self.b2, self.eps = self.eps != eps, b2, eps
        if changed:
            self.refresh()
        before, self.values[RATE] = float(self.values[RATE]), max(rate, _SMALLEST)
        return before / rate if 0 < before < rate else 1.0

    @property
    def known(self) -> bool:
        """Whether a gradient has been measured."""
        return bool(self.values[SAMPLES]) and bool(self.rows.any())

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
        self.values[[_MEAN, SAMPLES, STEPS]] = self.rows.mean(), max(steps // INTERVAL, bool(steps)), steps
        self.refresh()

    def learn(self, told: np.ndarray) -> None:
        """Learn from a measurement: sums of squares by row and by column, and sums of products, means over ranks."""
        rows, columns = told[: self.a] / self._per_row, told[self.a :][: self.b] / self._per_column
        mean = np.square(told[self.a + self.b :]).sum() / self.numel
        if not (np.isfinite(told).all() and math.isfinite(mean)):
            return
        keep = self.b2**INTERVAL
        self.values[SAMPLES] += 1
        share = (1 - keep) / (1 - keep ** self.values[SAMPLES])
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
        """Return the feed, made at the first call.

        Args:
            kernels: backend that holds the tensor.
            offset: index in the tensor of the first element that this rank keeps.
        """
        if self.feed is None:
            self.kernels, self._factors = kernels, kernels.new(self.a + self.b)
            self.feed = SharedMoment(self._factors[: self.a], self._factors[self.a :], BOUND, offset)
            self.refresh()
        return self.feed

    def refresh(self) -> None:
        """Update the factors for the next passes."""
        if self.kernels is not None:
            self.kernels.write(self._factors, np.concatenate(self.factors(self.eps)).astype(np.float32))
