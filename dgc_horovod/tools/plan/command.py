"""``dgcrun --plan``: the cost of a step by every method on 2 to 1,024 workers, and the method to take."""

from __future__ import annotations

import math
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from dgc_horovod import envvars, settings
from dgc_horovod.compression import PRESETS
from dgc_horovod.config import DGCConfig
from dgc_horovod.core.bucketing import TensorSpec
from dgc_horovod.errors import ConfigError, shown
from dgc_horovod.launch import hosts
from dgc_horovod.launch.settings import Job
from dgc_horovod.planning.cluster import Cluster, Link, Machine
from dgc_horovod.planning.trial import fitted, is_too_short
from dgc_horovod.tools.plan import show
from dgc_horovod.tools.plan.measure import measured
from dgc_horovod.tools.plan.shapes import parse_size, shapes_of, tensors
from dgc_horovod.tools.plan.show import MOST_WORKERS, table

_EXAMPLE = "dgcrun --plan --model-size 25.6M --step-ms 180 --link-gbps 1"
_LEAST, _MOST = 1e-9, 1e9


def run(args: Namespace, job: Job) -> int:
    """Print the plan, and draw it if a file is named; returns 0.

    Args:
        args: Horovod's parsed arguments, with ours.
        job: resolved settings of the job; without compression those of dgc.

    Raises:
        ConfigError: something is missing or wrong.
    """
    if not (args.step_ms and args.link_gbps and bool(args.model_size) != bool(args.model)):
        raise ConfigError(f"--plan needs --step-ms, --link-gbps, and --model-size or --model, e.g. {_EXAMPLE}")
    if args.plot:
        show.check_file(Path(args.plot))
    config = _priced(job)
    envvars.put_into_environment({envvars.BACKEND.name: job.get(envvars.BACKEND)})
    computing, cluster = _number("--step-ms", args.step_ms) / 1e3, _cluster(args, config)
    specs = _specs(args, config)
    elements = sum(spec.numel for spec in specs)
    machine = Machine(computing).over_gloo() if args.use_gloo else Machine(computing)
    machine = measured(machine, elements, config)
    found = table(specs, config, cluster, machine)
    if not found:
        raise ConfigError(
            f"a plan is for two nodes or more and for at most {MOST_WORKERS:,} workers, which two nodes of "
            f"{cluster.node_size} are beyond; --workers-per-node may be at most {MOST_WORKERS // 2}"
        )
    title = show.head(elements, computing, config, _described(cluster))
    notes = [*show.beyond(found, config), *_notes(machine, elements)]
    told = [title, *show.budget_of(config)]
    print("\n".join([*told, "", *show.verdicts(found), "", show.text(found, config), "", *notes]))
    if args.plot:
        show.draw(found, title, Path(args.plot))
        print(f"drawn: {args.plot}")
    return 0


def _priced(job: Job) -> DGCConfig:
    """Return the settings to price: those of the job, or of dgc without compression; for auto with its density.

    Raises:
        ConfigError: it has local steps, or auto would compress nothing.
    """
    config = job.config or DGCConfig(**PRESETS["dgc"])
    if config.exchanges_weights:
        raise ConfigError(
            f"--plan prices an exchange at every step, and local steps exchange every {config.local_steps} steps; "
            "leave local steps out"
        )
    if config.automatic and config.total_steps is not None and is_too_short(config.total_steps):
        raise ConfigError(
            f"auto stays with the uncompressed exchange in a run of {config.total_steps:,} steps, so --plan has no "
            "compression to price; leave --dgc-total-steps out, or pass --dgc"
        )
    return fitted(config)


def _number(flag: str, text: str, least: float = _LEAST) -> float:
    """Return the number of a flag; `least` <= number <= 1e9, so that results are finite.

    Raises:
        ConfigError: it is no such number.
    """
    try:
        value = settings.number(text)
    except ValueError:
        value = math.nan
    if not least <= value <= _MOST:
        raise ConfigError(f"{flag} must be a number from {least:g} to {_MOST:g}, got {text!r}")
    return value


def _specs(args: Namespace, config: DGCConfig) -> Sequence[TensorSpec]:
    if args.model:
        return shapes_of(args.model, hosts.interpreter_of(args.command) or sys.executable)
    return tensors(parse_size(args.model_size), config)


def _cluster(args: Namespace, config: DGCConfig) -> Cluster:
    latency = _number("--latency-ms", args.latency_ms, least=0.0) / 1e3 if args.latency_ms else Link.latency
    card = Link(_number("--link-gbps", args.link_gbps) * 1e9, latency)
    node_size = _node_size(args, config)
    return Cluster(node_size, card, node_size, mpi=bool(args.use_mpi))


def _node_size(args: Namespace, config: DGCConfig) -> int:
    """Return the workers behind a card: --workers-per-node, or those of each host if equal; else node_size, or 1.

    Args:
        args: Horovod's parsed arguments, with ours.
        config: settings to price.

    Raises:
        ConfigError: there is no such number, or a node would be only a part of a host.
    """
    nodes = config.node_size if config.may_use_nodes else None
    host = _workers_a_host(args)
    if host is not None and nodes not in (None, host):
        raise ConfigError(
            f"node_size is {nodes}, and a host has {host} workers; a node is priced as all workers of a host, so leave "
            "one of the two out"
        )
    return next((size for size in (host, nodes) if size is not None), 1)


def _workers_a_host(args: Namespace) -> int | None:
    if args.workers_per_node:
        if not re.fullmatch(r"0*[1-9]\d{0,8}", args.workers_per_node, re.ASCII):
            raise ConfigError(f"--workers-per-node must be a whole number >= 1, got {shown(args.workers_per_node)}")
        return int(args.workers_per_node)
    slots = set(hosts.sizes_of(args.hosts or ""))
    if len(slots) > 1:
        raise ConfigError(f"the hosts {args.hosts} have different numbers of workers; give --workers-per-node instead")
    return slots.pop() if slots else None


def _described(cluster: Cluster) -> str:
    link = f"{cluster.card.bits / 1e9:.3g} Gbit/s, {1e3 * cluster.card.latency:g} ms"
    return f"{cluster.node_size} worker{'s' * (cluster.node_size > 1)} a card of {link}"


def _notes(machine: Machine, elements: int) -> list[str]:
    compress = 1e3 * machine.compress * elements
    return [
        "* the method to take. Dense and fp16 are stock Horovod, as fast as the link; with --gloo as Gloo on a CPU.",
        "PowerSGD is torch DDP's, of rank 1.",
        f"Compressing ({compress:.0f} ms a step for all elements) was measured just now, on one CPU thread.",
        "Sharded exchanges, like a lower density, cost some quality. docs/planning.md: equations, and their errors.",
    ]
