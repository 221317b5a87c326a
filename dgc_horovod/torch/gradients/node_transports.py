"""The transports of a hierarchical exchange, whoever makes the groups: of all workers, between nodes, inside one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from dgc_horovod.config import DGCConfig
from dgc_horovod.core.bucketing import TensorSpec
from dgc_horovod.core.nodes import Launched, agree
from dgc_horovod.exchange.contract import ALL
from dgc_horovod.exchange.topology import Topology
from dgc_horovod.torch.gradients.collectives import Collectives


def agreed_transports(
    collectives: Collectives,
    config: DGCConfig,
    launched: Launched,
    averages: bool,
    parameters: Mapping[str, torch.Tensor],
    speed: float,
    make: Callable[[Topology], Mapping[str, Collectives]],
) -> Mapping[str, Collectives]:
    """The transport of each group, where all ranks can make a hierarchical exchange; else that of all alone.

    Args:
        collectives: transport of all workers.
        config, launched, averages, speed: see `agree`.
        parameters: parameters by name, in the model's order.
        make: function that gives the transports of `BETWEEN` and `INSIDE` on a topology, called on every rank.
    """
    specs = [TensorSpec(name, tuple(p.shape)) for name, p in parameters.items()]
    topology = agree(collectives, config, launched, averages, specs, speed)
    found = {ALL: collectives, **(make(topology) if topology.node_size > 1 else {})}
    for each in found.values():
        each.traffic = collectives.traffic
    return found
