"""The layout of a model: assignment of tensors to buckets or to the dense path, and the number of selected elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

from dgc_horovod.config import DGCConfig
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.wire.bucket import Bucket, Segment

_MOST_ELEMENTS = 2**31
WHOLE_BUCKET_VALUES = ("bf16", "8bit")


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and boundary of a parameter. Tensors of different `boundary` never share a bucket."""

    name: str
    shape: tuple[int, ...]
    boundary: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class BucketLayout:
    """The buckets of a model, and the names of the tensors that are exchanged by allreduce."""

    buckets: tuple[Bucket, ...]
    dense: tuple[str, ...]


def stays_dense(spec: TensorSpec, config: DGCConfig) -> bool:
    """Return whether a tensor is sent dense at every step: 1-D (bias, norm) or smaller than ``min_numel``."""
    return spec.numel < config.min_numel or (len(spec.shape) < 2 and not config.compress_1d)


def dense_values(config: DGCConfig, workers: int) -> str:
    """Return the format of the dense path: "fp32" and "fp16" by allreduce, "bf16" and "8bit" as a bucket by allgather.

    "auto" is 8bit up to four workers, where an allgather of bytes takes fewer bytes than a ring allreduce even of fp16
    (``N-1`` bytes an element against ``4*(N-1)/N``), and fp32 above.
    """
    if config.dense_values != "auto":
        return config.dense_values
    return "8bit" if workers <= 4 else "fp32"


def plan(specs: Sequence[TensorSpec], config: DGCConfig, workers: int = 1) -> BucketLayout:
    """Cut a model into buckets of at most ``bucket_bytes`` of fp32 gradient.

    Parameters are taken from the last to the first, as backward reaches them, so the first bucket is complete first. A
    tensor larger than a bucket has a bucket of its own. A pure function: the result is the same on every rank.

    Args:
        specs: name, shape and boundary of each parameter, in the model's order.
        config: compression settings; ``bucket_bytes``, ``min_numel``, ``compress_1d`` and ``dense_values`` are used.
        workers: N >= 1.

    Raises:
        UnsupportedUse: a tensor has 2^31 elements or more.
    """
    for spec in specs:
        if spec.numel >= _MOST_ELEMENTS:
            raise UnsupportedUse(
                f"{spec.name!r} has {spec.numel} elements; a compressed parameter has at most {_MOST_ELEMENTS - 1}, as "
                "positions are 32-bit. Split the parameter, or use Compression.none"
            )
    groups = _groups([s for s in specs if not stays_dense(s, config)], config.bucket_bytes)
    buckets = [_bucket(i, group) for i, group in enumerate(groups)]
    small = [s for s in specs if stays_dense(s, config)]
    values = dense_values(config, workers)
    if values in WHOLE_BUCKET_VALUES:
        for group in _groups([spec for spec in small if spec.numel], config.bucket_bytes):
            buckets.append(replace(_bucket(len(buckets), group), uncompressed=True, values=values))
        small = [spec for spec in small if not spec.numel]
    return BucketLayout(tuple(buckets), tuple(spec.name for spec in small))


def _groups(specs: Sequence[TensorSpec], most_bytes: int) -> list[list[TensorSpec]]:
    groups: list[list[TensorSpec]] = []
    filled, most_bytes = 0, min(most_bytes, 4 * (_MOST_ELEMENTS - 1))
    for spec in reversed(specs):
        fits = groups and groups[-1][0].boundary == spec.boundary and filled + 4 * spec.numel <= most_bytes
        if not fits:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += 4 * spec.numel
    return groups


def _bucket(index: int, specs: Sequence[TensorSpec]) -> Bucket:
    segments, start = [], 0
    for spec in specs:
        segments.append(Segment(spec.name, start, spec.numel))
        start += spec.numel
    return Bucket(index, tuple(segments))


def count_for(numel: int, density: float) -> int:
    """``k = max(1, ceil(density * numel))``, with the exact decimal value of the density as written."""
    return min(numel, max(1, math.ceil(Decimal(repr(float(density))) * numel)))
