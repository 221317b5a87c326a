"""Horovod's process sets for a hierarchical exchange in TensorFlow graphs."""

from __future__ import annotations

from collections.abc import Mapping

import horovod.tensorflow as hvd

from dgc_horovod.core.nodes import LAST_STEP_SECONDS, declare, declared, meet_at_exit
from dgc_horovod.exchange.contract import ALL, BETWEEN, INSIDE
from dgc_horovod.exchange.topology import Topology
from dgc_horovod.tensorflow.gradients.transport import Collectives
from dgc_horovod.tensorflow.gradients.watchdog import wait_for_shutdown


def node_process_sets(node_size: int | None = None) -> list[hvd.ProcessSet]:
    """The process sets that a hierarchical exchange needs, for ``hvd.init(process_sets=node_process_sets(G))``.

    Args:
        node_size: number of workers of a node, >= 1, the same on every rank; None: DGC_NODE_SIZE, which `dgcrun` sets.

    Returns:
        The sets, for `hvd.init`; none where there is one node, one worker a node, or workers do not fill nodes.
    """
    return declare(hvd.ProcessSet, node_size)


def transports(collectives: Collectives, topology: Topology) -> Mapping[str, Collectives]:
    """The transport of each group of workers; that of all alone where no nodes are used."""
    if topology.node_size == 1:
        return {ALL: collectives}
    meet_at_exit(_meet)
    between = Collectives(declared(topology.between), f"{collectives.tag}.between{topology.local_rank}")
    inside = Collectives(declared(topology.inside), f"{collectives.tag}.inside{topology.node}")
    return {ALL: collectives, BETWEEN: between, INSIDE: inside}


def _meet() -> None:
    try:
        Collectives(hvd.global_process_set, "end", LAST_STEP_SECONDS).gather_bytes(b"here", "meeting")
    finally:
        wait_for_shutdown()
