"""Horovod's process sets for a hierarchical exchange: the workers of a node, and those of equal local rank."""

from __future__ import annotations

from collections.abc import Mapping

import horovod.torch as hvd
import torch

from dgc_horovod.config import DGCConfig
from dgc_horovod.core import budget
from dgc_horovod.core.nodes import LAST_STEP_SECONDS, Launched, declare, declared, meet_at_exit
from dgc_horovod.exchange.contract import BETWEEN, INSIDE
from dgc_horovod.exchange.topology import Topology
from dgc_horovod.torch.gradients.collectives import Collectives
from dgc_horovod.torch.gradients.node_exchange import agreed_transports
from dgc_horovod.torch.transport import HorovodCollectives


def node_process_sets(node_size: int | None = None) -> list[hvd.ProcessSet]:
    """The process sets that a hierarchical exchange needs, for ``hvd.init(process_sets=node_process_sets(G))``.

    Args:
        node_size: number of workers of a node, >= 1, the same on every rank; None: DGC_NODE_SIZE, which `dgcrun` sets.

    Returns:
        The sets, for `hvd.init`; none where there is one node, one worker a node, or workers do not fill nodes.
    """
    return declare(hvd.ProcessSet, node_size)


def transports(
    collectives: HorovodCollectives, config: DGCConfig, averages: bool, parameters: Mapping[str, torch.Tensor]
) -> Mapping[str, Collectives]:
    """The transport of each group, where all ranks can make a hierarchical exchange; else that of all alone.

    Args:
        collectives: transport of all workers.
        config: compression settings; `exchange` and `node_size` are used.
        averages: whether gradients are averaged or summed.
        parameters: parameters by name, in the model's order.
    """
    on_gpus = hvd.nccl_built() and all(p.is_cuda for p in parameters.values())
    speed = budget.NCCL_SPEED if on_gpus else budget.HOST_SPEED

    def make(topology: Topology) -> Mapping[str, Collectives]:
        meet_at_exit(_meet)
        return {
            BETWEEN: HorovodCollectives(declared(topology.between), f"{collectives.tag}.between{topology.local_rank}"),
            INSIDE: HorovodCollectives(declared(topology.inside), f"{collectives.tag}.inside{topology.node}"),
        }

    return agreed_transports(collectives, config, Launched.of(hvd), averages, parameters, speed, make)


def _meet() -> None:
    HorovodCollectives(hvd.global_process_set, "end", LAST_STEP_SECONDS).gather_bytes(b"here", "meeting")
