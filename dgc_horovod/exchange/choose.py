"""Which exchange a bucket takes: the one that brings the fewest bytes."""

from __future__ import annotations

from dgc_horovod.exchange.allgather import AllgatherExchange
from dgc_horovod.exchange.contract import FlatExchange
from dgc_horovod.exchange.densified import DensifiedExchange
from dgc_horovod.exchange.sharded import ShardedExchange
from dgc_horovod.wire.packet import PacketFormat

_LONGEST = 2**31 - 1  # bytes of an allgather's output: its counts are C ints

# A new exchange is one line here, and a case of `choose`.
EXCHANGES: dict[str, type[FlatExchange]] = {
    "allgather": AllgatherExchange,
    "densified": DensifiedExchange,
    "sharded": ShardedExchange,
}


def choose(wire: PacketFormat, workers: int, shards: bool = False) -> type[FlatExchange]:
    """The exchange for messages of the form `wire` among N workers.

    An allgather brings N packets of coded elements to every rank, a ring allreduce of fp32 passes ``2 * 4 * numel``
    bytes: packets are left where ``N*k*b > 64*n`` bits. Shards bring some 2.2 packets, whatever N is.

    Args:
        wire: packet format of one rank's selection.
        workers: N >= 1.
        shards: whether elements may have owners, who keep some of what they are sent.
    """
    gathered = workers * wire.body_bytes
    whole = DensifiedExchange if gathered > min(8 * wire.numel, _LONGEST) else AllgatherExchange
    if not shards or wire.capacity >= wire.numel:  # who sends everything loses nothing
        return whole
    return ShardedExchange if _received(ShardedExchange, wire, workers) < _received(whole, wire, workers) else whole


def _received(exchange: type[FlatExchange], wire: PacketFormat, workers: int) -> int:
    return sum(collective.received(workers) for collective in exchange.rounds_of(wire, workers))
