"""Exchange with nodes: dense inside a node, sparse between nodes; every worker exchanges its slice of the bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dgc_horovod.errors import DGCError
from dgc_horovod.exchange.contract import ALLGATHER, BETWEEN, INSIDE, Exchange, FlatExchange, Outcome, Round, Sending
from dgc_horovod.exchange.flat import different_sizes
from dgc_horovod.kernels.contract import Array, Elements, Kernels, Sender, State
from dgc_horovod.wire.bucket import PADDING, Bucket
from dgc_horovod.wire.packet import HEADER, PacketFormat


@dataclass(frozen=True)
class Topology:
    """One worker's place among M nodes of G workers each; ranks count node by node.

    Args:
        rank: index of this worker, 0 <= rank < workers.
        workers: N = M*G >= 1.
        node_size: G >= 1, a divisor of N; 1: every worker exchanges packets with every other worker.
    """

    rank: int
    workers: int
    node_size: int = 1

    @property
    def nodes(self) -> int:
        """M, the number of senders of each element."""
        return self.workers // self.node_size

    @property
    def local_rank(self) -> int:
        """Index of this worker on its node, and of its slice of every bucket."""
        return self.rank % self.node_size

    @property
    def node(self) -> int:
        """Index of this worker's node."""
        return self.rank // self.node_size

    @property
    def inside(self) -> list[int]:
        """Ranks of the workers of this node."""
        return list(range(self.node * self.node_size, (self.node + 1) * self.node_size))

    @property
    def between(self) -> list[int]:
        """Ranks of the workers of equal local rank, one from each node."""
        return list(range(self.local_rank, self.workers, self.node_size))

    @property
    def groups(self) -> list[list[int]]:
        """Ranks of every group of workers with collectives of its own: every node, then every local rank."""
        every = [Topology(rank, self.workers, self.node_size) for rank in range(self.workers)]
        nodes = [each.inside for each in every if each.local_rank == 0]
        return nodes + [each.between for each in every if each.node == 0]


def problem_of(topology: Topology) -> str:
    """Return why nodes gain nothing, in words; "" if they gain."""
    if topology.node_size == 1:
        return "each node has one worker"
    if topology.node_size >= topology.workers:
        return "all workers are on one node"
    if topology.workers % topology.node_size:
        return f"{topology.workers} workers do not fill nodes of {topology.node_size}"
    return ""


_HEAD = HEADER.itemsize  # number of bytes that mark a replaced message: no valid message begins with so many 0xFF
_UNREADABLE = 0xFF  # every byte of the buffer that replaces a message of an unexpected size


def rounds_of(between: Sequence[Round], nodes: int, node_size: int) -> tuple[Round, ...]:
    """Return the rounds between nodes, followed by the round inside a node.

    Args:
        between: rounds of the exchange between nodes.
        nodes: M >= 1.
        node_size: G >= 1; with 1 the rounds are those of `between`.
    """
    if node_size == 1:
        return tuple(between)
    around = Round("around", ALLGATHER, between[-1].dtype, between[-1].brought(nodes), INSIDE)
    return (*(replace(each, group=BETWEEN) for each in between), around)


@contextmanager
def _named(local_rank: int) -> Iterator[None]:
    """Add to an error whose packets it is about."""
    try:
        yield
    except DGCError as error:
        raise type(error)(f"{error} (rank numbers are node numbers, of local rank {local_rank})") from None


class HierarchicalExchange(Exchange):
    """One exchange for each slice of a bucket: this worker runs one and reads all. See `contract.Exchange`.

    Args:
        slices: slices of the bucket, one for each worker of the node.
        own: index of this worker's slice.
        wire: packet format of one worker's selection, the same for every slice.
        kernels: backend on the device that holds the outputs.
        nodes: M >= 1.
        inner: exchange between the nodes.
    """

    def __init__(
        self,
        slices: Sequence[Bucket],
        own: int,
        wire: PacketFormat,
        kernels: Kernels,
        nodes: int,
        inner: type[FlatExchange],
    ) -> None:
        self.rounds = rounds_of(inner.rounds_of(wire, nodes), nodes, len(slices))
        self.outcome = Outcome()
        self._bucket, self._size = slices[0].index, slices[0].numel
        self._exchanges = [inner(bucket, wire, kernels, nodes) for bucket in slices]
        self._own = self._exchanges[own]
        self.keeps_remainder = self._own.keeps_remainder
        self._round = np.empty(self.rounds[-1].size, self.rounds[-1].dtype)

    def adopt(self, rank: int, state: State) -> None:
        self._own.adopt(rank, state)

    def sender(self, max_candidates: int) -> Sender | None:
        return self._own.sender(max_candidates)

    def begin(self, elements: Elements, flags: int, step: int) -> Sending:
        return self._own.begin(elements, flags, step)

    def proceed(self, number: int, received: np.ndarray, step: int) -> np.ndarray | None:
        if number < len(self.rounds) - 2:
            return self._own.proceed(number, received, step)
        if number == len(self.rounds) - 2:  # only workers of this local rank have it; the next round passes it on
            if received.size == self._round.size:
                return received
            self._round.view(np.uint8).fill(_UNREADABLE)
            return self._round
        self._read(received, step)
        return None

    def _read(self, received: np.ndarray, step: int) -> None:
        slices = len(self._exchanges)
        expected = slices * self._round.size
        if received.size != expected:
            what = f"received {received.size} values inside this node, expected {expected}"
            raise different_sizes(self._bucket, what)
        parts = received.reshape(slices, -1)
        for local_rank, part in enumerate(parts):
            data = part.view(np.uint8)
            if (data[:_HEAD] == _UNREADABLE).all() and (data == _UNREADABLE).all():
                what = f"the workers of local rank {local_rank} sent messages of different sizes"
                raise different_sizes(self._bucket, what)
        last = len(self.rounds) - 2
        for local_rank, (exchange, part) in enumerate(zip(self._exchanges, parts, strict=True)):
            with _named(local_rank):
                exchange.proceed(last, part, step)

    def aggregate_into(self, outputs: SlicedOutputs, scale: float) -> None:
        for exchange, each in zip(self._exchanges, outputs.slices, strict=True):
            exchange.aggregate_into(each, scale)

    def settle(self) -> bool:
        finite, slices = True, len(self._exchanges)
        for local_rank, exchange in enumerate(self._exchanges):
            with _named(local_rank):
                finite &= exchange.settle()
        found = [exchange.outcome for exchange in self._exchanges]
        self.outcome = Outcome(
            all(each.finite for each in found),
            sorted(node * slices + local for local, each in enumerate(found) for node in each.flagged),
            sum(each.ranks_in_join for each in found),
            sum(each.ranks_that_clip for each in found),
            any(each.overflowed for each in found),
        )
        return finite

    @property
    def contributions(self) -> list[Elements]:
        return [
            Elements(each.positions + np.int32(i * self._size), each.values)
            for i, exchange in enumerate(self._exchanges)
            for each in exchange.contributions
        ]

    def commit(self) -> None:
        self._own.commit()

    def rollback(self) -> None:
        self._own.rollback()


class SlicedOutputs:
    """`kernels.contract.Outputs` of a bucket whose slices are written by one exchange each.

    Args:
        bucket: layout of the whole bucket.
        slices: slices of the bucket.
        kernels: backend on the device that holds the outputs.
    """

    def __init__(self, bucket: Bucket, slices: Sequence[Bucket], kernels: Kernels) -> None:
        self.slices = [kernels.outputs(each) for each in slices]
        place = {segment.name: i for i, segment in enumerate(bucket.segments)}
        self._runs: list[list[tuple[Any, int, slice]]] = [[] for _ in bucket.segments]
        self._padding: list[tuple[Any, int, Array]] = []
        for outputs, each in zip(self.slices, slices, strict=True):
            for j, segment in enumerate(each.segments):
                if segment.name == PADDING:
                    self._padding.append((outputs, j, kernels.new(segment.numel)))
                else:
                    run = slice(segment.offset, segment.offset + segment.numel)
                    self._runs[place[segment.name]].append((outputs, j, run))

    def put(self, i: int, output: Array) -> None:
        flat = output.reshape(-1)
        for outputs, j, run in self._runs[i]:
            outputs.put(j, flat[run])
        for outputs, j, zeros in self._padding:
            outputs.put(j, zeros)

    def clear(self) -> None:
        for outputs in self.slices:
            outputs.clear()
