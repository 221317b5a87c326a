"""One bucket's step: accumulate, select, encode | decode, aggregate. No framework, no communication.

The engine holds what belongs to this rank alone: the residual v and the momentum u (or Adam's moments).
`BucketEngine.compress` turns a bucket's gradients into one message; whoever owns the communication brings
back what the ranks sent and hands it to `BucketEngine.receive`, after which `BucketEngine.fill_update` gives
the aggregated update and `BucketEngine.restore` takes the step back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dgc_horovod.bucket import Bucket, Span, sends_scattered, spans
from dgc_horovod.config import DGCConfig
from dgc_horovod.errors import RankMismatch
from dgc_horovod.ops.schema import Array, Kernels
from dgc_horovod.packet import FLAG_NONFINITE, PacketFormat
from dgc_horovod.selection import SelectionContext, select

# A scattered exchange ends with three sums: of the flags, of the steps modulo 64 and of their squares. Sum and sum of
# squares both fit only if all steps are equal, and stay exact in fp32 up to 4,096 ranks.
_STEP_MARK, _MARKS = 64, 3


@dataclass(frozen=True)
class ResidualFeed:
    """The gradient itself enters the residual: ``v += g`` (TopK-SGD)."""


@dataclass(frozen=True)
class MomentumFeed:
    """The momentum enters the residual (DGC 3.1): ``u = m*u + g; v += u``, Nesterov ``v += g + m*u``.

    Args:
        momentum: m in [0, 1), read from the parameter group at every step.
        nesterov: which of the two forms.
    """

    momentum: float
    nesterov: bool = False


@dataclass(frozen=True)
class AdamFeed:
    """Adam's direction on the local gradient enters the residual.

    Args:
        betas, eps: as in Adam.
        step: of this parameter, from 1.
    """

    betas: tuple[float, float]
    eps: float
    step: int


Feed = ResidualFeed | MomentumFeed | AdamFeed


@dataclass(frozen=True)
class Message:
    """What one rank sends of one bucket.

    Args:
        payload: uint8 packet for an allgather, or float32 vector for a summing allreduce.
        scattered: which of the two.
        count: elements selected.
    """

    payload: np.ndarray
    scattered: bool
    count: int


@dataclass(frozen=True)
class _Sent:
    """What `restore` needs: where something was sent, and what stood there before."""

    positions: np.ndarray
    v: np.ndarray
    u: np.ndarray | None


class BucketEngine:
    """State and arithmetic of one bucket on one rank.

    Args:
        bucket: its layout.
        config: the settings, equal on all ranks.
        kernels: backend on the device of the gradients.
        rank: of this worker among `workers`; seeds the rules that draw.
        workers: N, the number of packets that come back.

    Memory: v and the update, 4 bytes an element each; u from the first step with momentum, 4 more
    (Adam: two moments, 8 more).
    """

    def __init__(self, bucket: Bucket, config: DGCConfig, kernels: Kernels, rank: int, workers: int) -> None:
        self.bucket, self.config, self.kernels = bucket, config, kernels
        self.rank, self.workers = rank, workers
        self.v: Array = kernels.new(bucket.numel)
        self.update: Array = kernels.new(bucket.numel)
        self.u: Array | None = None
        self.moments: tuple[Array, Array] | None = None
        self._format: PacketFormat | None = None
        self._payload = np.empty(0, np.uint8)
        self._contributions: list[tuple[np.ndarray, np.ndarray]] = []
        self._summed: np.ndarray | None = None
        self._sent: _Sent | None = None
        self._step = 0

    # -- sending

    def compress(
        self, gradients: Sequence[Array], feeds: Sequence[Feed], scale: float, step: int, density: float
    ) -> Message:
        """Take in one step's gradients, then select, encode and subtract what is sent.

        If any of them is not finite, the whole bucket enters as g = 0, nothing is sent, and the message
        carries a flag on which every rank takes the step back.

        Args:
            gradients, feeds, scale: see `accumulate`.
            step, density: see `send`.

        Returns:
            The message. Its payload is reused by the next call.
        """
        finite = self.accumulate(gradients, feeds, scale)
        return self.send(step, density, finite)

    def accumulate(self, gradients: Sequence[Array], feeds: Sequence[Feed], scale: float) -> bool:
        """Add one step's gradients to u and v; any number of times before `send`.

        Args:
            gradients: one flat float32 Array per segment, in the bucket's order; read only.
            feeds: how each enters the residual.
            scale: factor of the gradients (clipping, loss scale), > 0.

        Returns:
            Whether they were finite; if not, g = 0 was taken instead. False also where v has left the range of
            fp32; then u and v start again from nothing.
        """
        finite = all(self.kernels.all_finite(g) for g in gradients)
        for segment, gradient, feed in zip(self.bucket.segments, gradients, feeds, strict=True):
            self._accumulate(segment.start, gradient if finite else self.kernels.new(segment.numel), feed, scale)
        if not self.kernels.all_finite(self.v):  # sums of finite gradients can leave fp32's range
            self.clear()
            return False
        return finite

    def send(self, step: int, density: float, finite: bool = True) -> Message:
        """Select from v, encode, and subtract what is sent.

        Args:
            step: schedule step, equal on all ranks.
            density: of this step, in (0, 1].
            finite: what `accumulate` returned; if False, nothing is sent and the message is flagged.
        """
        self._step = step
        runs = spans(self.bucket, self.config.scope, density)
        capacity = sum(run.k for run in runs)
        self._format = PacketFormat(self.bucket.index, self.bucket.numel, capacity, values=self.config.values)
        positions = self._select(runs) if finite else np.empty(0, np.int64)
        return self._encode(self._format, positions, 0 if finite else FLAG_NONFINITE)

    def clear(self) -> None:
        """Empty the residual, the momentum and the moments."""
        self.kernels.fill_zero(self.v)
        self.u = self.moments = self._sent = None

    def _accumulate(self, start: int, gradient: Array, feed: Feed, scale: float) -> None:
        here = slice(start, start + len(gradient))
        v = self.v[here]
        if isinstance(feed, AdamFeed):
            first, second = self.adam_moments()
            self.kernels.accumulate_adam(first[here], second[here], v, gradient, scale, feed.betas, feed.eps, feed.step)
        elif isinstance(feed, MomentumFeed) and feed.momentum:
            if self.u is None:
                self.u = self.kernels.new(self.bucket.numel)
            self.kernels.accumulate_momentum(self.u[here], v, gradient, scale, feed.momentum, feed.nesterov)
        else:
            self.kernels.accumulate_residual(v, gradient, scale)

    def adam_moments(self) -> tuple[Array, Array]:
        """First and second local moments of the whole bucket, made at first use."""
        if self.moments is None:
            self.moments = self.kernels.new(self.bucket.numel), self.kernels.new(self.bucket.numel)
        return self.moments

    def _select(self, runs: Sequence[Span]) -> np.ndarray:
        chosen = []
        for number, run in enumerate(runs):
            context = SelectionContext(partial(self._generator, number), self.config.threshold)
            x = self.v[run.start : run.start + run.numel]
            chosen.append(select(self.config.rule, self.kernels, x, run.k, context) + run.start)
        return np.concatenate(chosen)

    def _generator(self, span: int) -> np.random.Generator:
        """Random source that depends on rank, bucket, span and step alone, not on what was drawn before."""
        key = (self.config.seed, self.rank, self.bucket.index, span, self._step)
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))

    def _encode(self, wire: PacketFormat, positions: np.ndarray, flags: int) -> Message:
        values = self.kernels.take(self.v, positions)
        if self._payload.size != wire.nbytes:
            self._payload = np.empty(wire.nbytes, np.uint8)
        decoded = wire.encode(positions, values, self._step, flags, self._payload)
        if not decoded.all():  # rounded to zero: not sent, so not masked either
            positions, values = positions[decoded != 0], values[decoded != 0]
            decoded = wire.encode(positions, values, self._step, flags, self._payload)
        masked = self.u is not None and self.config.factor_masking
        self._sent = _Sent(positions, values, self.kernels.take(self.u, positions) if masked else None)
        self.kernels.put(self.v, positions, values - decoded)
        if masked:
            self.kernels.put(self.u, positions, 0.0)
        if sends_scattered(wire.numel, wire.coded_bytes, self.workers):
            return Message(self._scatter(positions, decoded, flags), True, positions.size)
        return Message(self._payload, False, positions.size)

    def _scatter(self, positions: np.ndarray, values: np.ndarray, flags: int) -> np.ndarray:
        dense = np.zeros(self.bucket.numel + _MARKS, np.float32)
        dense[positions] = values
        mark = self._step % _STEP_MARK
        dense[-_MARKS:] = flags, mark, mark * mark
        return dense

    # -- receiving

    def receive(self, received: np.ndarray) -> bool:
        """Check what came back; returns whether every rank's gradient was finite.

        Nothing is changed yet, so an error leaves the state as it was.

        Args:
            received: the N packets after one another (uint8), or the summed float32 vector.

        Raises:
            CorruptPacket, RankMismatch: on every rank alike, since all see the same bytes.
        """
        assert self._format is not None
        if received.dtype == np.float32:
            if received.size != self.bucket.numel + _MARKS:
                raise RankMismatch(
                    f"bucket {self.bucket.index}: {received.size} values came back, expected "
                    f"{self.bucket.numel + _MARKS}"
                )
            flags, marks, squares = received[-_MARKS:]
            mark = self._step % _STEP_MARK
            if marks != self.workers * mark or squares != self.workers * mark * mark:
                raise RankMismatch(
                    f"bucket {self.bucket.index}: the ranks are at different steps (here {self._step}); "
                    "all ranks must run the same number of steps"
                )
            self._contributions, self._summed = [], received[:-_MARKS]
            return bool(flags == 0)
        if received.size != self.workers * self._format.nbytes:
            raise RankMismatch(
                f"bucket {self.bucket.index}: {received.size} bytes came back, expected {self.workers} packets of "
                f"{self._format.nbytes}; the ranks are at different densities: is the epoch the same everywhere?"
            )
        rows = received.reshape(self.workers, self._format.nbytes)
        packets = [self._format.decode(row, self._step, rank) for rank, row in enumerate(rows)]
        self._contributions, self._summed = [(positions, values) for positions, values, _ in packets], None
        return all(flags == 0 for _, _, flags in packets)

    def fill_update(self, scale: float) -> Array:
        """``update = scale * sum over ranks of what they sent``, added in rank order.

        May be called again until the next `receive`: what came back is kept.

        Args:
            scale: 1/N for the mean, 1 for the sum, times the loss scale.

        Returns:
            The update of the whole bucket, the same bits on every rank. Overwritten by the next call.
        """
        if self._summed is not None:
            self.kernels.copy_scaled(self.update, self.kernels.from_host(self._summed), scale)
            return self.update
        self.kernels.fill_zero(self.update)
        for positions, values in self._contributions:
            self.kernels.add_at(self.update, positions, values * np.float32(scale))
        return self.update

    def restore(self) -> None:
        """Take back what the last `compress` sent: v and u are, bit for bit, as after accumulation."""
        if self._sent is None:
            return
        self.kernels.put(self.v, self._sent.positions, self._sent.v)
        if self._sent.u is not None:
            self.kernels.put(self.u, self._sent.positions, self._sent.u)
        self._sent = None
