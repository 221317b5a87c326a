"""Checks that the Triton kernels give the bits of the NumPy reference: on a GPU, or under the interpreter.

Each check takes a `Size` and raises AssertionError. They need torch, Triton and NumPy, and no test runner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.transcript import DATA, FEEDS, Size, bucket_of, drawn, feed, transcript, update
from dgc_horovod import DGCConfig
from dgc_horovod.config import RULES
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.errors import CorruptPacket
from dgc_horovod.kernels.contract import ErrorFeedback
from dgc_horovod.kernels.reference import ReferenceKernels
from dgc_horovod.kernels.triton.kernels import TritonKernels
from dgc_horovod.wire.codecs import VALUE_CODECS

Check = Callable[[Size], None]
INTERPRETED = Size("cpu", (1, 63, 2049, 333, 1500), steps=4, ranks=2, long_run=5)
ON_DEVICE = Size("cuda", (1, 63, 40_961, 333, 300_003, 4096, 700_000), steps=6, ranks=2, long_run=1000)
SANITIZED = Size("cuda", (1, 63, 4097, 333, 9000), steps=3, ranks=2, long_run=3)


def _both(size: Size) -> tuple[TritonKernels, ReferenceKernels]:
    return TritonKernels(size.device), ReferenceKernels()


def _same(size: Size, config: DGCConfig, **how: Any) -> None:
    ours, reference = (transcript(kernels, config, size, **how) for kernels in _both(size))
    wrong = [i for i, (a, b) in enumerate(zip(ours, reference, strict=True)) if a != b]
    assert not wrong, f"{len(wrong)} of {len(reference)} vectors and packets differ, the first is number {wrong[0]}"


def _check(
    feeds: str = "momentum", data: str = "laplace", whole: bool = False, **fields: Any
) -> Callable[[Size], None]:
    """A check of whole steps, with these fields of the configuration."""
    config = DGCConfig(**{"density": 0.02, **fields})
    return lambda size: _same(size, config, feeds=FEEDS[feeds], data=data, whole=whole)


def densities(size: Size) -> None:
    """One element, nearly all of them, and what lies between."""
    for density in (1e-7, 0.001, 0.1, 0.4):
        _same(size, DGCConfig(density=density))


def denormals(size: Size) -> None:
    """Where there are divisions and products."""
    _same(size, DGCConfig(density=0.02), feeds=FEEDS["Adam"], data="denormal")
    _same(size, DGCConfig(density=0.02, values="8bit"), data="denormal")


def off_the_grid(size: Size) -> None:
    """Gradients and updates that begin anywhere in memory."""
    _same(size, DGCConfig(density=0.02), shift=1)
    _same(Size(size.device, (64, 4096, 8), size.steps, size.ranks, 0), DGCConfig(density=0.02))


def sharded(size: Size) -> None:
    """Owners, who add on the device and select from what they keep."""
    for density, values in ((0.05, "bf16"), (0.2, "4bit")):
        config, four = DGCConfig(density=density, values=values, exchange="sharded"), dataclasses.replace(size, ranks=4)
        engine = BucketEngine(bucket_of(four.numels), config, ReferenceKernels(), 0, four.ranks)
        assert engine.spec(density).exchange.keeps_remainder, "too small: another exchange brings fewer bytes"
        _same(four, config)


def the_device_does_it(size: Size) -> None:
    """In a steady run the host selects nothing: otherwise all of this would show nothing."""
    kernels, config, bucket = TritonKernels(size.device), DGCConfig(density=0.02), bucket_of(size.numels)
    engine, by_device = BucketEngine(bucket, config, kernels, 0, 1), []
    for step in range(14):
        feed(engine, drawn("laplace", bucket.numel, step))
        engine.compress(1.0, step, 0.02)
        by_device.append(type(engine._sent).__name__ == "DeviceSentRecord")
    # v grows from nothing at first, faster than thresholds follow
    assert sum(by_device[-8:]) >= 6, f"{sum(by_device[-8:])} of the last 8 steps"
    assert size.device == "cpu" or engine._workspace.sender._recorded._graph is not None, "nothing was recorded"


def under_way_together(size: Size) -> None:
    """Buckets on several streams, launched before the first message is taken; for some of them the host must choose."""
    config, bucket = DGCConfig(density=0.02), bucket_of(size.numels)
    kinds, not_finite, given_up = ("laplace", "few", "laplace", "ties"), (3, 2), 5
    both = [[BucketEngine(bucket, config, kernels, 0, 1) for _ in kinds] for kernels in _both(size)]
    by_device, streams = 0, [_stream(size.device) for _ in kinds]
    for step in range(7):
        said: list[list[bytes]] = []
        for engines in both:
            for number, (engine, kind) in enumerate(zip(engines, kinds, strict=True)):
                g = drawn(kind, bucket.numel, step, number)
                g[7] = np.nan if (step, number) == not_finite else g[7]
                with streams[number]:
                    feed(engine, g)
                    engine.begin_compress(1.0, step, 0.02)
            payloads = [engine.message().payload.tobytes() for engine in engines] if step != given_up else []
            by_device += sum(type(engine._sent).__name__ == "DeviceSentRecord" for engine in engines)
            for engine in engines:
                engine.commit() if payloads else engine.rollback()
            states = [
                engine.kernels.to_host(x).tobytes() for engine in engines for x in (engine.state.v, engine.state.u)
            ]
            said.append([*payloads, *states])
        assert said[0] == said[1], f"step {step}"
    assert by_device > 1, "the device made no step, so this shows nothing"


def _stream(device: str) -> AbstractContextManager[object]:
    """A stream of its own, after everything that the device has been given; without streams nothing."""
    if device == "cpu":
        return nullcontext()
    torch.cuda.synchronize()
    return torch.cuda.stream(torch.cuda.Stream())


def sums(size: Size) -> None:
    """Sums in the one fixed order, of all chunks and of some, with what is not finite as zero; and a bucket's norm."""
    ours, reference = _both(size)
    for numel in (1, 15, 4096, 4097, 40_000, 600_000):
        x = np.random.default_rng(numel).standard_normal(numel).astype(np.float32) * np.float32(1e10)
        x[numel // 2] = np.inf
        assert ours.sums(ours.from_host(x)) == reference.sums(x), numel
        assert ours.sampled_sums(ours.from_host(x)) == reference.sampled_sums(x), numel
    bucket = bucket_of(size.numels)
    gradients = ours.gradients(bucket), reference.gradients(bucket)
    for i, segment in enumerate(bucket.segments):
        g = np.random.default_rng(i).laplace(size=segment.numel).astype(np.float32)
        gradients[0].put(i, ours.from_host(g), ErrorFeedback())
        gradients[1].put(i, g, ErrorFeedback())
    assert gradients[0].squared_norm() == gradients[1].squared_norm()


def measurements(size: Size) -> None:
    """Sums of squares by rows and columns, and products with signs, of runs that begin and end anywhere."""
    ours, reference = _both(size)
    for numel, offset, width in ((1, 0, 1), (4097, 3000, 7), (9001, 50, 300), (40_000, 1000, 64), (70_000, 0, 3000)):
        rng = np.random.default_rng(numel)
        x, signs = rng.standard_normal(numel).astype(np.float32), rng.choice([-1, 1], 2 * width).astype(np.float32)
        (found,) = ours.fetch([ours.measure(ours.from_host(x), offset, ours.from_host(signs))])
        expected = reference.measure(x, offset, signs)
        assert np.allclose(found, expected, rtol=1e-4, atol=1e-4 * np.sqrt(numel)), (numel, offset, width)


def replicas(size: Size) -> None:
    """Four ranks, many steps: the updates are the same bits on all of them, and those of the reference."""
    config, ranks = DGCConfig(density=0.01, clip_norm=None), 4
    bucket = bucket_of(size.numels[:5])
    everyone = [[BucketEngine(bucket, config, kernels, r, ranks) for r in range(ranks)] for kernels in _both(size)]
    noise = np.random.default_rng(1).laplace(size=bucket.numel + 10_000).astype(np.float32)
    for step in range(size.long_run):
        updates = []
        for engines in everyone[: 2 if step < 50 else 1]:  # the reference is slow
            packets = []
            for rank, engine in enumerate(engines):
                start = (step * 613 + rank * 1777) % 10_000
                feed(engine, noise[start : start + bucket.numel])
                packets.append(engine.compress(1.0, step, 0.01).payload.copy())
            for engine in engines:
                assert engine.receive(np.concatenate(packets)) is None
                outputs = update(engine)
                assert engine.outcome.finite
                engine.commit()
                updates.append(b"".join(engine.kernels.to_host(target).tobytes() for target in outputs))
        assert len(set(updates)) == 1, f"step {step}"


def damaged_packets(size: Size) -> None:
    """Damage is found in the same packets as by the host's coder."""
    for values in VALUE_CODECS:
        config = DGCConfig(density=0.02, values=values)
        ours, reference = (BucketEngine(bucket_of(size.numels), config, kernels, 0, 1) for kernels in _both(size))
        packet = _packet_of(reference)
        _packet_of(ours)
        rng, refused = np.random.default_rng(7), 0
        for _ in range(200 if size.long_run > 100 else 12):
            changed = packet.copy()
            for at in rng.integers(36, packet.size, rng.integers(1, 4)):
                changed[at] ^= 1 << rng.integers(8)
            changed[32:36] = np.array([reference.kernels.coder.checksum(changed)], "<u4").view(np.uint8)
            verdicts = [_verdict(engine, changed) for engine in (ours, reference)]
            assert verdicts[0] == verdicts[1], (values, verdicts)
            refused += not isinstance(verdicts[0], bytes)
        assert refused, f"{values}: nothing was found, so this shows nothing"


def _packet_of(engine: BucketEngine) -> np.ndarray:
    for step in range(3):
        feed(engine, drawn("laplace", engine.bucket.numel, step))
        message = engine.compress(1.0, step, 0.02)
    return message.payload.copy()


def _verdict(engine: BucketEngine, packet: np.ndarray) -> bytes | str:
    """The elements of a packet, or that it is refused."""
    try:
        engine.receive(packet)
        update(engine)
    except CorruptPacket:
        return "refused"
    (elements,) = engine.exchange.contributions
    return elements.positions.tobytes() + elements.values.tobytes()


CHECKS: dict[str, Check] = {
    **{f"values {name}": _check(values=name) for name in VALUE_CODECS},
    **{f"feed {name}": _check(name) for name in FEEDS if name != "momentum"},  # what the others have
    **{f"data {name}": _check(data=name) for name in DATA if name != "laplace"},
    **{f"rule {name}": _check(rule=name, density=0.03) for name in RULES},
    "densities": densities,
    "denormals": denormals,
    "off the grid": off_the_grid,
    "sent whole": _check(values="8bit", whole=True),  # small tensors, in 8 bits
    "sharded": sharded,
    "without masking": _check(factor_masking=False),  # u stays
    "the device does it": the_device_does_it,
    "under way together": under_way_together,
    "damaged packets": damaged_packets,
    "sums": sums,
    "measurements": measurements,
    "replicas": replicas,
}


def run(name: str, size: Size) -> str:
    """The error of a check; "" if it passes."""
    try:
        CHECKS[name](size)
    except AssertionError as error:
        return str(error) or "wrong"
    if size.device != "cpu":
        torch.cuda.synchronize()
    return ""
