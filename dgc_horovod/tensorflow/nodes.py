"""Horovod's process sets for a hierarchical exchange in TensorFlow graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import horovod.tensorflow as hvd
from horovod.common import process_sets

from dgc_horovod.config import DGCConfig
from dgc_horovod.exchange.contract import ALL, BETWEEN, INSIDE
from dgc_horovod.exchange.nodes import Launched, agree, declare, declared
from dgc_horovod.exchange.topology import Topology
from dgc_horovod.tensorflow.gradients.transport import Collectives


def known_sets() -> dict[int, list[int]]:
    """The process sets that Horovod has now: number -> ranks."""
    basics = process_sets._basics
    return {} if basics is None else dict(basics._get_process_set_ids_and_ranks())


def node_process_sets(node_size: int | None = None) -> list[hvd.ProcessSet]:
    """The process sets that a hierarchical exchange needs, for ``hvd.init(process_sets=node_process_sets(G))``.

    Args:
        node_size: number of workers of a node, >= 1, the same on every rank; None: DGC_NODE_SIZE, which `dgcrun` sets.

    Returns:
        The sets, for `hvd.init`; none where there is one node, one worker a node, or workers do not fill nodes.
    """
    return declare(hvd.ProcessSet, node_size)


def agreed_topology(process_set: hvd.ProcessSet, config: DGCConfig, hindrance: Callable[[Topology], str]) -> Topology:
    """The topology that all ranks can use; see `exchange.nodes.agree`."""
    launched = Launched(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), known_sets())
    return agree(Collectives(process_set, "start"), config, launched, hindrance)


def transports(collectives: Collectives, topology: Topology) -> Mapping[str, Collectives]:
    """The transport of each group of workers; that of all alone where no nodes are used."""
    if topology.node_size == 1:
        return {ALL: collectives}
    between = Collectives(declared(topology.between), f"{collectives.tag}.between{topology.local_rank}")
    inside = Collectives(declared(topology.inside), f"{collectives.tag}.inside{topology.node}")
    return {ALL: collectives, BETWEEN: between, INSIDE: inside}
