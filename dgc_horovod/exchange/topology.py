"""Which workers share a node: who averages densely with whom, and who exchanges packets with whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Topology:
    """One worker's place among M nodes of G workers each; ranks count node by node.

    Args:
        rank: index of this worker, 0 <= rank < workers.
        workers: N = M*G >= 1.
        node_size: G >= 1, a divisor of N; 1: every worker exchanges packets with every other.
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
        """Index of this worker on its node, and of the slice of every bucket that it keeps."""
        return self.rank % self.node_size

    @property
    def node(self) -> int:
        """Index of its node."""
        return self.rank // self.node_size

    @property
    def inside(self) -> list[int]:
        """Ranks of the workers of its node."""
        return list(range(self.node * self.node_size, (self.node + 1) * self.node_size))

    @property
    def between(self) -> list[int]:
        """Ranks of the workers of equal local rank, one of each node."""
        return list(range(self.local_rank, self.workers, self.node_size))

    @property
    def groups(self) -> list[list[int]]:
        """Ranks of the groups of all workers that collectives are made in: every node, then every local rank."""
        heads = [Topology(node * self.node_size, self.workers, self.node_size) for node in range(self.nodes)]
        return [head.inside for head in heads] + [
            Topology(local, self.workers, self.node_size).between for local in range(self.node_size)
        ]


def problem_of(topology: Topology) -> str:
    """Why there is nothing to gain from nodes, in words; "" if there is."""
    if topology.node_size == 1:
        return "each node has one worker"
    if topology.node_size >= topology.workers:
        return "all workers are on one node"
    if topology.workers % topology.node_size:
        return f"{topology.workers} workers do not fill nodes of {topology.node_size}"
    return ""


_declared: dict[tuple[int, ...], Any] = {}  # by ranks


def declare(make: Callable[[list[int]], Any], workers: int, node_size: int) -> list[Any]:
    """Make the process sets of a hierarchical exchange, to be given to Horovod when it starts.

    Args:
        make: function that makes a process set of ranks.
        workers: N, as the launcher says; 0: not known.
        node_size: G; 0: not known.

    Returns:
        The sets; none where there is nothing to gain from nodes.
    """
    if not (workers and node_size) or problem_of(Topology(0, workers, node_size)):
        return []
    groups = Topology(0, workers, node_size).groups
    _declared.update({tuple(ranks): make(ranks) for ranks in groups})
    return [_declared[tuple(ranks)] for ranks in groups]


def declared(ranks: Sequence[int]) -> Any:
    """The process set of these ranks, where one was declared and Horovod has taken it; else None."""
    found = _declared.get(tuple(ranks))
    return found if found is not None and found.process_set_id is not None else None
