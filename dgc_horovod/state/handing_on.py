"""Redistribution of residuals from old ranks to new ones, with the same combined residual."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from dgc_horovod.errors import CheckpointError
from dgc_horovod.exchange.hierarchical import Topology
from dgc_horovod.state.residual_state import FIRST, SECOND, ResidualState, is_linear

_log = logging.getLogger("dgc_horovod")


def shares(rank: int, workers: int, before: int, averages: bool) -> dict[int, float]:
    """Return the share of each old rank's residual that a new rank takes over, by old rank.

    The old ranks' residuals divide [0, 1), the new ranks' too; a new one takes the parts that its own overlaps.
    The combined residual does not change: ``(1/N) * sum of v`` if gradients are averaged, ``sum of v`` if they are
    summed. From 4 to 2 ranks it is the mean (the sum) of pairs, from 2 to 4 copies (halves).

    Args:
        rank, workers: index of the new rank, 0 <= rank < workers, and number of ranks now; or of the node, and nodes.
        before: number of ranks before, >= 1.
        averages: whether gradients are averaged.
    """
    scale = before if averages else workers
    found = {}
    for old in range(before):  # in units of 1 / (before * workers)
        overlap = min((old + 1) * workers, (rank + 1) * before) - max(old * workers, rank * before)
        if overlap > 0:
            found[old] = overlap / scale
    return found


def needed(topology: Topology, before: int, node_size: int, cut_alike: bool = True) -> list[int]:
    """Return the old ranks whose states a worker needs.

    Args:
        topology: place of the worker now.
        before, node_size: number of ranks before, and of workers of a node.
        cut_alike: whether the buckets are the same as before, and with them the slices of the workers of a node.
    """
    if _goes_on(topology, before, node_size, cut_alike):
        return [topology.rank]
    return list(shares(topology.node, topology.nodes, before, averages=True))


def _goes_on(topology: Topology, before: int, node_size: int, cut_alike: bool) -> bool:
    """Whether a worker goes on from its own state; one without slices fits into any buckets."""
    return (before, node_size) == (topology.workers, topology.node_size) and (cut_alike or node_size == 1)


def handed_on(states: Mapping[int, ResidualState], topology: Topology, cut_alike: bool = True) -> ResidualState:
    """Return the state of a worker from the states of the old ranks that `needed` names.

    If the worker shares its node, it is the state of all workers of the node: each takes its slice of it.

    Args:
        states: states of old ranks, by rank, at least one; a lost one is missing, and counts as zero.
        topology: place of the worker now.
        cut_alike: see `needed`.

    Raises:
        CheckpointError: the states are not of the same model.
    """
    rank, workers, one = topology.rank, topology.workers, next(iter(states.values()))
    if _goes_on(topology, one.workers, one.node_size, cut_alike) and rank in states:
        return states[rank]
    made = ResidualState(rank, workers, one.averages, node_size=topology.node_size, method=one.method, **one.shared)
    made.second = next((state.second for state in states.values() if state.second), {})
    weights = shares(topology.node, topology.nodes, one.workers, one.averages)
    means = shares(topology.node, topology.nodes, one.workers, averages=True)  # Adam's moments are never summed
    anew: set[str] = set()  # tensors whose moments are dropped
    if not _of_whole_nodes(states, means):
        anew = {name for state in states.values() for name, arrays in state.tensors.items() if SECOND in arrays}
    if anew and rank == 0:
        _log.warning(
            "dgc_horovod: Adam's moments are dropped and start anew: each worker of a node had a part of them, and the "
            "workers are placed differently now"
        )
    for old, state in states.items():
        for name, count in state.directions.items():
            if name not in anew:
                made.directions[name] = max(count, made.directions.get(name, 0))
        for name, arrays in state.as_one_of_all().tensors.items():
            for part, array in arrays.items():
                if part in (FIRST, SECOND) and name in anew:  # a second moment of zeros would make huge steps
                    continue
                weight = (weights if is_linear(part) else means).get(old, 0.0)
                ours = made.tensors.setdefault(name, {})
                taken = array * np.float32(weight)
                if part in ours and ours[part].size != taken.size:
                    raise CheckpointError(
                        f"the residual of {name!r} has {taken.size} elements in the record of rank {old}, and "
                        f"{ours[part].size} in those before; they must be of the same model"
                    )
                ours[part] = ours[part] + taken if part in ours else taken
    return made


def _of_whole_nodes(states: Mapping[int, ResidualState], shares_of: Mapping[int, float]) -> bool:
    """Whether all workers of a node come together, in equal shares: only then are Adam's moments whole."""
    size = next(iter(states.values())).node_size
    for start in {old // size * size for old in shares_of}:
        if len({shares_of.get(old, 0.0) if old in states else 0.0 for old in range(start, start + size)}) > 1:
            return False
    return True
