"""What a compressed step would take, from what a job has measured of its own dense steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dgc_horovod.config import FLAT, HIERARCHICAL, SHARDED
from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.planning import cost_model
from dgc_horovod.planning.cluster import PAYLOAD, Cluster, Link
from dgc_horovod.planning.machine import Machine
from dgc_horovod.stats import ring_received

_HOOK = 30e-6  # seconds of a compressed step for each tensor: 5 ms of ResNet-50's 161 (docs/planning.md)
_LEAST_SHARE = 0.05  # of a step at least is computing, whatever was measured


@dataclass(frozen=True)
class Observed:
    """Means over the ranks, of dense steps.

    Args:
        step: seconds of a step, > 0.
        waited: of those, seconds in which nothing was left to do but wait for gradients, >= 0.
        one, many: seconds of an allreduce of one element and of `numel`, in fp32, > 0.
        numel: number of elements of the longer one, > 1.
    """

    step: float
    waited: float
    one: float
    many: float
    numel: float

    @property
    def computing(self) -> float:
        """Seconds of a step without any exchange."""
        return max(self.step - self.waited, _LEAST_SHARE * self.step)

    def link_bits(self, workers: int) -> float:
        """Bits a second that a card receives in a ring allreduce, sums included."""
        received = ring_received(int(4 * self.numel), workers)
        return 8 * received / max(self.many - self.one, 1e-3 * self.many)


def predicted(buckets: OptimizerExchange, observed: Observed, gloo: bool) -> float:
    """Seconds of a step with the compression of `buckets`.

    The link's rate is that of the allreduces that were timed, with their sums; a round costs what the shorter one does;
    what of the dense exchange was not waited for is hidden behind the backward pass. See `cost_model`.

    Args:
        buckets: buckets of the compressed exchange.
        observed: what was measured.
        gloo: whether allreduces are Gloo's, on a CPU, which adds 16-bit values one by one.
    """
    place, config, specs = buckets.topology, buckets.config, buckets.specs
    card = Link(observed.link_bits(place.workers) / PAYLOAD, latency=0.0, message=0.0)
    cluster = Cluster(place.workers, card, place.node_size, cycle=observed.one)
    alone = Machine(observed.computing, overlap=0.0, overhead=_HOOK * len(specs))
    machine = replace(alone.over_gloo(), add_fp32=0.0) if gloo else alone
    dense = cost_model.cost(cost_model.DENSE, specs, config, cluster, machine)
    hidden = max(0.0, dense.network_seconds - observed.waited)
    nodes = HIERARCHICAL if place.node_size > 1 else ""
    exchange = "+".join(filter(None, (nodes, SHARDED if config.shards else ""))) or FLAT
    machine = replace(machine, overlap=min(1.0, hidden / observed.computing))
    return cost_model.cost(exchange, specs, config, cluster, machine).step_seconds
