"""Links and who shares them: what a plan knows of a cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dgc_horovod.errors import ConfigError

PAYLOAD = 1448 / 1538  # of what Ethernet carries in full frames is what TCP delivers
# Latencies of a message over Gloo, which leaves once the receiver has said that it is ready (docs/planning.md)
HANDSHAKE = 1.75


@dataclass(frozen=True)
class Link:
    """One direction of a network card, full duplex, or of what connects the workers of a node.

    Args:
        bits: bits a second, nominal, > 0 and finite.
        latency: seconds from one end to the other, >= 0.
        message: seconds of its two ends for each message, beside the bytes, >= 0.
    """

    bits: float
    latency: float = 20e-6
    message: float = 30e-6

    def __post_init__(self) -> None:
        if not 0 < self.bits < math.inf:
            raise ConfigError(f"a link's rate must be positive, got {self.bits / 1e9:g} Gbit/s")
        for name, value in (("latency", self.latency), ("time of a message", self.message)):
            if not 0 <= value < math.inf:
                raise ConfigError(f"a link's {name} must be at least 0, got {1e3 * value:g} ms")

    @property
    def way(self) -> float:
        """Seconds that the last byte of a message is under way."""
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
        cycle: seconds from one look of Horovod's at what is to be done to the next, >= 0.
        mpi: whether workers agree on that along MPI's trees, not Gloo's rings.
    """

    workers: int
    card: Link
    node_size: int = 1
    inside: Link = PCIE
    cycle: float = 1e-3
    mpi: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1 or self.node_size < 1 or self.workers % self.node_size:
            raise ConfigError(f"{self.workers} workers do not fill nodes of {self.node_size}")

    @property
    def nodes(self) -> int:
        """M."""
        return self.workers // self.node_size
