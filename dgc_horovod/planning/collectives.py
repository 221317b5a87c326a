"""Seconds of one collective on the links of a cluster, in closed form; `benchmarks.planning` checks them by messages.

P participants, b bytes that each sends, w(x) seconds of x bytes on a link, s(x) seconds to add them, a hop::

    allgather, ring    (P-1) * (w(b) + hop)                  b from one neighbour to the other
    allreduce, ring    (P-1) * (max(w, s)(b/P) + hop)        reduce-scatter: some bytes travel while others are added
                     + (P-1) * (w(b/P) + hop)                allgather of the sums
    alltoall, direct   max((P-1) * w(b/P) + message, (P-1) * message + w(b/P)) + way, after one of the parts' sizes

With G workers behind a card:

* A ring of all in host order crosses a card once a turn: of its P-1 hops M/N are over the card, the others inside. A
  card carries P-1 messages, one after another, if that takes longer.
* G rings `BETWEEN` nodes share a card: a turn takes ``max(G * w, w + hop)``, the last one ``G * w + hop``.
* An alltoall of all brings a card what `budget.through_card` counts.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dgc_horovod.core.budget import through_card
from dgc_horovod.exchange.contract import ALL, ALLREDUCE, ALLTOALL, BETWEEN, INSIDE, Round
from dgc_horovod.planning.cluster import Cluster, Link

NEGOTIATION = Round("negotiation", ALLREDUCE, "uint8", 64)  # bits of ready tensors, in every cycle of Horovod's loop
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
    over, within = _hops_by_tree(rounds, cluster) if cluster.mpi else _hops_by_ring(rounds, cluster)
    return rounds * cluster.cycle + CYCLES_WAITED * (over * cluster.card.hop + within * cluster.inside.hop)


def _hops_by_ring(rounds: int, cluster: Cluster) -> tuple[int, int]:
    """Hops over cards and inside nodes, an allreduce a round; all begin together, so the longest way counts."""
    hops = rounds * 2 * (cluster.workers - 1)
    over = math.ceil(hops / cluster.node_size) if cluster.nodes > 1 else 0
    return over, hops - over


def _hops_by_tree(rounds: int, cluster: Cluster) -> tuple[int, int]:
    return rounds * math.ceil(math.log2(cluster.nodes)), rounds * math.ceil(math.log2(cluster.node_size))


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
