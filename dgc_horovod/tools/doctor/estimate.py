"""Does it pay? A step with dense fp32, with fp16 and with compression on one number of workers (`planning`)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dgc_horovod.config import AUTO, FLAT, HIERARCHICAL, DGCConfig
from dgc_horovod.core.budget import HOST_SPEED, loss_by_nodes, within_budget
from dgc_horovod.errors import ConfigError
from dgc_horovod.exchange.hierarchical import Topology, problem_of
from dgc_horovod.launch.settings import Job
from dgc_horovod.planning import cost_model
from dgc_horovod.planning.cluster import Cluster, Link, Machine
from dgc_horovod.planning.cost_model import DENSE, FP16, Cost
from dgc_horovod.tools.plan.command import node_size_of, number
from dgc_horovod.tools.plan.shapes import parse_size, tensors
from dgc_horovod.tools.plan.show import duration, size

_PAYS, _NO_GAIN = 1.1, 0.97


@dataclass(frozen=True)
class Estimate:
    """The question: a model, a step, a number of workers, and their hosts.

    Args:
        elements: number of elements of the model, n >= 1.
        step_seconds: seconds of one step on one worker without any exchange, T, > 0 and finite.
        workers: N, those of two hosts or more.
        link_bits: bits a second of the slowest host's link, B, > 0 and finite; None: to be measured.
        node_size: workers of a host, which share its card, G >= 1, a divisor of N.
        gloo: whether allreduces are made as Gloo makes them on a CPU.
        mpi: whether workers negotiate along MPI's trees.
    """

    elements: int
    step_seconds: float
    workers: int
    link_bits: float | None
    node_size: int = 1
    gloo: bool = False
    mpi: bool = False

    def __post_init__(self) -> None:
        if self.workers < 2:
            raise ConfigError(f"-np must be at least 2 here, got {self.workers}: one worker exchanges nothing")
        if self.node_size < 1 or self.workers % self.node_size or self.workers == self.node_size:
            raise ConfigError(
                f"-np must fill two hosts or more, got {self.workers} workers on hosts of {self.node_size}; give "
                f"{2 * self.node_size or 2}, or another multiple of the workers of a host (-H, --workers-per-node)"
            )

    @property
    def machine(self) -> Machine:
        """A worker with default times."""
        machine = Machine(self.step_seconds)
        return machine.over_gloo() if self.gloo else machine


def asked(args: Namespace, job: Job) -> Estimate | None:
    """Return the question of the command line; None: there is none.

    Args:
        args: Horovod's parsed arguments, with ours.
        job: resolved settings of the job.

    Raises:
        ConfigError: something is missing or wrong.
    """
    if not (args.model_size or args.step_ms or args.link_gbps or args.workers_per_node):
        return None
    elements = parse_size(args.model_size) if args.model_size else 0
    milliseconds = number("--step-ms", args.step_ms) if args.step_ms else 0.0
    link = number("--link-gbps", args.link_gbps) * 1e9 if args.link_gbps else None
    if not (elements and milliseconds and args.num_proc):
        raise ConfigError(
            "--model-size, --step-ms and -np go together, e.g. dgcrun --doctor --model-size 25.6M --step-ms 180 -np 16"
        )
    node_size = node_size_of(args, job.config)
    gloo, mpi = bool(args.use_gloo), bool(args.use_mpi)
    return Estimate(elements, milliseconds / 1000, args.num_proc, link, node_size, gloo, mpi)


def exchange_of(estimate: Estimate, config: DGCConfig) -> str:
    """Return the exchange of a job; for "auto" the one that it chooses by bytes (`core.budget`).

    Args:
        estimate: model and hosts.
        config: compression settings.
    """
    if config.exchange != AUTO:
        return config.exchange
    specs, hosts = tensors(estimate.elements, config), Topology(0, estimate.workers, estimate.node_size)
    without_nodes = problem_of(hosts) or loss_by_nodes(specs, config, hosts, HOST_SPEED)
    chosen = within_budget(specs, config, Topology(0, estimate.workers) if without_nodes else hosts).exchange
    return chosen if chosen != AUTO else FLAT if without_nodes else HIERARCHICAL


def price(estimate: Estimate, config: DGCConfig, method: str, machine: Machine) -> list[Cost]:
    """Return the costs of dense fp32, of fp16, and of the method without and with overlap of computing.

    Args:
        estimate: model, step and link, the link known.
        config: compression settings.
        method: name of the method, for the table.
        machine: seconds of a worker.
    """
    assert estimate.link_bits is not None
    specs, exchange = tensors(estimate.elements, config), exchange_of(estimate, config)
    cluster = Cluster(estimate.workers, Link(estimate.link_bits), estimate.node_size, mpi=estimate.mpi)

    def of(name: str, machine: Machine) -> Cost:
        return cost_model.cost(name, specs, config, cluster, machine)

    alone, overlapped = of(exchange, replace(machine, overlap=0.0)), of(exchange, machine)
    return [
        replace(of(DENSE, machine), name="dense fp32"),
        replace(of(FP16, machine), name="dense fp16"),
        replace(alone, name=f"{method}, density {alone.density:g}"),
        replace(overlapped, name="  with overlap"),
    ]


def verdict(rows: Sequence[Cost]) -> str:
    """Return one line on `price`'s rows.

    It pays if compression without overlap is at least 1.1 times as fast as both others with; it does not if even with
    overlap it gains less than 3% over the better of them.
    """
    fp32, fp16, alone, overlapped = (row.step_seconds for row in rows)
    best, name = min((fp32, rows[0].name), (fp16, rows[1].name))
    if best >= _PAYS * alone:
        return f"pays: {fp32 / alone:.1f}x faster steps than with dense fp32, {fp16 / alone:.1f}x than with fp16"
    if overlapped > _NO_GAIN * best:
        return f"do not use it: a step takes {duration(overlapped)} at best, with {name} {duration(best)}"
    return f"may pay; measure it: {best / alone:.2f}x to {best / overlapped:.2f}x the speed of {name}"


def show(estimate: Estimate, config: DGCConfig, rows: Sequence[Cost]) -> str:
    """Return the question, the table of `price`'s rows, and the verdict, as text."""
    assert estimate.link_bits is not None
    lines = [
        f"{estimate.elements:,} elements, {estimate.workers} workers, {duration(estimate.step_seconds)} of computing a "
        f"step, link {estimate.link_bits / 1e9:.3g} Gbit/s",
        *_ways(estimate, config),
        "",
        f"{'':26}{'through a link':>15}{'exchange':>12}{'compress':>11}{'step':>12}{'speed-up':>10}{'scaling':>9}",
    ]
    for row in rows:
        gain = rows[0].step_seconds / row.step_seconds
        compress = duration(row.cpu_seconds) if row.cpu_seconds else ""
        times = f"{duration(row.network_seconds):>12}{compress:>11}{duration(row.step_seconds):>12}"
        lines.append(f"{row.name:26}{size(row.card_bytes):>15}{times}{f'{gain:.2f}x':>10}{row.efficiency:>9.0%}")
    notes = [
        "Compress was measured just now on one CPU thread of this machine. The dense rows and the last one",
        "hide exchange behind up to 2/3 of the computing. Scaling: computing divided by the whole step.",
    ]
    budget = config.max_bytes_per_step
    if budget is not None and rows[2].card_bytes > budget:
        notes.append(f"Compressed, a card gets more than the budget of {size(budget)} (docs/planning.md).")
    return "\n".join([*lines, *notes, "", verdict(rows)])


def _ways(estimate: Estimate, config: DGCConfig) -> list[str]:
    """Return lines on the exchange, and the places of the workers."""
    exchange, workers = exchange_of(estimate, config), estimate.node_size
    over = ("; dense and fp16 as Gloo adds on a CPU" if estimate.gloo else "") + ("; over MPI" if estimate.mpi else "")
    lines = [f"exchange {exchange}, {workers} worker{'s' * (workers > 1)} behind a link{over}"]
    if workers == 1 and config.wants_nodes:
        lines.append("so there are no nodes: name the hosts with -H a:8,b:8, or pass --workers-per-node 8")
    return lines
