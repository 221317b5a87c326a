"""The message of one bucket at a step, its format, which depends on the density only, and the memory for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

import numpy as np

from dgc_horovod.config import RULES, DGCConfig
from dgc_horovod.core.selection import ThresholdPredictor
from dgc_horovod.exchange import choose
from dgc_horovod.exchange.contract import Exchange, FlatExchange, Round
from dgc_horovod.exchange.hierarchical import HierarchicalExchange, Topology, rounds_of
from dgc_horovod.kernels.contract import Elements, Kernels, Search, State
from dgc_horovod.wire.bucket import Bucket
from dgc_horovod.wire.packet import PacketFormat

_COARSE = ("4bit", "2bit")


@dataclass(frozen=True)
class Message:
    """One rank's message of one bucket in the first round of its exchange.

    Args:
        payload: buffer of that round, flat; may be reused at the next step.
        round: collective that carries it.
        count: number of elements selected.
    """

    payload: np.ndarray
    round: Round
    count: int


@dataclass(frozen=True)
class HostSentRecord:
    """`contract.SentRecord` on the host; `masked` has the values that u had."""

    kernels: Kernels
    elements: Elements
    masked: np.ndarray | None

    @property
    def positions(self) -> np.ndarray:
        """See `contract.SentRecord`."""
        return self.elements.positions

    def rollback(self, state: State) -> None:
        """See `contract.SentRecord`."""
        self.kernels.put(state.v, self.elements)
        if self.masked is not None:
            self.kernels.put(state.u, Elements(self.elements.positions, self.masked))


def min_magnitude(elements: Elements) -> float:
    """Return the smallest magnitude of `elements`; 0 if there are none."""
    return float(np.abs(elements.values).min()) if elements.values.size else 0.0


class MessageSpec(NamedTuple):
    """Packet format of one rank's selection, exchange (between nodes), and all collectives."""

    wire: PacketFormat
    exchange: type[FlatExchange]
    rounds: tuple[Round, ...]


def message_spec(bucket: Bucket, config: DGCConfig, density: float, topology: Topology) -> MessageSpec:
    """Return the message format of a worker's slice of a bucket at a density; without nodes, of the whole bucket.

    Args:
        bucket: layout of the whole bucket.
        config: compression settings.
        density: fraction of the elements sent at the step, in (0, 1]; not used for an uncompressed bucket.
        topology: place of the worker.
    """
    density = 1.0 if bucket.uncompressed else density
    numel = bucket.slices(topology.node_size)[0].numel  # all slices are of one size
    indices = "every" if bucket.uncompressed else "elias-fano"
    values = bucket.values or config.values
    if density == 1 and config.momentum_correction and config.begins_dense and values in _COARSE:
        values = "bf16"  # these steps are Adam's own: squares of coarsely rounded gradients are too large
    wire = PacketFormat(bucket.index, numel, count_for(numel, density), values, indices)
    exchange = choose(wire, topology.nodes, config.shards, topology.node_size)
    rounds = rounds_of(exchange.rounds_of(wire, topology.nodes), topology.nodes, topology.node_size)
    return MessageSpec(wire, exchange, rounds)


def count_for(numel: int, density: float) -> int:
    """``k = max(1, ceil(density * numel))``, with the exact decimal value of the density as written."""
    return min(numel, max(1, math.ceil(Decimal(repr(float(density))) * numel)))


class Workspace:
    """Exchange, threshold predictor and memory of a bucket at one density.

    Args:
        bucket: layout of the whole bucket.
        config: compression settings.
        kernels: backend on the device that holds the gradients.
        density: fraction of the elements sent at each step, in (0, 1].
        topology: place of the worker.
        state: state of the bucket on this worker.
    """

    def __init__(
        self,
        bucket: Bucket,
        config: DGCConfig,
        kernels: Kernels,
        density: float,
        topology: Topology,
        state: State,
    ) -> None:
        self.density = density
        wire, exchange, _ = message_spec(bucket, config, density, topology)
        self.capacity = wire.capacity
        slices = bucket.slices(topology.node_size)
        self.exchange: Exchange = (
            exchange(bucket, wire, kernels, topology.workers)
            if len(slices) == 1
            else HierarchicalExchange(slices, topology.local_rank, wire, kernels, topology.nodes, exchange)
        )
        self.exchange.adopt(topology.node, state)
        self.predictor = ThresholdPredictor(wire.numel, wire.capacity)
        rule, max_candidates = RULES[config.rule], self.predictor.max_candidates
        self._wants_sums = rule.needs_sums and not bucket.uncompressed
        self.sender = self.exchange.sender(max_candidates) if rule.on_device and max_candidates else None
        self.masked = np.empty(wire.capacity, np.float32)

    @property
    def search(self) -> Search:
        """What the pass of the present step looks for."""
        threshold = float(np.float32(self.predictor.threshold))  # as kernels compare
        return Search(threshold, self.predictor.max_candidates, self._wants_sums)
