"""The exchanges as single messages, on links that carry one message after another: what checks `planning.cluster`.

Events are moments at which a message may leave, occupies a card, has arrived, has been added; each is the maximum of
those that it waits for. A card carries one message at a time in each direction, those of an earlier turn first. What
arrives is on its way into the next card while it still leaves the first one. A vector has all workers: a turn of a
ring, or of an alltoall, is a permutation of them.
"""

from __future__ import annotations

import functools

import numpy as np

from dgc_horovod.exchange.contract import ALL, ALLREDUCE, ALLTOALL, BETWEEN, INSIDE, Round
from dgc_horovod.planning.cluster import CYCLES_WAITED, SIZES, Cluster, Machine, participants
from dgc_horovod.planning.cost_model import Traffic

Times = np.ndarray  # seconds, float64, one for each worker
NEGOTIATION = Round("negotiation", ALLREDUCE, "uint8", 64)  # bits of ready tensors, in every cycle of Horovod's loop


class Turn:
    """Every worker sends one message, each to another worker; cards that carry any carry equally many.

    Args:
        receivers: indices of those who get them, by sender; each once.
        node_size: number of workers behind a card.
    """

    def __init__(self, receivers: np.ndarray, node_size: int) -> None:
        senders = np.arange(receivers.size)
        crosses = senders // node_size != receivers // node_size
        self.across = self._paths(senders[crosses], receivers[crosses], node_size)
        self.within = self._paths(senders[~crosses], receivers[~crosses], 1)

    @staticmethod
    def _paths(
        senders: np.ndarray, receivers: np.ndarray, node_size: int
    ) -> tuple[np.ndarray, np.ndarray, Queue, Queue]:
        return senders, receivers, Queue(senders // node_size), Queue(receivers // node_size)


class Queue:
    """Messages that go through cards, each card one after another in the order in which they come.

    Args:
        cards: index of the card of each.
    """

    def __init__(self, cards: np.ndarray) -> None:
        count = int(np.bincount(cards).max(initial=1))  # of each card
        self._order = np.argsort(cards, kind="stable").reshape(-1, count)
        self._cards = cards[self._order[:, 0]] if cards.size else cards
        self._place, self._alone = np.arange(count), cards

    def through(self, alone: Times, free: Times, occupied: float) -> Times:
        """When each is through: ``done_i = max(alone_i, done_(i-1) + occupied)``.

        Args:
            alone: times at which each would be through, had it the card to itself.
            free: times from which each card is free; changed.
            occupied: seconds for which a message occupies a card.
        """
        if self._place.size == 1:
            found = free[self._alone] = np.maximum(alone, free[self._alone] + occupied)
            return found
        earliest = alone[self._order]
        by_time = np.argsort(earliest, axis=1, kind="stable")
        turns = self._place * occupied  # without them it is a running maximum
        least = np.maximum(np.take_along_axis(earliest, by_time, 1), free[self._cards, None] + occupied) - turns
        done = np.maximum.accumulate(least, axis=1) + turns
        free[self._cards] = done[:, -1]
        found = np.empty_like(alone)
        found[np.take_along_axis(self._order, by_time, 1)] = done
        return found


class Network:
    """The cards of a cluster, and the links inside its nodes, with the times until which each is taken."""

    def __init__(self, cluster: Cluster) -> None:
        self._links = cluster.card, cluster.inside
        self._leaving = np.zeros(cluster.nodes), np.zeros(cluster.workers)
        self._entering = np.zeros(cluster.nodes), np.zeros(cluster.workers)

    def deliver(self, turn: Turn, ready: Times, nbytes: float) -> tuple[Times, Times]:
        """Carry the messages of a turn.

        Args:
            turn: who sends to whom.
            ready: times at which the messages may leave, by sender.
            nbytes: bytes of each.

        Returns:
            Times at which the first byte, and the last one, have arrived, by receiver.
        """
        first, last = np.empty_like(ready), np.empty_like(ready)
        paths = zip((turn.across, turn.within), self._links, self._leaving, self._entering, strict=True)
        for (senders, receivers, leave, enter), link, leaving, entering in paths:
            if senders.size:
                occupied = link.seconds(nbytes)
                left = leave.through(ready[senders] + link.message + occupied, leaving, occupied)
                last[receivers] = enter.through(left + link.way, entering, occupied)
                first[receivers] = last[receivers] - occupied
        return first, last


@functools.lru_cache(maxsize=2048)
def _turn(group: str, count: int, size: int, distance: int = 1) -> Turn:
    """Each of `count` workers, `size` a node, sends `distance` places on in its group."""
    workers = np.arange(count)
    receivers = {
        ALL: (workers + distance) % count,
        BETWEEN: (workers + distance * size) % count,
        INSIDE: workers // size * size + (workers % size + distance) % size,
    }
    return Turn(receivers[group], size)


def run(collective: Round, cluster: Cluster, begin: Times, network: Network, add: float = 0.0) -> Times:
    """When each worker has the result of a collective.

    Args:
        collective: round, see `Round`.
        cluster: links and workers.
        begin: times at which each worker begins.
        network: what the messages travel on.
        add: seconds to add a byte, in an allreduce.
    """
    workers = participants(collective.group, cluster)
    if workers == 1:
        return begin
    if collective.kind == ALLTOALL:
        begin = _alltoall(collective.group, SIZES.nbytes, cluster, begin, network)
        return _alltoall(collective.group, collective.nbytes / workers, cluster, begin, network)
    if collective.kind == ALLREDUCE:
        nbytes = collective.nbytes / workers
        return _ring(
            collective.group, nbytes, cluster, _ring(collective.group, nbytes, cluster, begin, network, add), network
        )
    return _ring(collective.group, collective.nbytes, cluster, begin, network)


def _ring(group: str, nbytes: float, cluster: Cluster, begin: Times, network: Network, add: float = 0.0) -> Times:
    """Everybody passes on to the next what has come last, and is added."""
    turn, have, adder_free = _turn(group, cluster.workers, cluster.node_size), begin, begin
    for _ in range(participants(group, cluster) - 1):
        first, last = network.deliver(turn, have, nbytes)
        adder_free = np.maximum(first, adder_free) + add * nbytes  # some bytes are added while others travel
        have = np.maximum(np.maximum(last, have), adder_free)
    return have


def _alltoall(group: str, nbytes: float, cluster: Cluster, begin: Times, network: Network) -> Times:
    """Everybody hands over all messages, one after another, and waits for none of them."""
    done, ready = begin, begin
    message = (cluster.inside if group == INSIDE else cluster.card).message
    for distance in range(1, participants(group, cluster)):
        turn = _turn(group, cluster.workers, cluster.node_size, distance)
        _, last = network.deliver(turn, ready, nbytes)
        done, ready = np.maximum(done, last), ready + message
    return done


def seconds(traffic: Traffic, cluster: Cluster, machine: Machine) -> float:
    """Seconds of a step's collectives: what `Traffic.seconds` says in closed form, over Gloo.

    Args:
        traffic: rounds of all buckets.
        cluster: links and workers.
        machine: seconds to add a byte.
    """
    network, now = Network(cluster), np.zeros(cluster.workers)
    for _ in range(traffic.depth if cluster.workers > 1 else 0):
        called = now + cluster.cycle
        now = run(NEGOTIATION, cluster, called, network)
        now = now + (CYCLES_WAITED - 1) * float((now - called).max())  # of the cycle that is under way then
    for collective in (each for rounds in traffic.buckets for each in rounds):
        now = run(collective, cluster, now, network, machine.add(collective))
    return float(now.max())
