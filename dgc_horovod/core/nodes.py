"""Agreement of the ranks on nodes: whether all can use a hierarchical exchange, and the process sets it needs."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dgc_horovod import envvars, leaving
from dgc_horovod.config import DGCConfig
from dgc_horovod.config_check import Gatherer
from dgc_horovod.core.bucketing import TensorSpec, loss_by_nodes
from dgc_horovod.exchange.hierarchical import Topology, problem_of
from dgc_horovod.settings import check_whole

_UNDECLARED = (
    "its process sets were not declared; call hvd.init(process_sets=node_process_sets(G)) of dgc_horovod.torch or "
    "dgc_horovod.tensorflow, G workers a node, or start with dgcrun"
)
LAST_STEP_SECONDS = 10.0  # longest wait of a rank that has ended for the other ranks to end
_log = logging.getLogger("dgc_horovod")


@dataclass
class _Declaration:
    """Nodes declared by the script or `dgcrun`: G, 0 if not declared; and process sets, by their ranks."""

    node_size: int = 0
    sets: dict[tuple[int, ...], Any] = field(default_factory=dict)


_declaration = _Declaration()


def declare(make: Callable[[list[int]], Any], node_size: int | None, theirs: Iterable[Any] = ()) -> list[Any]:
    """Make the process sets of a hierarchical exchange, for ``hvd.init``.

    Args:
        make: function that makes a process set from ranks.
        node_size: G >= 1, the same on every rank, as all must declare the same sets; None: DGC_NODE_SIZE.
        theirs: process sets of the script, which are passed to Horovod as well.

    Returns:
        The sets that are not in `theirs`; empty if nodes gain nothing.

    Raises:
        ConfigError: G is not a whole number >= 1.
    """
    if node_size is not None:
        check_whole("node_size", node_size, 1)
    workers, node_size = envvars.launched_workers(), node_size or envvars.value(envvars.NODE_SIZE) or 0
    _declaration.node_size = node_size
    if not (workers and node_size) or problem_of(Topology(0, workers, node_size)):
        return []
    given = {tuple(each.ranks): each for each in theirs if each.ranks}
    groups = [tuple(ranks) for ranks in Topology(0, workers, node_size).groups]
    _declaration.sets.update({ranks: given.get(ranks) or make(list(ranks)) for ranks in groups})
    return [_declaration.sets[ranks] for ranks in groups if ranks not in given]


def declared(ranks: Sequence[int]) -> Any:
    """Return the declared process set of these ranks, or None."""
    return _declaration.sets.get(tuple(ranks))


@dataclass(frozen=True)
class Launched:
    """The place of this rank in the job, as the launcher has set it.

    Args:
        rank, size: index among all ranks, and their number.
        local_rank, local_size: index among the ranks of this host, and their number.
        cross_rank: index of the host.
        has_group: function of ranks that returns whether a group of exactly these ranks exists or can be made.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    has_group: Callable[[Sequence[int]], bool]

    @classmethod
    def of(cls, hvd: Any) -> Launched:
        """Return the place according to `hvd`, Horovod's module of a framework; groups are declared process sets."""
        sets: Mapping[int, Sequence[int]] = hvd.mpi_ops._basics._get_process_set_ids_and_ranks()

        def has_group(ranks: Sequence[int]) -> bool:
            found = declared(ranks)
            return found is not None and list(sets.get(found.process_set_id, ())) == list(ranks)

        place = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank()
        return cls(*place, has_group)


def agree(
    collectives: Gatherer,
    config: DGCConfig,
    launched: Launched,
    averages: bool,
    specs: Sequence[TensorSpec],
    speed: float,
    hindrance: str = "",
) -> Topology:
    """Agree on a topology: with nodes if every rank can use them and they gain, else without.

    Args:
        collectives: transport of all workers of the optimizer.
        config: compression settings; `exchange` and `node_size` are used.
        launched: place of this rank.
        averages: whether gradients are averaged or summed.
        specs, speed: see `loss_by_nodes`.
        hindrance: why this kind of optimizer cannot use nodes, in words; "" if it can.

    Cost: two collectives, none if the config's exchange cannot use nodes.
    """
    workers = collectives.workers
    flat = Topology(collectives.rank, workers)
    if not config.may_use_nodes or workers == 1:
        return flat
    wanted = config.wants_nodes
    if envvars.horovod_elastic():
        if wanted and collectives.rank == 0:
            _tell(logging.WARNING, "the hosts of an elastic job change")
        return flat
    node_size = config.node_size or _declaration.node_size or launched.local_size
    topology = Topology(collectives.rank, workers, node_size)
    problem = (
        _problem(topology, config, launched)
        or ("" if averages else "gradients are summed, and nodes need op=Average")
        or hindrance
    )
    if not (problem or wanted):
        problem = loss_by_nodes(specs, config, topology, speed)
    own = json.dumps([topology.node_size, problem]).encode()
    found = [json.loads(data) for data in collectives.gather_bytes(own, "nodes")]
    sizes, problems = [each[0] for each in found], [each[1] for each in found if each[1]]
    if len(set(sizes)) > 1:
        problems.insert(0, "nodes have different numbers of workers")
    if not problems:
        return topology
    if collectives.rank == 0 and (wanted or all(1 < size < workers for size in sizes)):
        _tell(logging.WARNING if wanted else logging.INFO, problems[0])
    return flat


def _tell(level: int, problem: str) -> None:
    _log.log(level, "dgc_horovod: no hierarchical exchange, every worker sends to every other: %s", problem)


def _problem(topology: Topology, config: DGCConfig, launched: Launched) -> str:
    """Return why this rank cannot use a hierarchical exchange; "" if it can."""
    if found := problem_of(topology):
        return found
    if topology.workers != launched.size:
        return "the optimizer's process set has only some of the ranks"
    expected = launched.cross_rank * launched.local_size + launched.local_rank
    if config.node_size is None and topology.node_size == launched.local_size and launched.rank != expected:
        return "ranks are not numbered node by node (use mpirun --map-by slot)"
    if launched.has_group(topology.inside) and launched.has_group(topology.between):
        return ""
    if _declaration.node_size not in (0, topology.node_size):
        return (
            f"process sets were declared for nodes of {_declaration.node_size} workers, but "
            f"node_size={config.node_size}"
        )
    return _UNDECLARED


def meet_at_exit(meet: Callable[[], object]) -> None:
    """Make this process wait for all other ranks at its exit.

    The first rank that exits shuts Horovod down on all ranks. The last round of a step, inside a node, does not wait
    for other nodes, which may still be in it.

    Args:
        meet: function that returns once all ranks have called it, or raises after `LAST_STEP_SECONDS`.
    """
    atexit.unregister(_meet)  # the last registered runs first, and every hvd.init() registers its own shutdown
    atexit.register(_meet, meet)


def _meet(meet: Callable[[], object]) -> None:
    # after a failure do not wait: the other ranks must see it at once
    if getattr(sys, "last_value", None) is None and not leaving.has_given_up.is_set():
        with contextlib.suppress(Exception):  # Horovod has been shut down, or a rank did not come
            meet()
