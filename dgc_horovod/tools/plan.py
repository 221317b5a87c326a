"""``dgcrun --plan``: the cost of a step by every method on 2 to 1,024 workers, and the method to take.

What it is made from is here: the flags, the size of a model, the seconds that this machine needs for compression.
`plan_table` makes the table.
"""

from __future__ import annotations

import math
import re
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np

from dgc_horovod import envvars, settings
from dgc_horovod.compression import PRESETS
from dgc_horovod.config import FLAT, DGCConfig
from dgc_horovod.core.bucketing import TensorSpec
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.errors import ConfigError, shown
from dgc_horovod.exchange.contract import carry
from dgc_horovod.kernels import registry
from dgc_horovod.kernels.contract import ErrorFeedback, MomentumCorrection
from dgc_horovod.launch.settings import Job
from dgc_horovod.planning.cluster import Cluster, Link, Machine
from dgc_horovod.planning.trial import fitted, is_too_short
from dgc_horovod.tools import plan_table
from dgc_horovod.tools.plan_table import MOST_WORKERS, table
from dgc_horovod.wire.bucket import Bucket, Segment

_EXAMPLE = "dgcrun --plan --model-size 25.6M --step-ms 180 --link-gbps 1"
_LEAST, _MOST = 1e-9, 1e9
_SMALL = 0.002  # of the elements are biases and norms: ResNet-50's share
_LARGEST_TENSOR = 2**30
_MOST_ELEMENTS, _MOST_TENSORS = 10**12, 1000  # each tensor is priced by every method and number of workers
_SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}
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
    computing, cluster = _number("--step-ms", args.step_ms) / 1e3, _cluster(args, config)
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
    told = [plan_table.head(elements, computing, config, cluster), *plan_table.budget_of(config)]
    print("\n".join([*told, "", *plan_table.verdicts(found), "", plan_table.text(found, config), "", *notes]))
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


def _cluster(args: Namespace, config: DGCConfig) -> Cluster:
    latency = _number("--latency-ms", args.latency_ms, least=0.0) / 1e3 if args.latency_ms else Link.latency
    card = Link(_number("--link-gbps", args.link_gbps) * 1e9, latency)
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
    if not re.fullmatch(r"0*[1-9]\d{0,8}", given, re.ASCII):
        raise ConfigError(f"--workers-per-node must be a whole number >= 1, got {shown(given)}")
    if nodes not in (None, int(given)):
        raise ConfigError(
            f"node_size is {nodes}, and a host has {given} workers; a node is priced as all workers of a host, so "
            "leave one of the two out"
        )
    return int(given)


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
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGB]?)", text.strip().upper())
    size = Decimal(found[1]) * _SIZES[found[2]] if found else Decimal(0)
    if not 1 <= size <= _MOST_ELEMENTS or size != int(size):
        raise ConfigError(
            f"--model-size must be a whole number of elements, from 1 to {_MOST_ELEMENTS // 10**9}B, such as 25.6M, "
            f"350K, 1.3B or 25557032, got {text!r}"
        )
    return int(size)


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
