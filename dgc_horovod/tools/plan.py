"""``dgcrun --plan``: the cost of a step by every method on 2 to 1,024 workers, and the method to take.

It is made from the flags, the size of a model, and the seconds that this machine needs for compression.
"""

from __future__ import annotations

import re
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from dgc_horovod import envvars, settings
from dgc_horovod.compression import PRESETS
from dgc_horovod.config import FLAT, HIERARCHICAL, DGCConfig
from dgc_horovod.core.bucketing import LEAST_DENSITY, TensorSpec
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.errors import ConfigError
from dgc_horovod.exchange.contract import carry
from dgc_horovod.kernels import registry
from dgc_horovod.kernels.contract import ErrorFeedback, MomentumCorrection
from dgc_horovod.launch.settings import Job
from dgc_horovod.planning.cluster import Cluster, Link, Machine
from dgc_horovod.planning.cost_model import DENSE, EXCHANGES, FP16, METHODS, Cost, cost
from dgc_horovod.planning.trial import fitted, is_too_short
from dgc_horovod.stats import size
from dgc_horovod.wire.bucket import Bucket, Segment

_EXAMPLE = "dgcrun --plan --model-size 25.6M --step-ms 180 --link-gbps 1"
# Results of such numbers are finite
_POSITIVE = settings.in_range("a number from 1e-9 to 1e9", lambda value: 1e-9 <= value <= 1e9)
_LATENCY = settings.in_range("a number from 0 to 1e9", lambda value: 0 <= value <= 1e9)
_SMALL = 0.002  # of the elements are biases and norms: ResNet-50's share
_LARGEST_TENSOR = 2**30
_MOST_ELEMENTS, _MOST_TENSORS = 10**12, 1000  # each tensor is priced by every method and number of workers
_MEASURED_ELEMENTS, _WARM_UP_STEPS, _STEPS, _DECODES, _DIFFERENT_PACKETS = 16 * 2**20, 10, 7, 5, 4
_FEW, _MANY = 2, 32  # workers whose packets are decoded


def run(args: Namespace, job: Job) -> int:
    """Print the plan; returns 0.

    Args:
        args: Horovod's parsed arguments, with ours.
        job: resolved settings of the job; without compression those of dgc.

    Raises:
        ConfigError: something is missing or wrong.
    """
    if not (args.step_ms and args.link_gbps and args.model_size):
        raise ConfigError(f"--plan needs --step-ms, --link-gbps and --model-size, e.g. {_EXAMPLE}")
    config = _priced(job)
    envvars.put_into_environment({envvars.BACKEND.name: job.get(envvars.BACKEND)})
    computing, cluster = settings.read("--step-ms", args.step_ms, _POSITIVE) / 1e3, _cluster(args, config)
    elements = parse_size(args.model_size)
    machine = Machine(computing).over_gloo() if args.use_gloo else Machine(computing)
    machine = measured(machine, elements, config)
    found = table(tensors(elements, config), config, cluster, machine)
    if not found:
        raise ConfigError(
            f"a plan is for two nodes or more and for at most {MOST_WORKERS:,} workers, which two nodes of "
            f"{cluster.node_size} are beyond; --workers-per-node may be at most {MOST_WORKERS // 2}"
        )
    notes = _notes(machine, elements)
    told = [_head(elements, computing, config, cluster), *_budget_of(config)]
    print("\n".join([*told, "", *verdicts(found), "", _text(found, config), "", *notes]))
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


def _cluster(args: Namespace, config: DGCConfig) -> Cluster:
    card = Link(settings.read("--link-gbps", args.link_gbps, _POSITIVE) * 1e9)
    if args.latency_ms:
        card = replace(card, latency=settings.read("--latency-ms", args.latency_ms, _LATENCY) / 1e3)
    node_size = _node_size(args, config)
    return Cluster(node_size, card, node_size, mpi=bool(args.use_mpi))


def _node_size(args: Namespace, config: DGCConfig) -> int:
    """Return the workers behind a card: --workers-per-node, else node_size, or 1.

    Args:
        args: Horovod's parsed arguments, with ours.
        config: settings to price.

    Raises:
        ConfigError: there is no such number, or a node would be only a part of a host.
    """
    given, nodes = args.workers_per_node, config.node_size if config.may_use_nodes else None
    if not given:
        return nodes or 1
    workers: int = settings.read("--workers-per-node", given, settings.whole(1))
    if nodes not in (None, workers):
        raise ConfigError(
            f"node_size is {nodes}, and a host has {workers} workers; a node is priced as all workers of a host, so "
            "leave one of the two out"
        )
    return workers


def _notes(machine: Machine, elements: int) -> list[str]:
    compress = 1e3 * machine.compress * elements
    return [
        "* the method to take. Dense and fp16 are stock Horovod, as fast as the link; with --gloo as Gloo on a CPU.",
        "PowerSGD is torch DDP's, of rank 1.",
        f"Compressing ({compress:.0f} ms a step for all elements) was measured just now, on one CPU thread.",
        "Sharded exchanges, like a lower density, cost some quality. docs/planning.md: equations, and their errors.",
    ]


# -- the size of a model


def parse_size(text: str) -> int:
    """Parse a number of elements: ``25.6M`` -> 25600000. K, M, and G or B; plain numbers too.

    Raises:
        ConfigError: it is no such number, not whole, below 1, or above a million million.
    """
    must = f"a whole number of elements, from 1 to {_MOST_ELEMENTS // 10**9}B, such as 25.6M, 350K, 1.3B or 25557032"
    billions = re.sub("[bB]$", "G", text.strip())
    kind = settings.Kind("", must, settings.read_size, must, lambda size: 1 <= size <= _MOST_ELEMENTS, int)
    size: int = settings.read("--model-size", billions, kind)
    return size


def tensors(elements: int, config: DGCConfig) -> list[TensorSpec]:
    """Return shapes that stand for a model, of which only the size is known: square matrices, and one vector.

    Args:
        elements: number of elements of the model, n >= 1.
        config: compression settings; a matrix fills a bucket, or is larger if there would be more than 1,000.
    """
    small = round(_SMALL * elements)
    most = min(max(config.bucket_bytes // 4, 2**20, -(-elements // _MOST_TENSORS)), _LARGEST_TENSOR)
    matrices = [
        TensorSpec(f"weight{start}", _nearly_square(min(most, elements - small - start)))
        for start in range(0, elements - small, most)
    ]
    return [TensorSpec("biases", (small,)), *matrices]


def _nearly_square(numel: int) -> tuple[int, int]:
    rows = next(rows for rows in range(int(numel**0.5), 0, -1) if numel % rows == 0)
    return rows, numel // rows


# -- the seconds of this machine


def measured(machine: Machine, elements: int, config: DGCConfig) -> Machine:
    """Return `machine` with the seconds of compression and decoding of this one, on one thread by native kernels.

    The engine runs on a bucket of at most 16 Mi elements; the least of several times counts, since other programs only
    lengthen them. Memory: 17 bytes an element of the bucket.

    Args:
        machine: other times of a worker.
        elements: number of elements of the model, n >= 1.
        config: compression settings; the result holds for their density.
    """
    numel = min(elements, _MEASURED_ELEMENTS)
    config = config.replace(exchange=FLAT)
    (compress, few), (_, many) = (_of_workers(numel, config, workers) for workers in (_FEW, _MANY))
    sent = config.density * numel  # of each worker; beyond some density they are added up on the way instead
    decode = max(0.0, many - few) / ((_MANY - _FEW) * sent)
    update = max(0.0, few - _FEW * sent * decode) / numel
    return replace(machine, compress=compress / numel, encode=0.0, decode=decode, update=update)


def _of_workers(numel: int, config: DGCConfig, workers: int) -> tuple[float, float]:
    """Return the seconds to compress a step, and to decode the packets of N workers."""
    kernels = registry.choose("cpu", threads=1)
    engine = BucketEngine(Bucket(0, (Segment("weight", 0, numel),)), config, kernels, 0, workers)
    engine.outputs.put(0, kernels.new(numel))
    compress, payloads = _steps(engine, numel)
    # messages of this rank in several tries at the same step stand for those of N ranks
    buffers, exchange = [payloads[rank % len(payloads)] for rank in range(workers)], engine.exchange
    received = [carry(collective, buffers)[0] for collective in exchange.rounds]

    def decode() -> None:
        exchange.rollback()
        for number, each in enumerate(received):
            exchange.proceed(number, each, 1)
        engine.aggregate_into(1 / workers)

    return compress, min(_seconds(decode) for _ in range(_DECODES))


def _steps(engine: BucketEngine, numel: int) -> tuple[float, list[np.ndarray]]:
    """Return the least seconds of a compress after some steps, and the last messages."""
    random = np.random.default_rng(0)
    noise = random.standard_normal(numel + 2**16, dtype=np.float32)
    accumulation = MomentumCorrection(0.9) if engine.config.momentum_correction else ErrorFeedback()
    times: list[float] = []
    payloads: deque[np.ndarray] = deque(maxlen=_DIFFERENT_PACKETS)
    for _ in range(_WARM_UP_STEPS + _STEPS):
        start = int(random.integers(2**16))
        engine.add_gradient(0, engine.kernels.from_host(noise[start : start + numel]), accumulation)
        times.append(_seconds(lambda: payloads.append(engine.compress(1.0, 1, engine.config.density).payload)))
        payloads[-1] = payloads[-1].copy()
    return min(times[_WARM_UP_STEPS:]), list(payloads)


def _seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


# -- over the number of workers, as text

MOST_WORKERS = 1024
_WORTH = 1.1  # least speed over dense and fp16 at which compression is advised
_CLEARLY = 0.97  # most time of a more complicated exchange over a simpler one

Costs = Mapping[str, Cost]  # by name of the method
Table = Mapping[int, Costs]  # by number of workers


def table(specs: Sequence[TensorSpec], config: DGCConfig, cluster: Cluster, machine: Machine) -> Table:
    """Return the cost of every method for two nodes, four, eight, and so on, of at most 1,024 workers together.

    Args:
        specs, config, machine: see `cost_model.cost`.
        cluster: links, and the number of workers of a node; the number of all workers is not used.
    """
    methods = METHODS if cluster.node_size > 1 else [name for name in METHODS if not name.startswith(HIERARCHICAL)]
    return {
        workers: {name: cost(name, specs, config, replace(cluster, workers=workers), machine) for name in methods}
        for workers in worker_counts(cluster.node_size)
    }


def worker_counts(node_size: int) -> list[int]:
    """Return the numbers of workers of the plan: those of 2, 4, 8, ... nodes of `node_size` >= 1, at most 1,024."""
    return [node_size * 2**i for i in range(1, 11) if node_size * 2**i <= MOST_WORKERS]


def best(costs: Costs) -> Cost:
    """Return the exchange to take: of equal ones the simplest; dense or fp16 if compression gains less than a tenth."""
    plain = chosen = _plain(costs)
    for ours in (costs[name] for name in EXCHANGES if name in costs):
        if ours.step_seconds <= (plain.step_seconds / _WORTH if chosen is plain else _CLEARLY * chosen.step_seconds):
            chosen = ours
    return chosen


def _plain(costs: Costs) -> Cost:
    """Return the better of dense and fp16."""
    return min(costs[DENSE], costs[FP16], key=lambda each: each.step_seconds)


def ranges(found: Table) -> list[tuple[int, int, str]]:
    """Return the ranges of the number of workers, each with the method to take: first, last, name."""
    each = [(name, list(group)) for name, group in groupby(found, lambda workers: best(found[workers]).name)]
    return [(workers[0], workers[-1], name) for name, workers in each]


_BLOCKS: tuple[tuple[str, Callable[[Cost], float]], ...] = (
    ("time of a step, ms", lambda each: 1e3 * each.step_seconds),
    ("efficiency, % of N times one worker", lambda each: 100 * each.efficiency),
    ("into a network card, MB a step", lambda each: each.card_bytes / 1e6),
    ("memory of a worker beside weights and gradients, MB", lambda each: each.memory_bytes / 1e6),
)
_DENSITY: tuple[str, Callable[[Cost], float]] = ("density, within the budget", lambda each: each.density)


def verdicts(found: Table) -> list[str]:
    """Return a line for each range of N: the method to take, and its gain."""
    lines = []
    for low, high, name in ranges(found):
        where = f"N = {low:,}" if low == high else f"N = {low:,} to {high:,}"
        compared = [(_plain(costs), best(costs)) for workers, costs in found.items() if low <= workers <= high]
        gains = [plain.step_seconds / chosen.step_seconds for plain, chosen in compared]
        gain = " to ".join(dict.fromkeys(f"{each:.1f}" for each in (min(gains), max(gains))))  # once if they read alike
        if name in (DENSE, FP16):
            lines.append(f"{where}: {name}; compression gains less than a tenth")
        else:
            lines.append(f"{where}: --dgc-exchange {name}, {gain} times as fast as the better of dense and fp16")
    return lines


def _text(found: Table, config: DGCConfig) -> str:
    """Return tables of time, efficiency, bytes and memory, with a budget density; the method to take is marked."""
    names = [name for name in METHODS if any(name in costs for costs in found.values())]
    blocks = []
    for title, value in _BLOCKS if config.max_bytes_per_step is None else (*_BLOCKS, _DENSITY):
        lines = [title, f"{'N':>8}" + "".join(f"{name.replace('hierarchical+', 'hier.+'):>15}" for name in names)]
        for workers, costs in found.items():
            chosen = best(costs).name
            cells = [f"{_shown(value(costs[name])):>14}{'*' if name == chosen else ' '}" for name in names]
            lines.append(f"{workers:>8,}" + "".join(cells))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _budget_of(config: DGCConfig) -> list[str]:
    """Return lines on the budget, if there is one."""
    if config.max_bytes_per_step is None:
        return []
    return [
        f"budget: {size(config.max_bytes_per_step)} a step into a network card; the last table has the densities.",
        f"A card may get more: small tensors are sent dense, the lowest density is {LEAST_DENSITY:g}, and sharded",
        "workers that share a card without being a node have a budget each.",
    ]


def _shown(number: float) -> str:
    return f"{number:,.0f}" if 10 <= number < 1e10 else f"{number:.2g}"


def _head(elements: int, computing: float, config: DGCConfig, cluster: Cluster) -> str:
    """Return a line on the model, the step, the density and the link."""
    card, workers = cluster.card, f"{cluster.node_size} worker{'s' * (cluster.node_size > 1)}"
    link = f"{workers} a card of {card.bits / 1e9:.3g} Gbit/s, {1e3 * card.latency:g} ms"
    density = f"density {'' if config.max_bytes_per_step is None else 'up to '}{config.density:g}"
    return f"{elements / 1e6:,.4g} M elements, {1e3 * computing:,.4g} ms of computing a step, {density}, {link}"
