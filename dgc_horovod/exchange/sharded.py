"""Exchange with shard owners: each owner sums its elements and sends the largest sums on; bytes do not grow with N."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dgc_horovod.errors import CorruptPacket, DGCError, RankMismatch
from dgc_horovod.exchange.contract import ALLGATHER, ALLTOALL, FlatExchange, Outcome, Round, Sending
from dgc_horovod.exchange.flat import PacketWriter, different_sizes, outcome_of
from dgc_horovod.kernels.contract import NO_ELEMENTS, Array, Elements, Kernels, Outputs, State
from dgc_horovod.wire.bucket import Bucket, Segment
from dgc_horovod.wire.packet import FLAG_OVERFLOW, HEADER, Coder, PacketFormat

# Adjacent elements with one owner. Selected elements cluster in rows and columns of a layer: chunks this small, whose
# size divides no common layer width, give hardly any owner more than its share (decision 43).
CHUNK = 7


@dataclass(frozen=True)
class Shards:
    """The assignment of a bucket's elements to N owners. All shards have the same size; the last are padded.

    Args:
        numel: number of elements in the bucket, >= 1.
        workers: N >= 1.
    """

    numel: int
    workers: int

    @cached_property
    def size(self) -> int:
        """Number of elements of a shard, padding included."""
        chunks = -(-self.numel // CHUNK)
        return -(-chunks // self.workers) * CHUNK

    def dealt(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return each element's owner and its position in the shard, which ascends within a shard if `positions` do.

        Args:
            positions: positions in the bucket, int32.
        """
        numbers, within = np.divmod(positions, np.int32(CHUNK))
        rows, owners = np.divmod(numbers, np.int32(self.workers))
        return owners, rows * np.int32(CHUNK) + within

    def in_bucket(self, owner: int, positions: np.ndarray) -> np.ndarray:
        """Convert positions in the shard of `owner` to positions in the bucket, int64; padding lies beyond its end.

        Args:
            owner: index of the owner, 0 <= owner < workers.
            positions: positions in its shard, int32.
        """
        rows, within = np.divmod(positions.astype(np.int64), CHUNK)
        return (rows * self.workers + owner) * CHUNK + within


_LOWER = 0.9  # factor of the last step's smallest sum: the threshold for the next step's largest sums


class Owner:
    """The remainder r of one shard owner, and the values that the present step has overwritten.

    Args:
        rank: index of this worker, 0 <= rank < N.
        state: state of the bucket; `State.remainder` is made at first use.
        shards: assignment of elements to owners.
        kernels: backend on the device that holds the remainder.
    """

    def __init__(self, rank: int, state: State, shards: Shards, kernels: Kernels) -> None:
        self.rank, self._state, self._kernels = rank, state, kernels
        self._numel = shards.size
        self._sums = kernels.outputs(Bucket(0, (Segment("shard", 0, shards.size),)))
        self._before: list[Elements] = []  # in the order in which they were overwritten
        self._guess = 0.0

    @property
    def _remainder(self) -> Array:
        if self._state.remainder is None:
            self._state.remainder = self._kernels.new(self._numel)
        return self._state.remainder

    def add(self, parts: Sequence[Elements]) -> bool:
        """``r += parts``, in rank order. Return False if r overflows fp32; r is zero then."""
        self.rollback()
        r, positions = self._remainder, np.concatenate([part.positions for part in parts])
        self._before.append(Elements(positions, self._kernels.take(r, positions)))
        self._sums.put(0, r)
        finite = self._kernels.aggregate_into(self._sums, parts, 1.0, fresh=False)
        self._sums.clear()
        if not finite:
            self._kernels.fill_zero(r)
            self.commit()
        return finite

    def largest(self, k: int) -> Elements:
        """Return the k largest sums, exactly. Cost: one read of r if the last step's smallest sum is a good guess."""
        if self._guess:
            found = self._kernels.at_least(self._remainder, self._guess)
            if found.values.size >= k:
                return self._kernels.keep_largest(found, k)
        return self._kernels.top_k(self._remainder, k)

    def send(self, elements: Elements, decoded: np.ndarray) -> None:
        """``r -= decoded`` at the elements that are sent on."""
        self._guess = _LOWER * float(np.abs(elements.values).min()) if elements.values.size else 0.0
        self._before.append(elements)
        kept = State(self._remainder)
        self._kernels.update_residual(kept, elements, decoded, None)
        kept.settle()

    def commit(self) -> None:
        """Discard the overwritten values."""
        self._before.clear()

    def rollback(self) -> None:
        """Restore r from before `add`."""
        while self._before:
            self._kernels.put(self._remainder, self._before.pop())


# Capacity of a slot, as factors of k/N and of its square root: at most 3% of the selected elements do not fit
# (decision 43)
_HEADROOM, _DEVIATIONS = 1.1, 1.0
_REFUSED = 0xFF  # every header byte of a message with an error text in place of a shard
_MISMATCH, _CORRUPT = b"m", b"c"
_LEAST = 96  # least bytes of a message of round 2: room for an error text


def _form(wire: PacketFormat, workers: int) -> tuple[Shards, PacketFormat, PacketFormat]:
    """Return the shards of a bucket, and the packet formats of both rounds: of a slot, and of a shard."""
    shards, share = Shards(wire.numel, workers), wire.capacity / workers

    def packets(elements: float) -> PacketFormat:
        capacity = min(math.ceil(elements), wire.capacity, shards.size)
        return PacketFormat(wire.bucket, shards.size, capacity, wire.values)

    return shards, packets(_HEADROOM * share + _DEVIATIONS * share**0.5), packets(share)


class ShardedExchange(FlatExchange):
    """Received per rank: (N-1) slots and (N-1) packets of k/N elements. See `contract.Exchange`.

    Both rounds carry the flags. An owner that cannot read a packet sends an error text in round 2, so all ranks raise
    the same error.

    Memory: the remainder, 4 bytes for each of n/N elements; both rounds' packets; 16 bytes for each element received.
    """

    keeps_remainder = True
    _owner: Owner  # of this rank's shard, see `adopt`

    def __init__(self, bucket: Bucket, wire: PacketFormat, kernels: Kernels, workers: int) -> None:
        self.rounds = self.rounds_of(wire, workers)
        self.outcome, self._finite = Outcome(), True
        self._kernels, self._workers = kernels, workers
        self._shards, slot, shard = _form(wire, workers)
        self._slot = PacketWriter(slot, kernels.coder, bucket.uncompressed)
        self._shard = PacketWriter(shard, kernels.coder, bucket.uncompressed)
        self._slots = np.empty((0, slot.nbytes), np.uint8)
        self._message = np.zeros(self.rounds[1].size, np.uint8)
        self._packet = self._message[: shard.nbytes]
        self._values = np.empty(wire.capacity, np.float32)
        self._received: list[Elements] = []
        self._flags = 0

    @staticmethod
    def rounds_of(wire: PacketFormat, workers: int) -> tuple[Round, ...]:
        _, slot, shard = _form(wire, workers)
        slots = Round("slots", ALLTOALL, "uint8", workers * slot.nbytes)
        return slots, Round("shards", ALLGATHER, "uint8", max(shard.nbytes, _LEAST))

    def adopt(self, rank: int, state: State) -> None:
        self._owner = Owner(rank, state, self._shards, self._kernels)
        self._slots = np.zeros((self._workers, self._slot.wire.nbytes), np.uint8)

    def begin(self, elements: Elements, flags: int, step: int) -> Sending:
        self._flags = flags
        owners, positions = self._shards.dealt(elements.positions)
        narrow = np.uint16 if self._workers <= 2**16 else np.int32  # 16-bit numbers are sorted in linear time
        order = np.argsort(owners.astype(narrow), kind="stable")  # by owner, ascending in each
        ends = np.cumsum(np.bincount(owners, minlength=self._workers))
        sent, decoded = np.zeros(elements.values.size, bool), self._values[: elements.values.size]
        for owner, packet in enumerate(self._slots):
            chosen = order[ends[owner - 1] if owner else 0 : ends[owner]]
            part = Elements(positions[chosen], elements.values[chosen])
            if chosen.size > self._slot.wire.capacity:
                part = self._kernels.keep_largest(part, self._slot.wire.capacity)
                chosen = chosen[np.isin(positions[chosen], part.positions)]
            written, values = self._slot.write(part, flags, step, packet)
            if written.positions.size < chosen.size:
                chosen = chosen[np.isin(positions[chosen], written.positions)]
            sent[chosen], decoded[chosen] = True, values
        if sent.all():
            return Sending(self._slots.reshape(-1), elements, decoded)
        elements = Elements(elements.positions[sent], elements.values[sent])
        return Sending(self._slots.reshape(-1), elements, decoded[sent])

    def proceed(self, number: int, received: np.ndarray, step: int) -> np.ndarray | None:
        if number == 0:
            self._send_on(received, step)
            return self._message
        self._read(received, step)
        return None

    def _send_on(self, received: np.ndarray, step: int) -> None:
        """Add the received elements, and fill `_message` with the largest sums or with an error text."""
        owner, wire = self._owner, self._slot.wire
        try:
            if received.size != self._slots.size:
                raise _other_size(wire, received.size, self._slots.size)
            packets = received.reshape(self._workers, wire.nbytes)
            counts, _ = wire.read_headers(self._slot.coder, packets, step)
            parts = [
                _decoded(wire, self._slot.coder, packet, int(count), rank, self._shards, owner.rank)
                for rank, (packet, count) in enumerate(zip(packets, counts, strict=True))
            ]
        except DGCError as error:
            _refuse(self._message, error)
            return
        self._message.fill(0)
        if not owner.add(parts):
            self._shard.write(NO_ELEMENTS, self._flags | FLAG_OVERFLOW, step, self._packet)
            return
        largest = owner.largest(self._shard.wire.capacity)
        owner.send(*self._shard.write(largest, self._flags, step, self._packet))

    def _read(self, received: np.ndarray, step: int) -> None:
        """Decode the sums of all owners; positions are those in the bucket."""
        wire = self._shard.wire
        if received.size != self._workers * self._message.size:
            raise _other_size(wire, received.size, self._workers * self._message.size)
        messages = received.reshape(self._workers, -1)
        for message in messages:
            if refusal := _refusal(message):
                raise refusal
        packets = messages[:, : wire.nbytes]
        counts, flags = wire.read_headers(self._shard.coder, packets, step)
        found = []
        for owner, (packet, count) in enumerate(zip(packets, counts, strict=True)):
            part = _decoded(wire, self._shard.coder, packet, int(count), owner, self._shards, owner)
            places = self._shards.in_bucket(owner, part.positions).astype(np.int32)
            found.append(Elements(places, part.values))
        self._received = found
        self.outcome = outcome_of(flags)

    def aggregate_into(self, outputs: Outputs, scale: float) -> None:
        self._finite = self._kernels.aggregate_into(outputs, self._received, scale, fresh=True)

    def settle(self) -> bool:
        return self._finite and not self.outcome.overflowed

    @property
    def contributions(self) -> list[Elements]:
        return [Elements(each.positions.copy(), each.values.copy()) for each in self._received]

    def commit(self) -> None:
        self._owner.commit()

    def rollback(self) -> None:
        self._owner.rollback()


def _decoded(
    wire: PacketFormat, coder: Coder, packet: np.ndarray, count: int, rank: int, shards: Shards, owner: int
) -> Elements:
    """Decode a packet whose header has been checked; positions are those in the shard of `owner`."""
    part = Elements(np.empty(count, np.int32), np.empty(count, np.float32))
    wire.decode(coder, packet, count, rank, *part)
    if count and shards.in_bucket(owner, part.positions[-1:])[0] >= shards.numel:
        raise wire.corrupt(rank, "invalid: it has elements beyond the end of the bucket")
    return part


def _other_size(wire: PacketFormat, found: int, expected: int) -> RankMismatch:
    return different_sizes(wire.bucket, f"received {found} bytes, expected {expected}")


def _refuse(message: np.ndarray, error: DGCError) -> None:
    """Fill a message with the text of `error`, cut to its size."""
    kind = _MISMATCH if isinstance(error, RankMismatch) else _CORRUPT
    words = (kind + str(error).encode())[: message.size - HEADER.itemsize]
    message.fill(0)
    message[: HEADER.itemsize] = _REFUSED
    message[HEADER.itemsize :][: len(words)] = np.frombuffer(words, np.uint8)


def _refusal(message: np.ndarray) -> DGCError | None:
    """Return the error that an owner has sent in place of a shard, or None."""
    if not (message[: HEADER.itemsize] == _REFUSED).all():
        return None
    data = message[HEADER.itemsize :].tobytes().rstrip(b"\0")
    words = data[1:].decode("ascii", errors="replace")
    return RankMismatch(words) if data[:1] == _MISMATCH else CorruptPacket(words)
