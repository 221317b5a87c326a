"""Costs of a step with each exchange of gradients: bytes of a network card, seconds, memory of a worker.

n elements, k of them sent by a worker, N workers in M nodes of G, T of computing; a worker reads the packets of S
senders: N, or M nodes, or, with shard owners, as much as 2::

    network   the collectives one after another, as Horovod's thread makes them (`cluster.seconds`),
              + the wait for Horovod of each round that depends on another (`cluster.waiting`)
    cpu       compress * n/G + encode * k/G + decode * S*k + update * n + overhead; PowerSGD factorise * rank * n
    step      T + cpu + network, less the hidden part of the network: at most overlap * T, and not the last bucket's
    memory    bytes of momentum and the state of compression: dense 4n, fp16 6n, PowerSGD 8n; ours 8n/G,
              with owners 4n/N more, 80 for each element sent and 8 for each received

Not in the model: the density warm-up, workers that wait for the slowest, shared switches.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dgc_horovod.config import FLAT, HIERARCHICAL, SHARDED, DGCConfig
from dgc_horovod.core.bucketing import TensorSpec, rounds_of, through_card, within_budget
from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.exchange.contract import ALLREDUCE, ALLTOALL, INSIDE, Round
from dgc_horovod.exchange.hierarchical import Topology
from dgc_horovod.planning.cluster import PAYLOAD, Cluster, Link, Machine, seconds, waiting
from dgc_horovod.stats import ring_received

DENSE, FP16, POWER_SGD = "dense", "fp16", "PowerSGD"
EXCHANGES = (FLAT, HIERARCHICAL, SHARDED, f"{HIERARCHICAL}+{SHARDED}")
METHODS = (DENSE, FP16, POWER_SGD, *EXCHANGES)
FUSION_BYTES = 128 * 2**20  # bytes that Horovod sends together by default
POWER_SGD_RANK = 1  # the default of torch's hook
# Bytes of memory: for each element sent and received (docs/design.md, Memory); for other methods, for each element of
# the model: momentum, with fp16 the copy that is sent, with PowerSGD the residual
_SENT_BYTES, _RECEIVED_BYTES = 80, 8
_MEMORY = {DENSE: 4, FP16: 6, POWER_SGD: 8}
_HOOK = 30e-6  # seconds of a compressed step for each tensor: 5 ms of ResNet-50's 161 (docs/planning.md)
_LEAST_SHARE = 0.05  # least share of a step that counts as computing, whatever was measured


@dataclass(frozen=True)
class Cost:
    """Costs of a step with one method.

    Args:
        name: one of `METHODS`.
        card_bytes: bytes that a network card receives.
        network_seconds: seconds of the collectives, without hiding behind computing.
        cpu_seconds: seconds of the method's own work on a worker.
        step_seconds: seconds of the whole step.
        memory_bytes: bytes of a worker beside weights and gradients, momentum included.
        computing: seconds of a step without any exchange, T.
        density: fraction of the elements that are sent; a budget may have lowered it.
    """

    name: str
    card_bytes: int
    network_seconds: float
    cpu_seconds: float
    step_seconds: float
    memory_bytes: int
    computing: float
    density: float = 1.0

    @property
    def efficiency(self) -> float:
        """Throughput of N workers over N times that of one without an exchange."""
        return self.computing / self.step_seconds


@dataclass(frozen=True)
class Traffic:
    """The collectives of a step: for each bucket its rounds, in order; each waits for the one before."""

    buckets: tuple[tuple[Round, ...], ...]

    def card_bytes(self, cluster: Cluster) -> int:
        """Bytes that a card receives."""
        place = cluster.workers, cluster.node_size
        return sum(count * through_card(each, *place) for rounds, count in self._alike.items() for each in rounds)

    @cached_property
    def _alike(self) -> Counter[tuple[Round, ...]]:
        """Number of buckets for each sequence of rounds: a large model has thousands of buckets with the same costs."""
        return Counter(self.buckets)

    @property
    def depth(self) -> int:
        """Number of rounds that depend on each other; rounds of different buckets do not."""
        return max(map(len, self.buckets), default=0)

    def seconds(self, cluster: Cluster, machine: Machine) -> float:
        """Seconds of all of them, one after another, and of waiting for Horovod to begin each round."""
        every = sum(count * _of_bucket(rounds, cluster, machine) for rounds, count in self._alike.items())
        return waiting(self.depth, cluster) + every

    def last(self, cluster: Cluster, machine: Machine) -> float:
        """Seconds of the last bucket, which is sent at the end of the backward pass."""
        own = _of_bucket(self.buckets[-1], cluster, machine) if self.buckets else 0.0
        return waiting(self.depth, cluster) + own


def _of_bucket(rounds: Sequence[Round], cluster: Cluster, machine: Machine) -> float:
    return sum(seconds(each, cluster, machine.add(each)) for each in rounds)


def traffic_of(
    method: str, specs: Sequence[TensorSpec], config: DGCConfig, cluster: Cluster, rank: int = POWER_SGD_RANK
) -> Traffic:
    """The collectives of a step by one of `METHODS`.

    Args:
        method, specs, config, cluster, rank: see `cost`; the density is that of `config`, whatever its budget.
    """
    numel = sum(spec.numel for spec in specs)
    if method in EXCHANGES:
        topology = _topology(method, cluster)
        buckets = rounds_of(specs, config.replace(exchange=method), topology)
        if topology.node_size > 1:  # before them the workers of a node average, each its slice
            buckets.insert(0, (Round("slices", ALLTOALL, "float32", numel, INSIDE),))
        return Traffic(tuple(buckets))
    if method == POWER_SGD:
        whole, left, right = power_sgd_elements(specs, rank)
        return Traffic((tuple(_allreduce(n, "float32") for n in (whole, left, right) if n),))
    dtype = "float16" if method == FP16 else "float32"
    fused = math.ceil(numel * (2 if method == FP16 else 4) / FUSION_BYTES)
    return Traffic(((_allreduce(-(-numel // fused), dtype),),) * fused)


def _allreduce(numel: int, dtype: str) -> Round:
    return Round("gradients", ALLREDUCE, dtype, numel)


def _topology(method: str, cluster: Cluster) -> Topology:
    return Topology(0, cluster.workers, cluster.node_size if method.startswith(HIERARCHICAL) else 1)


def power_sgd_elements(specs: Sequence[TensorSpec], rank: int = POWER_SGD_RANK) -> tuple[int, int, int]:
    """Numbers of elements that PowerSGD (arXiv 1905.13727) sends: whole tensors, factors P, factors Q.

    A tensor of m rows and the rest as columns is sent as two factors of rank r, unless that saves less than half of it.

    Args:
        specs: name and shape of every tensor.
        rank: r >= 1.
    """
    whole = left = right = 0
    for spec in specs:
        rows = spec.shape[0] if spec.shape else 1
        columns = spec.numel // rows if rows else 0
        if len(spec.shape) < 2 or 2 * rank * (rows + columns) > spec.numel:
            whole += spec.numel
        else:
            left, right = left + rank * rows, right + rank * columns
    return whole, left, right


def cost(
    method: str,
    specs: Sequence[TensorSpec],
    config: DGCConfig,
    cluster: Cluster,
    machine: Machine,
    rank: int = POWER_SGD_RANK,
) -> Cost:
    """Return the costs of a step.

    Args:
        method: one of `METHODS`; it replaces the exchange of `config`.
        specs: name and shape of every tensor, in the model's order.
        config: compression settings; a budget lowers the density, as it does in a job.
        cluster: workers and links.
        machine: seconds of one worker.
        rank: number of columns of PowerSGD's factors, >= 1.
    """
    numel, density, hides = sum(spec.numel for spec in specs), 1.0, True
    if method in EXCHANGES:
        config = within_budget(specs, config.replace(exchange=method), _topology(method, cluster))
        cpu, memory = _of_compression(config, numel, cluster, machine)
        density = config.density
        hides = config.clip_norm is None  # with a norm to clip at, every gradient must be there before a message leaves
    else:
        cpu, memory = machine.factorise * rank * numel if method == POWER_SGD else 0.0, _MEMORY[method] * numel
    traffic, computing = traffic_of(method, specs, config, cluster, rank), machine.computing
    network = traffic.seconds(cluster, machine)
    hidden = min(machine.overlap * computing, network - traffic.last(cluster, machine)) if hides else 0.0
    step = computing + cpu + network - hidden
    return Cost(method, traffic.card_bytes(cluster), network, cpu, step, memory, computing, density)


def _of_compression(config: DGCConfig, numel: int, cluster: Cluster, machine: Machine) -> tuple[float, int]:
    """Seconds of compression on a worker, and bytes of its memory."""
    topology = _topology(config.exchange, cluster)
    kept, sent = numel / topology.node_size, config.density * numel
    sent_here = sent / topology.node_size
    received = 2 * sent if config.shards else topology.nodes * sent
    cpu = machine.compress * kept + machine.encode * sent_here + machine.decode * received
    cpu += machine.update * numel + machine.overhead
    memory = 8 * kept + 4 * numel / cluster.workers * config.shards
    memory += _SENT_BYTES * sent_here + _RECEIVED_BYTES * received
    return cpu, round(memory)


# -- of a job, from what it has measured of its own dense steps: for `auto`


@dataclass(frozen=True)
class Observed:
    """Means over the ranks, of dense steps.

    Args:
        step: seconds of a step, > 0.
        waited: seconds of the step in which this rank only waited for gradients, >= 0.
        one, many: seconds of an allreduce of one element and of `numel`, in fp32, > 0.
        numel: number of elements of the longer one, > 1.
    """

    step: float
    waited: float
    one: float
    many: float
    numel: int


def predicted(buckets: OptimizerExchange, observed: Observed, gloo: bool) -> float:
    """Seconds of a step with the compression of `buckets`.

    The link's rate is that of the timed allreduces, sums included; a round costs as much as the shorter one; the dense
    exchange that was not waited for is hidden behind the backward pass. See `cost`.

    Args:
        buckets: buckets of the compressed exchange.
        observed: measurements.
        gloo: whether allreduces are Gloo's, on a CPU, which adds 16-bit values one by one.
    """
    place, config, specs = buckets.topology, buckets.config, buckets.specs
    computing = max(observed.step - observed.waited, _LEAST_SHARE * observed.step)
    received = ring_received(4 * observed.numel, place.workers)
    bits = 8 * received / max(observed.many - observed.one, 1e-3 * observed.many)
    card = Link(bits / PAYLOAD, latency=0.0, message=0.0)
    cluster = Cluster(place.workers, card, place.node_size, cycle=observed.one)
    alone = Machine(computing, overlap=0.0, overhead=_HOOK * len(specs))
    machine = replace(alone.over_gloo(), add_fp32=0.0) if gloo else alone
    dense = cost(DENSE, specs, config, cluster, machine)
    hidden = max(0.0, dense.network_seconds - observed.waited)
    nodes = HIERARCHICAL if place.node_size > 1 else ""
    exchange = "+".join(filter(None, (nodes, SHARDED if config.shards else ""))) or FLAT
    machine = replace(machine, overlap=min(1.0, hidden / computing))
    return cost(exchange, specs, config, cluster, machine).step_seconds
