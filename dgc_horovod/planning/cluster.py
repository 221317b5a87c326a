"""A cluster as a plan sees it: links, the workers that share them, the times of one worker, and of one collective.

The seconds of a collective are in closed form; `tests.helpers.simulated_links` checks them by messages.
P participants, b bytes that each sends, w(x) seconds of x bytes on a link, s(x) seconds to add them, a hop::

    allgather, ring    (P-1) * (w(b) + hop)                  b from one neighbour to the other
    allreduce, ring    (P-1) * (max(w, s)(b/P) + hop)        reduce-scatter: some bytes travel while others are added
                     + (P-1) * (w(b/P) + hop)                allgather of the sums
    alltoall, direct   max((P-1) * w(b/P) + message, (P-1) * message + w(b/P)) + way, after one of the parts' sizes

With G workers behind a card:

* A ring of all in host order crosses a card once a turn: of its P-1 hops M/N are over the card, the others inside. A
  card carries P-1 messages, one after another, if that takes longer.
* G rings `BETWEEN` nodes share a card: a turn takes ``max(G * w, w + hop)``, the last one ``G * w + hop``.
* An alltoall of all brings a card what `bucketing.through_card` counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dgc_horovod.core.bucketing import through_card
from dgc_horovod.exchange.contract import ALL, ALLREDUCE, ALLTOALL, BETWEEN, INSIDE, Round

PAYLOAD = 1448 / 1538  # payload of TCP over the bytes of full Ethernet frames
# Latencies of a message over Gloo, which is sent once the receiver has reported ready (docs/planning.md)
HANDSHAKE = 1.75
_GLOO_FP32, _GLOO_FP16 = 2.8e-9, 20e-9  # seconds a byte: two ranks, ResNet-50, link not shaped (docs/planning.md)


@dataclass(frozen=True)
class Link:
    """One direction of a network card, full duplex, or of the connection between the workers of a node.

    Args:
        bits: bits a second, nominal, > 0 and finite.
        latency: seconds from one end to the other, >= 0.
        message: seconds of its two ends for each message, beside the bytes, >= 0.
    """

    bits: float
    latency: float = 20e-6
    message: float = 30e-6

    @property
    def way(self) -> float:
        """Seconds that the last byte of a message travels."""
        return HANDSHAKE * self.latency

    @property
    def hop(self) -> float:
        """Seconds of a message without bytes."""
        return self.way + self.message

    def seconds(self, nbytes: float) -> float:
        """Seconds for which `nbytes` occupy it: ``8 * nbytes / (0.94 * bits)``."""
        return 8 * nbytes / (PAYLOAD * self.bits)


PCIE = Link(80e9, latency=5e-6, message=5e-6)  # 10 GB/s between the workers of a node; NVLink is faster


@dataclass(frozen=True)
class Cluster:
    """M nodes of G workers; each node has one card.

    Args:
        workers: N >= 1.
        card: link of every node to all others.
        node_size: G >= 1, a divisor of N.
        inside: link of every worker to the others of its node.
        cycle: seconds of a cycle of Horovod's background loop, >= 0.
        mpi: whether workers negotiate along MPI's trees, not Gloo's rings.
    """

    workers: int
    card: Link
    node_size: int = 1
    inside: Link = PCIE
    cycle: float = 1e-3
    mpi: bool = False

    @property
    def nodes(self) -> int:
        """M."""
        return self.workers // self.node_size


@dataclass(frozen=True)
class Machine:
    """Seconds of one worker. The defaults were measured on one thread of a CPU with AVX-512 (docs/planning.md); adding
    costs nothing, as with NCCL, so that dense is never made slower than its link.

    Args:
        computing: seconds of a step without any exchange, T, > 0.
        overlap: share of T that can hide an exchange which begins during the backward pass, in [0, 1].
        compress: seconds to accumulate and select, for each element of the model that the worker keeps.
        encode: seconds more, for each element sent.
        decode: seconds to decode and add, for each element received.
        update: seconds to write the update, for each element of the model.
        overhead: seconds of hooks, and of waiting for slower workers, in a compressed step.
        add_fp32: seconds to add a received byte in a hop of an allreduce.
        add_fp16: the same of 16-bit values.
        factorise: seconds of PowerSGD for each element of the model and each rank of its factors.
    """

    computing: float
    overlap: float = 2 / 3
    compress: float = 0.45e-9
    encode: float = 25e-9
    decode: float = 8e-9
    update: float = 0.06e-9
    overhead: float = 5e-3
    add_fp32: float = 0.0
    add_fp16: float = 0.0
    factorise: float = 4e-9

    def over_gloo(self) -> Machine:
        """Return a copy with allreduces as Gloo makes them on a CPU, where 16-bit values are added one by one."""
        return replace(self, add_fp32=_GLOO_FP32, add_fp16=_GLOO_FP16)

    def add(self, collective: Round) -> float:
        """Seconds to add a byte of a collective's values."""
        return {"float32": self.add_fp32, "float16": self.add_fp16}.get(collective.dtype, 0.0)


SIZES = Round("sizes", ALLTOALL, "uint8", 4)  # sent by Horovod before the parts of an alltoall, for each worker
# A collective is called while Horovod negotiates, on average in the middle, and is begun after the next negotiation
CYCLES_WAITED = 1.5


def waiting(rounds: int, cluster: Cluster) -> float:
    """Seconds between the calls of collectives and their begin by Horovod, for all dependent rounds of a step.

    Args:
        rounds: number of rounds, each of which waits for the one before, >= 0.
        cluster: links and workers.
    """
    if cluster.workers == 1:
        return 0.0
    if cluster.mpi:
        over, within = (rounds * math.ceil(math.log2(size)) for size in (cluster.nodes, cluster.node_size))
    else:  # an allreduce a round; all begin together, so the longest way counts
        hops = rounds * 2 * (cluster.workers - 1)
        over = math.ceil(hops / cluster.node_size) if cluster.nodes > 1 else 0
        within = hops - over
    return rounds * cluster.cycle + CYCLES_WAITED * (over * cluster.card.hop + within * cluster.inside.hop)


def participants(group: str, cluster: Cluster) -> int:
    """Number of workers that take part in a collective of a group."""
    return {ALL: cluster.workers, BETWEEN: cluster.nodes, INSIDE: cluster.node_size}[group]


def seconds(collective: Round, cluster: Cluster, add: float = 0.0) -> float:
    """Seconds of a collective, from its beginning on every worker to the last result.

    Args:
        collective: round, see `Round`.
        cluster: links and workers.
        add: seconds to add a byte, in an allreduce.
    """
    workers = participants(collective.group, cluster)
    if workers == 1:
        return 0.0
    if collective.kind == ALLTOALL:
        sizes = replace(SIZES, size=SIZES.size * workers, group=collective.group)
        return _direct(sizes, cluster, workers) + _direct(collective, cluster, workers)
    if collective.kind == ALLREDUCE:
        part = collective.nbytes / workers
        return _ring(collective.group, cluster, part, add) + _ring(collective.group, cluster, part)
    return _ring(collective.group, cluster, collective.nbytes)


def _direct(collective: Round, cluster: Cluster, workers: int) -> float:
    inside = collective.group == INSIDE
    link = cluster.inside if inside else cluster.card
    through = collective.received(workers) if inside else through_card(collective, cluster.workers, cluster.node_size)
    one = link.seconds(collective.nbytes / workers)
    return max(link.seconds(through) + link.message, (workers - 1) * link.message + one) + link.way


def _ring(group: str, cluster: Cluster, nbytes: float, add: float = 0.0) -> float:
    """Seconds of P-1 hops of `nbytes`, each of which is added."""
    hops, size = participants(group, cluster) - 1, cluster.node_size
    on_card, inside = (_hop(link, nbytes, add) for link in (cluster.card, cluster.inside))
    if group == INSIDE or cluster.nodes == 1:
        return hops * inside
    occupied = cluster.card.seconds(nbytes)
    if group == BETWEEN:
        others = (size - 1) * occupied
        return (hops - 1) * max(others + occupied, on_card) + others + on_card
    if size == 1:
        return hops * on_card
    # a worker just before a card has more hops over cards than the mean; some collectives all begin together
    over = (hops / size + math.ceil(hops / size)) / 2
    return max(over * on_card + (hops - over) * inside, hops * occupied)


def _hop(link: Link, nbytes: float, add: float) -> float:
    return max(link.seconds(nbytes), add * nbytes) + link.hop
