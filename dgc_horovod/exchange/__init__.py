"""Exchanges: algorithms that turn every worker's selected elements of a bucket into one sum on all workers.

A bucket takes the one in which a rank receives the fewest bytes.
"""

from __future__ import annotations

from dgc_horovod.exchange.contract import INSIDE, FlatExchange
from dgc_horovod.exchange.flat import AllgatherExchange, DensifiedExchange
from dgc_horovod.exchange.hierarchical import rounds_of
from dgc_horovod.exchange.sharded import ShardedExchange
from dgc_horovod.wire.packet import PacketFormat

_LONGEST = 2**31 - 1  # elements that a rank can have after a round: MPI's counts are C ints

# A new exchange is one line here, and a case of `choose`.
IMPLEMENTATIONS: dict[str, type[FlatExchange]] = {
    "allgather": AllgatherExchange,
    "densified": DensifiedExchange,
    "sharded": ShardedExchange,
}


def choose(wire: PacketFormat, workers: int, shards: bool = False, node_size: int = 1) -> type[FlatExchange]:
    """Choose the exchange for messages of the format `wire` among N workers.

    In an allgather every rank receives N packets of coded elements, in a ring allreduce of fp32 ``2 * 4 * numel``
    bytes: the densified exchange is used where ``N*k*b > 64*n`` bits. With shard owners a rank receives about 2.2
    packets for any N.

    Args:
        wire: packet format of one rank's selection.
        workers: N >= 1; with nodes of several workers M, the number of nodes.
        shards: whether elements may have shard owners, which keep a part of the received elements.
        node_size: G >= 1, number of workers of a node, which exchange the result of the last round once more.
    """
    is_cheap = workers * wire.body_bytes <= 8 * wire.numel
    whole = AllgatherExchange if is_cheap and _fits(AllgatherExchange, wire, workers, node_size) else DensifiedExchange
    if not shards or wire.capacity >= wire.numel:  # nothing is left for an owner to keep
        return whole
    if not _fits(ShardedExchange, wire, workers, node_size):
        return whole
    return ShardedExchange if _received(ShardedExchange, wire, workers) < _received(whole, wire, workers) else whole


def _fits(exchange: type[FlatExchange], wire: PacketFormat, workers: int, node_size: int) -> bool:
    """Whether the result of every round has at most `_LONGEST` elements."""
    rounds = rounds_of(exchange.rounds_of(wire, workers), workers, node_size)
    return all(each.brought(node_size if each.group == INSIDE else workers) <= _LONGEST for each in rounds)


def _received(exchange: type[FlatExchange], wire: PacketFormat, workers: int) -> int:
    return sum(collective.received(workers) for collective in exchange.rounds_of(wire, workers))
