"""Measurements of one exchange: bytes and seconds of every step, norms and overlap of sampled steps."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from dgc_horovod import advice
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.core.workspace import Message
from dgc_horovod.exchange.contract import ALL, BETWEEN, INSIDE, Round
from dgc_horovod.stats import ExchangeStats

_SECONDS = 1.0  # least time between two sampled steps
_SHARE = 1 / 200  # largest share of the time that sampling may take
_MOST_SENT = 1 / 8  # largest share of a bucket, sent by all ranks together, for a comparison of their selections
_SAMPLED = 4096  # number of elements whose last step of sending is recorded


class Meters:
    """The measurements of one exchange.

    Args:
        engines: engines of the exchange.
        counts: counters of the exchange.
    """

    def __init__(self, engines: Sequence[BucketEngine], counts: ExchangeStats) -> None:
        self.counts, self.diagnostics = counts, Diagnostics()
        self.of = {engine: BucketMeter(engine) for engine in engines}
        self._advice, self._lock = advice.Compression(), threading.Lock()
        counts.buckets = weakref.WeakMethod(self.bucket_stats)

    @contextmanager
    def timing(self, engine: BucketEngine, what: str) -> Iterator[None]:
        """Add the seconds inside to "compressing" or "decoding", of the exchange and of the bucket."""
        began = time.perf_counter()
        with self.counts.traffic.timing(what):
            yield
        self.of[engine].spent(what, began)

    def compressed(self, engine: BucketEngine, message: Message) -> None:
        """Record that `message` is about to be sent."""
        self.of[engine].compressed(message)
        self.diagnostics.compressed(engine)
        with self._lock:
            if not engine.bucket.uncompressed:
                self.counts.offered += engine.bucket.numel
                self.counts.selected += message.count
        self.count(engine, message.round)

    def count(self, engine: BucketEngine, collective: Round) -> None:
        """Count the bytes of a round of a bucket, which is about to begin."""
        place, traffic = engine.topology, self.counts.traffic
        workers = {ALL: place.workers, BETWEEN: place.nodes, INSIDE: place.node_size}[collective.group]
        received = collective.received(workers)
        if collective.group == INSIDE:
            traffic.add(inside=received)
        else:
            traffic.add(sent=collective.nbytes, received=received)

    def close(self, finite: bool, advises: bool) -> None:
        """End the step. After a sampled step, store its figures and the staleness of the sent elements.

        Args:
            finite: whether the step is applied.
            advises: whether the figures may lead to advice.
        """
        figures = self.diagnostics.close(finite)
        if figures:
            waits = np.concatenate([meter.waits for meter in self.of.values()])
            if waits.size:
                figures |= {"staleness_mean": float(waits.mean()), "staleness_99": float(np.quantile(waits, 0.99))}
            self.counts.figures = figures
            if advises:
                advice.tell(self._advice.on(figures, self.counts.density))

    def bucket_stats(self) -> list[dict[str, float]]:
        """`BucketMeter.stats` of every bucket."""
        return [meter.stats() for meter in self.of.values()]


class Diagnostics:
    """Norms and overlap of sampled steps.

    Each rank chooses the sampled steps by its own clock, since nothing is exchanged. The cost of a sample is measured;
    the next sample is delayed until the cost is a 200th of the time, for any model.

    Args:
        seconds: least time between two sampled steps, >= 0.

    Attributes:
        next_look: earliest time of the next sampled step, on the clock of ``time.perf_counter``.
    """

    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds, self.next_look = seconds, 0.0
        self._lock = threading.Lock()  # buckets may be compressed by several threads
        self._begin()

    def _begin(self) -> None:
        self._looks: bool | None = None  # whether the present step is sampled; None: it has not begun
        self._gradient = self._residual = self._entered = 0.0  # sums of squares; _entered: of residual increments
        self._pairs = self._all_pairs = 0  # pairs of ranks with a common element; their number at full overlap
        self._cost = 0.0

    def before(self, engine: BucketEngine, scale: float) -> None:
        """Sample the gradients of `engine`, times `scale`, before accumulation. Cost: one read in a sampled step."""
        with self._lock:
            if self._looks is None:
                self._looks = time.perf_counter() >= self.next_look
        if self._looks and not engine.bucket.uncompressed:
            with self._looking():
                square = scale**2 * engine.gradients.squared_norm()
                self._gradient += square
                self._entered += engine.bucket.numel if engine.adds_directions else square  # each about 1

    def compressed(self, engine: BucketEngine) -> None:
        """Sample the residual of `engine` after compression. Cost: one read of v in a sampled step."""
        if self._looks and not engine.bucket.uncompressed:
            with self._looking():
                self._residual += engine.kernels.sums(engine.state.v)[1]

    def settled(self, engine: BucketEngine) -> None:
        """Sample the overlap of all ranks' messages. Cost: another decoding and a sort of positions."""
        senders, sent = engine.topology.nodes, engine.sent_positions.size
        if not self._looks or engine.bucket.uncompressed or engine.exchange.keeps_remainder or senders == 1:
            return  # a shard owner's sums do not show the senders
        if senders * sent > _MOST_SENT * engine.bucket.numel:
            return
        with self._looking():
            contributions = engine.exchange.contributions  # zeros in them were not sent
            selections = [elements.positions[elements.values != 0] for elements in contributions]
            if selections:
                _, senders_of = np.unique(np.concatenate(selections), return_counts=True)
                self._pairs += int((senders_of * (senders_of - 1)).sum())
                self._all_pairs += int(senders_of.sum()) * (senders - 1)

    def close(self, finite: bool) -> dict[str, float]:
        """End the step.

        Returns:
            Empty unless the step was sampled and is `finite`. ``gradient_norm`` and ``residual_norm``: L2 norms of
            this rank's gradient (clipped, of the compressed tensors) and of v after sending; ``residual_ratio``: the
            norm of v over the norm that enters at a step (gradient or Adam's direction), if that is not 0;
            ``overlap``, in [0, 1]: share of a rank's sent elements that another rank sends too, averaged over all
            pairs of ranks; missing if the exchange does not show the senders.
        """
        figures: dict[str, float] = {}
        if self._looks and finite:
            figures = {"gradient_norm": math.sqrt(self._gradient), "residual_norm": math.sqrt(self._residual)}
            if self._entered:
                figures["residual_ratio"] = math.sqrt(self._residual / self._entered)
            if self._all_pairs:
                figures["overlap"] = self._pairs / self._all_pairs
        if self._looks:
            self.next_look = time.perf_counter() + max(self._seconds, self._cost / _SHARE)
        self._begin()
        return figures

    @contextmanager
    def _looking(self) -> Iterator[None]:
        with self._lock:
            start = time.thread_time()  # time of this thread only: waiting for a core is not a cost of sampling
            yield
            self._cost += time.thread_time() - start


class BucketMeter:
    """The counts of one bucket.

    Args:
        engine: engine of the bucket.

    Attributes:
        waits: staleness of the elements sent last, in steps since they were sent before: at most 4,096 samples.
    """

    def __init__(self, engine: BucketEngine) -> None:
        self._engine = engine
        self._shift = max(0, (engine.bucket.numel - 1) // _SAMPLED).bit_length()  # every 2^shift-th element
        self._sent_at = np.zeros(((engine.bucket.numel - 1) >> self._shift) + 1, np.int64)
        self.waits = np.empty(0, np.int64)
        self._selected = self._nbytes = self._steps = 0
        self._seconds, self._until = {"compressing": 0.0, "exchanging": 0.0, "decoding": 0.0}, time.perf_counter()

    def spent(self, what: str, began: float) -> None:
        """Count the seconds since `began` as `what`; those before a decoding are of the exchange."""
        if what == "decoding":
            self._seconds["exchanging"] += began - self._until
        self._until = time.perf_counter()
        self._seconds[what] += self._until - began

    def compressed(self, message: Message) -> None:
        """Record that `message` is about to be sent."""
        self._steps += 1
        self._selected = message.count
        self._nbytes = sum(collective.nbytes for collective in self._engine.exchange.rounds)
        if not self._engine.bucket.uncompressed:
            sampled = self._engine.sent_positions
            sampled = sampled[sampled & ((1 << self._shift) - 1) == 0]
            places = sampled >> self._shift
            self.waits = np.concatenate([self.waits, self._steps - self._sent_at[places]])[-_SAMPLED:]
            self._sent_at[places] = self._steps

    def stats(self) -> dict[str, float]:
        """Return the counts as a dict.

        Returns:
            ``elements``; of the last step ``density``, ``bytes`` and ``threshold`` (the smallest sent magnitude; 0: not
            known); ``residual_norm``; ``age``: steps since the oldest element of the residual was sent, among up to
            4,096 samples; seconds of all steps: ``compress_seconds``, ``exchange_seconds`` (from the message's start to
            its use, backward pass included), ``decode_seconds``.

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
            "compress_seconds": self._seconds["compressing"],
            "exchange_seconds": self._seconds["exchanging"],
            "decode_seconds": self._seconds["decoding"],
        }

    def _age(self) -> int:
        sampled = np.arange(self._sent_at.size, dtype=np.int32) << self._shift
        waiting = self._engine.kernels.take(self._engine.state.v, sampled.astype(np.int32)) != 0
        return int(self._steps - self._sent_at[waiting].min()) if waiting.any() else 0
