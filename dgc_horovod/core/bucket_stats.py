"""What one bucket's steps are like: for ``compression_stats()["buckets"]``."""

from __future__ import annotations

import math
import time

import numpy as np

from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.core.workspace import Message

_SAMPLED = 4096  # elements whose last sending is remembered


class _Recent:
    """The last `_SAMPLED` of some numbers."""

    def __init__(self) -> None:
        self._kept, self._seen = np.zeros(_SAMPLED, np.int64), 0

    def add(self, numbers: np.ndarray) -> None:
        """Keep `numbers`, at most `_SAMPLED`, in place of the oldest."""
        self._kept[(self._seen + np.arange(numbers.size)) % _SAMPLED] = numbers
        self._seen += numbers.size

    @property
    def kept(self) -> np.ndarray:
        return self._kept[: self._seen].copy()


class BucketMeter:
    """The counts of one bucket.

    Args:
        engine: engine of the bucket.
    """

    def __init__(self, engine: BucketEngine) -> None:
        self._engine = engine
        self._shift = max(0, (engine.bucket.numel - 1) // _SAMPLED).bit_length()  # every 2^shift-th element
        self._sent_at = np.zeros(((engine.bucket.numel - 1) >> self._shift) + 1, np.int64)
        self._waits = _Recent()
        self._selected = self._nbytes = self._steps = 0
        self._compressing = self._exchanging = self._decoding = 0.0
        self._since, self._waited = time.perf_counter(), 0.0

    def begins(self) -> None:
        """Compression or decoding begins."""
        now = time.perf_counter()
        self._since, self._waited = now, now - self._since

    def compressed(self, message: Message) -> None:
        """`message` is about to be sent."""
        self._compressing += self._lap()
        self._steps += 1
        self._selected = message.count
        self._nbytes = sum(collective.nbytes for collective in self._engine.exchange.rounds)
        if not self._engine.bucket.uncompressed:
            sampled = self._engine.sent_positions
            sampled = sampled[sampled & ((1 << self._shift) - 1) == 0]
            places = sampled >> self._shift
            self._waits.add(self._steps - self._sent_at[places])
            self._sent_at[places] = self._steps

    @property
    def waits(self) -> np.ndarray:
        """Steps that elements waited which were sent last, since they were sent before: of at most 4,096 samples."""
        return self._waits.kept

    def decoded(self) -> None:
        """What came back is decoded."""
        self._exchanging += self._waited
        self._decoding += self._lap()

    def _lap(self) -> float:
        now = time.perf_counter()
        since, self._since = self._since, now
        return now - since

    def stats(self) -> dict[str, float]:
        """The counts.

        Returns:
            ``elements``; of the last step ``density``, ``bytes`` and ``threshold`` (the least magnitude that was sent;
            0: not known); ``residual_norm``; ``age``: steps since the oldest element that waits was sent last, among up
            to 4,096 sampled ones; seconds of all steps: ``compress_seconds``, ``exchange_seconds`` (from the message's
            start to its use, backward pass included), ``decode_seconds``.

        Cost: a read of the residual.
        """
        engine = self._engine
        return {
            "elements": engine.bucket.numel,
            "density": self._selected / engine.bucket.numel,
            "bytes": self._nbytes,
            "threshold": engine.threshold,
            "residual_norm": math.sqrt(engine.kernels.sums(engine.state.v)[1]),
            "age": self._age(),
            "compress_seconds": self._compressing,
            "exchange_seconds": self._exchanging,
            "decode_seconds": self._decoding,
        }

    def _age(self) -> int:
        sampled = np.arange(self._sent_at.size, dtype=np.int32) << self._shift
        waiting = self._engine.kernels.take(self._engine.state.v, sampled.astype(np.int32)) != 0
        return int(self._steps - self._sent_at[waiting].min()) if waiting.any() else 0
