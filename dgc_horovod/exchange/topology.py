"""Which workers share a node: who averages densely with whom, and who exchanges packets with whom."""

from __future__ import annotations

from dataclasses import dataclass


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
