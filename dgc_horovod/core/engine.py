"""One bucket's step: accumulate, select, encode | decode, aggregate. No framework, no communication.

The engine holds what belongs to this rank alone: the residual v and the momentum u (or Adam's moments).
`BucketEngine.compress` turns a bucket's gradients into one message; whoever owns the communication brings
back what the ranks sent and hands it to `BucketEngine.receive`, after which `BucketEngine.aggregate_into` gives
the aggregated update and `BucketEngine.rollback` takes the step back. What a message looks like is in `message`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np

from dgc_horovod.config import DGCConfig
from dgc_horovod.core.selection import RULES, ResidualView, SelectionContext, select
from dgc_horovod.core.workspace import HostSentRecord, Message, Workspace, densified, form, min_magnitude, read_summed
from dgc_horovod.errors import RankMismatch
from dgc_horovod.kernels.contract import (
    NO_ELEMENTS,
    AccumulateResult,
    Accumulation,
    AdamCorrection,
    Array,
    Elements,
    Kernels,
    MomentumCorrection,
    Receiver,
    Sender,
    SentRecord,
    State,
    joined,
)
from dgc_horovod.state.residual_state import FIRST, MOMENTUM, PARTS, Arrays
from dgc_horovod.wire.bucket import Bucket
from dgc_horovod.wire.packet import FLAG_JOINED, FLAG_NONFINITE


class BucketEngine:
    """State and arithmetic of one bucket on one rank.

    Args:
        bucket: its layout.
        config: the settings, equal on all ranks.
        kernels: backend on the device of the gradients.
        rank: of this worker among `workers`; seeds the rules that draw.
        workers: N, the number of packets that come back.

    Memory: v, 4 bytes an element; u from the first step with momentum, 4 more (Adam: two moments, 8 more); for the
    candidates and packets of a step about 80 bytes for each of the k elements selected, and 8 for each received.
    """

    def __init__(self, bucket: Bucket, config: DGCConfig, kernels: Kernels, rank: int, workers: int) -> None:
        self.bucket, self.config, self.kernels = bucket, config, kernels
        self.rank, self.workers = rank, workers
        self.state = State(kernels.new(bucket.numel))
        self.gradients, self.outputs = kernels.gradients(bucket), kernels.outputs(bucket)
        self._every = np.arange(bucket.numel if bucket.uncompressed else 0, dtype=np.int32)
        self._plan: Workspace | None = None
        self._packets: np.ndarray | None = None
        self._counts: np.ndarray = np.empty(0, np.int64)
        self._summed: np.ndarray | None = None
        self._sent: SentRecord | None = None
        self._step = 0
        self.flagged: list[int] = []  # ranks whose gradient was not finite in the last packets; a sum does not tell
        self.in_join = False  # whether this rank is: then its messages say so
        self.ranks_in_join = 0  # according to the last messages received

    # -- sending

    def add_gradient(self, i: int, gradient: Array, accumulation: Accumulation, in_place: bool = False) -> None:
        """Segment i's gradient is ready.

        Args:
            i: its number in the bucket.
            gradient: flat float32 Array, or what `Kernels.takes_tensors` allows; read by `compress`, and must not
                change before.
            accumulation: how it enters the residual.
            in_place: the update goes where the gradient is, into memory that nothing else uses and nobody writes to
                before `aggregate_into`: `compress` leaves zeros there, which saves the pass in which a output is
                zeroed.
        """
        if isinstance(accumulation, MomentumCorrection) and accumulation.momentum:
            self.momentum()
        elif self.state.moments is None and isinstance(accumulation, AdamCorrection):
            self.adam_moments()
        self.gradients.put(i, gradient, accumulation, in_place)
        if in_place:
            self.outputs.put(i, gradient, cleared=True)

    def compress(self, scale: float, step: int, density: float) -> Message:
        """Take in the gradients that were offered, then select, encode and subtract what is sent.

        Elements of a gradient that are not finite enter as 0. If there are any, or v leaves the range of fp32 (then u
        and v start again from nothing), nothing is sent, and the message carries a flag on which every rank takes the
        step back.

        Args:
            scale: factor of the gradients (clipping, loss scale), > 0.
            step: schedule step, equal on all ranks.
            density: of this step, in (0, 1]; 1 for a bucket that is sent whole.

        Returns:
            The message. Its payload is reused by the next call.

        Cost: one pass over the bucket (`Kernels.accumulate`) while the selection moves slowly, else one read more.
        """
        plan = self._plan_for(1.0 if self.bucket.uncompressed else density)
        rule = RULES[self.config.rule]
        looks = rule.by_size and not self.bucket.uncompressed
        plan.records["floor"] = plan.predictor.floors if looks else math.inf
        want_sums = rule.wants_sums and not self.bucket.uncompressed
        self._step = step
        sender = None if self.in_join else plan.sender  # what a device writes has no flag
        if sender is not None and plan.predictor.floors[0] < math.inf and sender.takes(self.gradients):
            seen, sent = self._send_from_device(plan, sender, scale)
            if sent is not None:
                return Message(sender.payload, False, sent.count)
        else:
            max_candidates = plan.predictor.max_candidates if looks else 0
            seen = self.kernels.accumulate(self.gradients, self.state, scale, plan.records, max_candidates, want_sums)
        if not seen.residual_finite:  # sums of finite gradients can leave fp32's range
            self.clear()
        if not (seen.gradients_finite and seen.residual_finite):
            return self._send(plan, NO_ELEMENTS, FLAG_NONFINITE)
        if self.bucket.uncompressed:
            return self._send(plan, Elements(self._every, self.kernels.to_host(self.state.v).copy()), 0)
        return self._send(plan, self._select(plan, seen), 0)

    def _send_from_device(
        self, plan: Workspace, sender: Sender, scale: float
    ) -> tuple[AccumulateResult, SentRecord | None]:
        candidate_threshold = plan.predictor.floors[0]
        seen, sent = sender.send(self.gradients, self.state, scale, candidate_threshold, self._step, self._masks)
        if sent is not None:
            self._sent = sent
            plan.predictor.learn(0, sent.count, sent.min_magnitude, seen.num_candidates)
        return seen, sent

    @property
    def _masks(self) -> bool:
        """Whether u is emptied where something is sent."""
        return self.state.u is not None and self.config.factor_masking

    def _plan_for(self, density: float) -> Workspace:
        if self._plan is None or self._plan.density != density:
            self._plan = Workspace(self.bucket, self.config, self.kernels, density, self.workers)
        return self._plan

    def _select(self, plan: Workspace, seen: AccumulateResult) -> Elements:
        chosen = []
        for number, span in enumerate(plan.ranges):
            view = self._view(plan, number, seen.candidates)
            context = SelectionContext(partial(self._generator, number), self.config.threshold)
            num_candidates = (
                view.candidates if seen.candidates is not None else seen.num_candidates * span.k / plan.wire.capacity
            )
            chosen.append(select(self.config.rule, view, span.k, context))
            plan.predictor.learn(number, chosen[-1].values.size, min_magnitude(chosen[-1]), num_candidates)
        return joined(chosen)

    def _view(self, plan: Workspace, number: int, candidates: Elements | None) -> ResidualView:
        span, record = plan.ranges[number], plan.records[number]
        if candidates is not None and len(plan.ranges) > 1:
            low, high = np.searchsorted(candidates.positions, [span.place.start, span.place.stop])
            candidates = Elements(candidates.positions[low:high], candidates.values[low:high])
        x = self.state.v[span.place]
        sums = (float(record["sum"]), float(record["squares"])) if RULES[self.config.rule].wants_sums else None
        return ResidualView(self.kernels, x, span.start, candidates, float(record["floor"]), sums)

    def _generator(self, span: int) -> np.random.Generator:
        """Random source that depends on rank, bucket, span and step alone, not on what was drawn before."""
        key = (self.config.seed, self.rank, self.bucket.index, span, self._step)
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))

    def _send(self, plan: Workspace, elements: Elements, flags: int) -> Message:
        coder, count = self.kernels.coder, elements.values.size
        flags |= FLAG_JOINED if self.in_join else 0
        decoded = plan.decoded[:count]
        while (
            plan.wire.encode(coder, *elements, self._step, flags, plan.payload, decoded)
            and not self.bucket.uncompressed
        ):
            kept = decoded != 0  # what was rounded to zero is not sent, so it is not masked either
            elements = Elements(elements.positions[kept], elements.values[kept])
            decoded = plan.decoded[: elements.values.size]
        masked = plan.masked[: elements.values.size] if self._masks else None
        self._sent = HostSentRecord(self.kernels, elements, masked)
        self.kernels.update_residual(self.state, elements, decoded, masked)
        if plan.densified:
            vector = densified(self.bucket.numel, elements.positions, decoded, flags, self._step, self.workers)
            return Message(vector, True, elements.values.size)
        return Message(plan.payload, False, elements.values.size)

    # -- state

    def clear(self) -> None:
        """Empty the residual, the momentum and the moments."""
        self.kernels.fill_zero(self.state.v)
        self.state.u = self.state.moments = self._sent = None
        if self._plan is not None:
            self._plan.predictor.forget()

    def momentum(self) -> Array:
        """The momentum u of the whole bucket, made at first use."""
        if self.state.u is None:
            self.state.u = self.kernels.new(self.bucket.numel)
        return self.state.u

    def adam_moments(self) -> tuple[Array, Array]:
        """First and second local moments of the whole bucket, made at first use."""
        if self.state.moments is None:
            self.state.moments = self.kernels.new(self.bucket.numel), self.kernels.new(self.bucket.numel)
        return self.state.moments

    def densifies(self, density: float) -> bool:
        """Whether a message of that density is a vector for an allreduce, not a packet for an allgather."""
        return form(self.bucket, self.config, density, self.workers).densified

    def move_in(self, i: int, other: BucketEngine, j: int) -> None:
        """Take over the residual, momentum and moments of segment j of `other` for segment i; there they end."""
        self.write(i, other.read(j))
        other.write(j, {})

    def read(self, i: int) -> Arrays:
        """Copies, on the host, of what is kept of segment i: "v", and "u" or Adam's "first" and "second" if it is."""
        place, parts = self.bucket.segments[i].place, self._parts()
        return {name: self.kernels.to_host(x[place]).copy() for name, x in parts.items() if x is not None}

    def write(self, i: int, arrays: Arrays) -> None:
        """Keep of segment i what `read` gave; what it did not give is zero."""
        if MOMENTUM in arrays:
            self.momentum()
        if FIRST in arrays:
            self.adam_moments()
        place = self.bucket.segments[i].place
        for name, x in self._parts().items():
            if x is not None:
                x[place] = self.kernels.from_host(arrays[name]) if name in arrays else 0

    def rescale(self, factor: float) -> None:
        """Make u and v, or Adam's moments, what they would be, had the first gradient been `factor` times as large."""
        if self.state.moments is None:
            for x in (self.state.v, self.state.u):
                if x is not None:
                    x *= factor
        else:  # v has a direction, which is the same for any size of one gradient
            first, second = self.state.moments
            first *= factor
            second *= factor * factor

    def fade(self, i: int, factor: float) -> None:
        """Multiply the residual of segment i by `factor`, in [0, 1]: what is faded out is never sent."""
        self.state.v[self.bucket.segments[i].place] *= factor

    def full_vector(self, part: str) -> np.ndarray:
        """A copy on the host of one part, over the bucket; zeros where it is not kept."""
        kept = self._parts()[part]
        return np.zeros(self.bucket.numel, np.float32) if kept is None else self.kernels.to_host(kept).copy()

    @property
    def parts(self) -> list[str]:
        """What is kept: names of `read`."""
        return [name for name, x in self._parts().items() if x is not None]

    def _parts(self) -> dict[str, Array | None]:
        state = self.state
        return dict(zip(PARTS, (state.v, state.u, *(state.moments or (None, None))), strict=True))

    @property
    def sent(self) -> Elements:
        """What the last `compress` sent, as it stood in v, until the step ends."""
        return self._sent.elements if self._sent is not None else NO_ELEMENTS

    @property
    def sent_positions(self) -> np.ndarray:
        """Of `sent`, without the values; until the next step."""
        return self._sent.positions if self._sent is not None else NO_ELEMENTS.positions

    @property
    def threshold(self) -> float:
        """The least magnitude sent at the last step; 0 where it is not known."""
        return self._plan.predictor.min_magnitude if self._plan is not None else 0.0

    @property
    def thresholds(self) -> np.ndarray:
        """What the next step's thresholds are guessed from; empty before the first."""
        if self._plan is None:
            return np.empty(0)
        return np.concatenate([[self._plan.density], self._plan.predictor.memory])

    @thresholds.setter
    def thresholds(self, memory: np.ndarray) -> None:
        self._plan = None
        if memory.size and 0 < memory[0] <= 1:
            predictor = self._plan_for(float(memory[0])).predictor
            if predictor.memory.size == memory.size - 1:
                predictor.memory = memory[1:]

    def commit(self) -> None:
        """The step is applied everywhere: what it sent is not to be taken back any more."""
        self._sent = None

    def rollback(self) -> None:
        """Take back what the last `compress` sent: v and u are, bit for bit, as after accumulation."""
        if self._sent is None:
            return
        self._sent.rollback(self.state)
        self._sent = None

    # -- receiving

    def receive(self, received: np.ndarray) -> bool:
        """Check what came back; returns whether every rank's gradient was finite.

        Nothing is changed yet, so an error leaves the state as it was.

        Args:
            received: the N packets after one another (uint8), or the summed float32 vector; kept until the next call.

        Raises:
            CorruptPacket, RankMismatch: on every rank alike, since all see the same bytes.

        Cost: N*k elements decoded.
        """
        assert self._plan is not None
        if received.dtype == np.float32:
            return self._receive_summed(received)
        wire = self._plan.wire
        if received.size != self.workers * wire.nbytes:
            raise RankMismatch(
                f"bucket {self.bucket.index}: {received.size} bytes came back, expected {self.workers} packets of "
                f"{wire.nbytes}; the ranks are at different densities: is the epoch the same everywhere?"
            )
        self._packets, self._summed = received.reshape(self.workers, wire.nbytes), None
        self._counts, flags = wire.read_headers(self.kernels.coder, self._packets, self._step)
        self.flagged = np.flatnonzero(flags & FLAG_NONFINITE).tolist()
        self.ranks_in_join = int(np.count_nonzero(flags & FLAG_JOINED))
        # what it finds wrong is known after `aggregate_into`, which changes no state
        if self._plan.receiver is not None:
            self._plan.receiver.read(self._packets, self._counts)
        else:
            for _ in self._groups(decoded=False):  # every packet is read before anything is changed
                pass
        return not self.flagged

    def _receive_summed(self, received: np.ndarray) -> bool:
        summed, finite, self.ranks_in_join = read_summed(received, self.bucket, self._step, self.workers)
        self._packets, self._summed, self.flagged = None, summed, []
        return finite

    def _groups(self, decoded: bool) -> Iterator[list[Elements]]:
        """What the ranks sent, in rank order, as many ranks at a time as are held decoded.

        Args:
            decoded: whether the first group is decoded already; it is, if it is the only one, after `receive`.
        """
        plan, packets = self._plan, self._packets
        assert plan is not None and packets is not None
        for first in range(0, self.workers, plan.held):
            group = []
            for memory, rank in zip(plan.received, range(first, min(first + plan.held, self.workers)), strict=False):
                count = int(self._counts[rank])
                elements = Elements(memory.positions[:count], memory.values[:count])
                if not decoded:
                    plan.wire.decode(self.kernels.coder, packets[rank], count, rank, *elements)
                group.append(elements)
            yield group

    @property
    def contributions(self) -> list[Elements]:
        """What each rank sent, of the last packets received (of a sum they are not known); copies."""
        if self._plan is not None and self._plan.receiver is not None:
            self._check(self._plan, self._plan.receiver)
            return self._plan.receiver.contributions
        return [Elements(e.positions.copy(), e.values.copy()) for group in self._groups(decoded=False) for e in group]

    def _check(self, plan: Workspace, receiver: Receiver) -> None:
        for rank, problem in receiver.problems.items():
            raise plan.wire.corrupt(rank, f"impossible: {problem}")

    def aggregate_into(self, scale: float) -> bool:
        """``update = scale * sum over ranks of what they sent``, added in rank order: the same bits on every rank.

        It goes into `outputs`, of which one must have been put for each segment that was not offered in place. Before
        it is called again, until the next `receive`, all must be put anew: none is zero any more.

        Args:
            scale: 1/N for the mean, 1 for the sum, times the loss scale.

        Returns:
            Whether every element is finite.

        Raises:
            CorruptPacket: on every rank alike, where packets are decoded on a device.
        """
        if self._summed is not None:
            return self.kernels.aggregate_dense(self.outputs, self.kernels.from_host(self._summed), scale)
        assert self._plan is not None
        if self._plan.receiver is not None:
            finite = self._plan.receiver.aggregate_into(self.outputs, scale)
            self._check(self._plan, self._plan.receiver)
            return finite
        finite = True
        for number, group in enumerate(self._groups(decoded=self._plan.held == self.workers)):
            finite = self.kernels.aggregate_into(self.outputs, group, scale, fresh=number == 0) and finite
        return finite
