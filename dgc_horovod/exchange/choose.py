"""Which exchange a bucket takes: the one that brings the fewest bytes."""

from __future__ import annotations

from dgc_horovod.exchange.contract import INSIDE, FlatExchange
from dgc_horovod.exchange.flat import AllgatherExchange, DensifiedExchange
from dgc_horovod.exchange.hierarchical import rounds_of
from dgc_horovod.exchange.sharded import ShardedExchange
from dgc_horovod.wire.packet import PacketFormat

_LONGEST = 2**31 - 1  # elements of what a round brings: MPI's counts are C ints

# A new exchange is one line here, and a case of `choose`.
EXCHANGES: dict[str, type[FlatExchange]] = {
    "allgather": AllgatherExchange,
    "densified": DensifiedExchange,
    "sharded": ShardedExchange,
}


def choose(wire: PacketFormat, workers: int, shards: bool = False, node_size: int = 1) -> type[FlatExchange]:
    """The exchange for messages of the form `wire` among N workers.

    An allgather brings N packets of coded elements to every rank, a ring allreduce of fp32 passes ``2 * 4 * numel``
    bytes: packets are left where ``N*k*b > 64*n`` bits. Shards bring some 2.2 packets, whatever N is.

    Args:
        wire: packet format of one rank's selection.
        workers: N >= 1; of nodes of several, M.
        shards: whether elements may have owners, who keep some of what they are sent.
        node_size: G >= 1, the workers of a node, in which everything goes round once more.
    """
    is_cheap = workers * wire.body_bytes <= 8 * wire.numel
    whole = AllgatherExchange if is_cheap and _fits(AllgatherExchange, wire, workers, node_size) else DensifiedExchange
    if not shards or wire.capacity >= wire.numel:  # who sends everything loses nothing
        return whole
    if not _fits(ShardedExchange, wire, workers, node_size):
        return whole
    return ShardedExchange if _received(ShardedExchange, wire, workers) < _received(whole, wire, workers) else whole


def _fits(exchange: type[FlatExchange], wire: PacketFormat, workers: int, node_size: int) -> bool:
    """Whether no round brings more than a collective can count."""
    rounds = rounds_of(exchange.rounds_of(wire, workers), workers, node_size)
    return all(each.brought(node_size if each.group == INSIDE else workers) <= _LONGEST for each in rounds)


def _received(exchange: type[FlatExchange], wire: PacketFormat, workers: int) -> int:
    return sum(collective.received(workers) for collective in exchange.rounds_of(wire, workers))
