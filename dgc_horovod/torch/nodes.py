"""Horovod's process sets for a hierarchical exchange: the workers of a node, and those of equal local rank."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.torch as hvd

from dgc_horovod import envvars
from dgc_horovod.config import DGCConfig
from dgc_horovod.exchange.contract import ALL, BETWEEN, INSIDE
from dgc_horovod.exchange.topology import Topology, declare, declared, problem_of
from dgc_horovod.torch.transport import HorovodCollectives

_log = logging.getLogger("dgc_horovod")


def node_process_sets(node_size: int | None = None) -> list[hvd.ProcessSet]:
    """The process sets that a hierarchical exchange needs, for ``hvd.init(process_sets=node_process_sets())``.

    Args:
        node_size: workers of a node; None: as many as the launcher has put on this host.

    Returns:
        The sets, for `hvd.init`; none where there is one node, one worker a node, or nodes differ in size.
    """
    workers, local_workers = envvars.launched_workers()
    return declare(hvd.ProcessSet, workers, node_size or local_workers)


def transports(collectives: HorovodCollectives, config: DGCConfig, averages: bool) -> Mapping[str, HorovodCollectives]:
    """The transport of each group, where all ranks can make a hierarchical exchange; else that of all alone.

    Args:
        collectives: transport of all workers.
        config: compression settings; `exchange` and `node_size` are used.
        averages: whether gradients are averaged or summed.

    Cost: two collectives, unless the exchange is "flat".
    """
    flat = {ALL: collectives}
    if config.exchange == "flat" or collectives.workers == 1:
        return flat
    topology = Topology(collectives.rank, collectives.workers, config.node_size or hvd.local_size())
    own = {"node_size": topology.node_size, "problem": _problem(topology, collectives, config, averages)}
    found = [json.loads(data) for data in collectives.gather_bytes(json.dumps(own).encode(), "nodes")]
    problems = [each["problem"] for each in found if each["problem"]]
    if len({each["node_size"] for each in found}) > 1:
        problems.insert(0, "the nodes have different numbers of workers")
    if problems:
        if collectives.rank == 0 and (config.exchange == "hierarchical" or _would_help(found)):
            level = logging.WARNING if config.exchange == "hierarchical" else logging.INFO
            _log.log(level, "dgc_horovod: every worker exchanges packets with every other (flat): %s", problems[0])
        return flat
    between = HorovodCollectives(declared(topology.between), f"{collectives.tag}.between{topology.local_rank}")
    inside = HorovodCollectives(declared(topology.inside), f"{collectives.tag}.inside{topology.node}")
    between.traffic = inside.traffic = collectives.traffic
    return {ALL: collectives, BETWEEN: between, INSIDE: inside}


def _would_help(found: Sequence[Mapping[str, Any]]) -> bool:
    return all(1 < each["node_size"] < len(found) for each in found)


def _problem(topology: Topology, collectives: HorovodCollectives, config: DGCConfig, averages: bool) -> str:
    """Why this rank can make no hierarchical exchange; "" if it can."""
    if found := problem_of(topology):
        return found
    if envvars.horovod_elastic():
        return "in an elastic job nodes come and go"
    if collectives.workers != hvd.size():
        return "the optimizer's process set is not the one of all ranks"
    if not averages:
        return "op=hvd.Sum; a node averages"
    if config.node_size is None and hvd.rank() != hvd.cross_rank() * hvd.local_size() + hvd.local_rank():
        return "ranks do not count node by node (mpirun --map-by slot makes them)"
    if declared(topology.inside) is None or declared(topology.between) is None:
        return (
            "its process sets were not declared; call hvd.init(process_sets=node_process_sets()), of "
            "dgc_horovod.torch, or start with dgcrun"
        )
    return ""
