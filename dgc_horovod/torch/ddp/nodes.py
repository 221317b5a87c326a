"""The process groups of a hierarchical exchange: the workers of a node, and those of equal local rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from dgc_horovod import envvars
from dgc_horovod.config import DGCConfig
from dgc_horovod.core import budget
from dgc_horovod.core.nodes import Launched
from dgc_horovod.exchange.contract import BETWEEN, INSIDE
from dgc_horovod.exchange.topology import Topology
from dgc_horovod.torch.ddp.transport import ProcessGroupCollectives, new_group
from dgc_horovod.torch.gradients.collectives import Collectives
from dgc_horovod.torch.gradients.node_exchange import agreed_transports


def transports(
    collectives: ProcessGroupCollectives, config: DGCConfig, averages: bool, parameters: Mapping[str, torch.Tensor]
) -> Mapping[str, Collectives]:
    """The transport of each group, where all ranks can make a hierarchical exchange; else that of all alone.

    Args:
        collectives: transport of all workers.
        config: compression settings; `exchange` and `node_size` are used.
        averages: whether gradients are averaged or summed.
        parameters: parameters by name, in the model's order.
    """
    place = dist.get_rank(), dist.get_world_size(), *envvars.torchrun_place()
    launched = Launched(*place, has_group=lambda ranks: True)

    def make(topology: Topology) -> Mapping[str, Collectives]:
        found = {}
        for ranks in topology.groups:  # in one order on every rank, so that none waits for one that waits for it
            if topology.rank in ranks:
                name = INSIDE if ranks == topology.inside else BETWEEN
                found[name] = ProcessGroupCollectives(new_group(ranks, envvars.timeout_seconds()), collectives.tag)
        return found

    return agreed_transports(collectives, config, launched, averages, parameters, budget.HOST_SPEED, make)
