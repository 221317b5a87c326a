"""Does it pay? Time of a step with dense fp32, with fp16 and with compression, before anything is trained.

n elements, N workers, T seconds of computing a step, a link of B bits a second::

    bytes    through one host's link, in and out alike: dense 2*(N-1)/N * 4n, fp16 half of it, compressed (N-1)*p
    exchange 8 * bytes / (0.89 * B) + 1 ms, one cycle of Horovod
    step     T + compress + exchange, less what of the exchange hides behind the backward pass

* p is the size of a rank's packets of all buckets, as `PacketFormat` gives it. 0.2% of the elements count as biases and
  norms, ResNet-50's share, and go as ``dense_values`` says. Where `exchange.choose` densifies, a bucket costs what it
  costs dense. A ring of ranks in host order crosses each link once in each direction, however many ranks a host has.
* 0.89 is the least of five models' dense steps between two hosts at 1 Gbps over Gloo (docs/benchmarks-network.md):
  VGG-16 4,427 ms on the bare link and 4,985 measured; ResNet-50 818 and 905, or 0.90. Packets are taken to reach the
  same share.
* Up to 2/3 of T of the exchange hide for dense and fp16; for compression nothing, or in a row of its own as much.
* Compress is select, encode, decode and add: measured here with normal gradients, by native kernels on one CPU thread.

What it leaves out: N-1 times the latency, the density warm-up, ranks that wait for the slowest, switches that are
shared, copies that a framework forces (docs/benchmarks-kernels.md, Adapters), kernels on a GPU. fp16's conversion is
taken as free; measured over Gloo, fp16 gained less: ResNet-50 took 654 ms, VGG-16 longer than in fp32.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np

from dgc_horovod.config import DGCConfig
from dgc_horovod.core import bucketing
from dgc_horovod.core.budget import card_bytes
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.errors import ConfigError
from dgc_horovod.exchange.in_process import carry
from dgc_horovod.exchange.topology import Topology
from dgc_horovod.kernels import registry
from dgc_horovod.kernels.contract import ErrorFeedback, MomentumCorrection
from dgc_horovod.stats import Traffic
from dgc_horovod.wire.bucket import Bucket, Segment

_REACHED = 0.89  # of the link
_CYCLE_SECONDS = 1e-3
_HIDDEN = 2 / 3  # of T
_SMALL = 0.002  # of the elements
_PAYS, _NO_GAIN = 1.1, 0.97
_MEASURED_ELEMENTS, _WARM_UP_STEPS, _STEPS, _DIFFERENT_PACKETS = 16 * 2**20, 10, 5, 4
_LARGEST_TENSOR = 2**30
_SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}


@dataclass(frozen=True)
class Plan:
    """What a step is like.

    Args:
        elements: number of elements of the model, n >= 1.
        step_seconds: seconds of one step on one worker without any exchange, T, > 0 and finite.
        workers: N >= 2.
        link_bits: bits a second of the slowest host's link, B, > 0 and finite; None: to be measured.
    """

    elements: int
    step_seconds: float
    workers: int
    link_bits: float | None

    def __post_init__(self) -> None:
        if self.elements < 1:
            raise ConfigError(f"--model-size must be at least 1 element, got {self.elements}")
        if not 0 < self.step_seconds < math.inf:
            raise ConfigError(
                f"--step-ms must be positive, got {1e3 * self.step_seconds:g}; it is the time of one step on one "
                "worker without any exchange"
            )
        if self.workers < 2:
            raise ConfigError(f"-np must be at least 2 here, got {self.workers}: one worker exchanges nothing")
        if self.link_bits is not None and not 0 < self.link_bits < math.inf:
            raise ConfigError(f"--link-gbps must be positive, got {self.link_bits / 1e9:g}")


class Row(NamedTuple):
    """One way to exchange gradients: bytes through a host's link, and seconds of a step's parts and of it all."""

    name: str
    nbytes: int
    exchange: float
    compress: float
    step: float


def parse_size(text: str) -> int:
    """A number of elements: ``25.6M`` -> 25600000. K, M, and G or B; plain numbers too.

    Raises:
        ConfigError: it is no such number, not whole, or below 1.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGB]?)", text.strip().upper())
    size = Decimal(found[1]) * _SIZES[found[2]] if found else Decimal(0)
    if size < 1 or size != int(size):
        raise ConfigError(
            f"--model-size must be a whole number of elements, at least 1, such as 25.6M, 350K, 1.3B or 25557032, "
            f"got {text!r}"
        )
    return int(size)


def link_bytes(elements: int, config: DGCConfig, workers: int) -> int:
    """Bytes that pass a host's link in each direction at a step, compressed, after the warm-up.

    Args:
        elements: number of elements of the model, n >= 1.
        config: compression settings.
        workers: N >= 1.
    """
    return card_bytes(_tensors(elements, config), config, Topology(0, workers))


def _tensors(elements: int, config: DGCConfig) -> list[bucketing.TensorSpec]:
    """Matrices that fill a bucket each, and one vector."""
    small = round(_SMALL * elements)
    most = min(max(config.bucket_bytes // 4, 2**20), _LARGEST_TENSOR)
    starts = range(0, elements - small, most)
    matrices = [bucketing.TensorSpec(f"weight{i}", (1, min(most, elements - small - i))) for i in starts]
    return [bucketing.TensorSpec("biases", (small,)), *matrices]


def measure_compress(elements: int, config: DGCConfig, workers: int) -> float:
    """Seconds that this machine takes to compress a step and to decode what N workers sent.

    It runs the engine on a bucket of at most 16 Mi elements and scales linearly. Memory: 17 bytes an element of it.

    Args:
        elements: number of elements of the model, n >= 1.
        config: compression settings.
        workers: N >= 1.
    """
    numel = min(elements, _MEASURED_ELEMENTS)
    kernels = registry.choose("cpu", threads=1)
    bucket = Bucket(0, (Segment("weight", 0, numel),))
    engine = BucketEngine(bucket, config, kernels, 0, workers)
    engine.outputs.put(0, kernels.new(numel))
    compress, payloads = _steps(engine, numel)
    # as if the ranks had sent what this one has sent in several tries at the same step
    buffers, exchange = [payloads[rank % len(payloads)] for rank in range(workers)], engine.exchange
    received: list[np.ndarray] = []
    for number, collective in enumerate(exchange.rounds):
        received.append(carry(collective, buffers)[0])
        buffer = exchange.proceed(number, received[-1], 1)
        buffers = [] if buffer is None else [buffer.copy()] * workers

    def decode() -> None:
        exchange.rollback()
        for number, each in enumerate(received):
            exchange.proceed(number, each, 1)
        engine.aggregate_into(1 / workers)

    return (compress + statistics.median(_seconds(decode) for _ in range(3))) * elements / numel


def _steps(engine: BucketEngine, numel: int) -> tuple[float, list[np.ndarray]]:
    """Median seconds of a compress once the selection moves slowly, and the last messages."""
    random = np.random.default_rng(0)
    noise = random.standard_normal(numel + 2**16, dtype=np.float32)
    accumulation = MomentumCorrection(0.9) if engine.config.momentum_correction else ErrorFeedback()
    times: list[float] = []
    payloads: deque[np.ndarray] = deque(maxlen=_DIFFERENT_PACKETS)
    for _ in range(_WARM_UP_STEPS + _STEPS):
        start = int(random.integers(2**16))
        engine.add_gradient(0, engine.kernels.from_host(noise[start : start + numel]), accumulation)
        times.append(_seconds(lambda: payloads.append(engine.compress(1.0, 1, engine.config.final_density).payload)))
        payloads[-1] = payloads[-1].copy()
    return statistics.median(times[_WARM_UP_STEPS:]), list(payloads)


def _seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def price(plan: Plan, config: DGCConfig, method: str, compress_seconds: float) -> list[Row]:
    """The rows: dense fp32, fp16, the method without any overlap, and with as much as dense.

    Args:
        plan: model, step and link, the link known.
        config: compression settings.
        method: name of the method, for the table.
        compress_seconds: seconds of compression and decoding in a step, from `measure_compress`.
    """
    assert plan.link_bits is not None
    fp32, compressed = Traffic(), link_bytes(plan.elements, config, plan.workers)
    fp32.count_allreduce(4 * plan.elements, plan.workers)
    hidden = _HIDDEN * plan.step_seconds
    name = f"{method}, density {config.final_density:g}"
    # with a norm to clip at, every gradient must be there before the first message leaves
    overlap = 0.0 if config.clip_norm else hidden
    rows = [
        ("dense fp32", fp32.received, 0.0, hidden),
        ("dense fp16", fp32.received // 2, 0.0, hidden),
        (name, compressed, compress_seconds, 0.0),
        ("  with overlap", compressed, compress_seconds, overlap),
    ]
    return [_row(plan, plan.link_bits, *row) for row in rows]


def _row(plan: Plan, link_bits: float, name: str, nbytes: int, compress: float, hidden: float) -> Row:
    exchange = 8 * nbytes / (_REACHED * link_bits) + _CYCLE_SECONDS
    return Row(name, nbytes, exchange, compress, plan.step_seconds + compress + max(0.0, exchange - hidden))


def verdict(rows: Sequence[Row]) -> str:
    """One line on `price`'s rows.

    It pays if compression without overlap is at least 1.1 times as fast as both others with; it does not if even with
    overlap it gains less than 3% over the better of them.
    """
    fp32, fp16, alone, overlapped = (row.step for row in rows)
    best, name = min((fp32, rows[0].name), (fp16, rows[1].name))
    if best >= _PAYS * alone:
        return f"pays: {fp32 / alone:.1f}x faster steps than with dense fp32, {fp16 / alone:.1f}x than with fp16"
    if overlapped > _NO_GAIN * best:
        return f"do not use it: a step takes {_ms(overlapped)} at best, with {name} {_ms(best)}"
    return f"may pay; measure it: {best / alone:.2f}x to {best / overlapped:.2f}x the speed of {name}"


def show(plan: Plan, rows: Sequence[Row]) -> str:
    """The table of `price`'s rows, and the verdict."""
    assert plan.link_bits is not None
    lines = [
        f"{plan.elements:,} elements, {plan.workers} workers, {_ms(plan.step_seconds)} of computing a step, "
        f"link {plan.link_bits / 1e9:.3g} Gbit/s",
        "",
        f"{'':26}{'through a link':>15}{'exchange':>12}{'compress':>11}{'step':>12}{'speed-up':>10}{'scaling':>9}",
    ]
    for row in rows:
        gain, scaling = rows[0].step / row.step, plan.step_seconds / row.step
        times = f"{_ms(row.exchange):>12}{_ms(row.compress) if row.compress else '':>11}{_ms(row.step):>12}"
        lines.append(f"{row.name:26}{_size(row.nbytes):>15}{times}{f'{gain:.2f}x':>10}{scaling:>9.0%}")
    notes = [
        "Compress was measured just now on one CPU thread of this machine. The dense rows and the last one",
        "hide exchange behind up to 2/3 of the computing. Scaling: computing divided by the whole step.",
    ]
    return "\n".join([*lines, *notes, "", verdict(rows)])


def _ms(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:,.1f} s"
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.02 else f"{1e3 * seconds:.1f} ms"


def _size(nbytes: int) -> str:
    unit, name = next(((u, n) for u, n in ((10**9, "GB"), (10**6, "MB")) if nbytes >= u), (10**3, "kB"))
    return f"{nbytes / unit:,.1f} {name}"
