"""Every way to exchange gradients that is timed, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.exchange.methods import CompressedMethod, HorovodMethod, MemoryMethod, Method, PublishedMethod
from benchmarks.exchange.process_groups import PROCESS_GROUP_METHODS
from benchmarks.shapes import Shapes
from dgc_horovod.torch import Compression

NOTHING, MEMORY = FLOORS = "no exchange", "memory alone"  # of which nothing is an exchange


def _compressed(**fields: Any) -> Callable[[Shapes, float], Method]:
    return lambda shapes, density: CompressedMethod(shapes, Compression.dgc(density=density, **fields))


METHODS: dict[str, Callable[[Shapes, float], Method]] = {
    NOTHING: lambda shapes, _: Method(shapes),
    MEMORY: lambda shapes, _: MemoryMethod(shapes),
    "dense": lambda shapes, _: HorovodMethod(shapes, Compression.none),
    "fp16": lambda shapes, _: HorovodMethod(shapes, Compression.fp16),
    "dgc": _compressed(),
    "dgc, 4-bit values": _compressed(values="4bit"),
    "dgc, sampled": _compressed(rule="sampled"),
    "dgc, gaussian": _compressed(rule="gaussian"),
    "published DGC": PublishedMethod,
    **PROCESS_GROUP_METHODS,
}
