"""How many elements a run selects, in k, and how many bytes it sends."""

from __future__ import annotations

from typing import Any

from dgc_horovod.core.bucketing import ranges
from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.schedule import density_at


class Counts:
    """The counts of one rank's exchange over a run.

    Args:
        exchange: of rank 0; None for dense training, of which there is nothing to count.
    """

    def __init__(self, exchange: OptimizerExchange | None) -> None:
        self._exchange, self._before = exchange, 0
        self._k_at: dict[float, int] = {}  # by density
        self._since: list[float] = []
        self._closed: list[list[float]] = []

    def count(self) -> None:
        """A step is done."""
        if self._exchange is not None:
            counts, config = self._exchange.counts, self._exchange.config
            k = self._k(density_at(config.final_density, config.warmup, counts.steps - 1))
            self._since.append((counts.selected - self._before) / k)
            self._before = counts.selected

    def close(self) -> None:
        """The next point of the curve is reached."""
        if self._since:
            mean = sum(self._since) / len(self._since)
            self._closed.append([round(value, 4) for value in (min(self._since), mean, max(self._since))])
            self._since.clear()

    def found(self) -> dict[str, Any]:
        """What there is of a compressed run.

        ``selected``: [least, mean, most] in k up to each point of the curve; ``traffic``: bytes sent, in fp32's.
        """
        if self._exchange is None:
            return {}
        stats = self._exchange.counts.stats()
        return {"selected": self._closed, "traffic": round(stats["bytes_sent"] / max(1, stats["bytes_dense"]), 6)}

    def _k(self, density: float) -> int:
        if density not in self._k_at:
            assert self._exchange is not None
            buckets = [engine.bucket for engine in self._exchange.engines if not engine.bucket.uncompressed]
            runs = [run for bucket in buckets for run in ranges(bucket, self._exchange.config.scope, density)]
            self._k_at[density] = sum(run.k for run in runs)
        return self._k_at[density]
