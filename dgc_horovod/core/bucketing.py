"""The layout of a model, buckets and the dense path, and the bytes that it brings a network card.

From these bytes follow what nodes save, and the density for a byte budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_DOWN, Decimal

from dgc_horovod.config import AUTO, HIERARCHICAL, SHARDED, DGCConfig
from dgc_horovod.core.workspace import message_spec
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.exchange.contract import ALLREDUCE, ALLTOALL, BETWEEN, INSIDE, Round
from dgc_horovod.exchange.hierarchical import Topology
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


# Speed between workers of a node, as a multiple of the speed of their network card: a local connection through host
# memory (a few Gbit/s a worker that has a core, against 1 Gbit/s), or NCCL
HOST_SPEED, NCCL_SPEED = 10.0, 1000.0
# From this number of senders, shard owners lose less quality than a density that sends the same bytes (docs/quality.md)
OWNERS_FROM = 32
LEAST_DENSITY = 1e-4  # below it an element is sent less than once in ten thousand steps
_HALVINGS, _DIGITS = 30, 3


def card_bytes(specs: Sequence[TensorSpec], config: DGCConfig, topology: Topology) -> int:
    """Bytes that a node's network card receives at a step, after the warm-up.

    Args:
        specs: name and shape of every tensor, in the model's order.
        config: compression settings.
        topology: workers and nodes; the rank does not matter.
    """
    card = topology.workers, topology.node_size
    return sum(through_card(each, *card) for bucket in rounds_of(specs, config, topology) for each in bucket)


def rounds_of(specs: Sequence[TensorSpec], config: DGCConfig, topology: Topology) -> list[tuple[Round, ...]]:
    """Return the rounds of every bucket after the warm-up, and last the allreduce of the dense tensors, if any.

    Args:
        specs, config, topology: see `card_bytes`.
    """
    layout = plan(specs, config, topology.nodes)
    rounds = [message_spec(bucket, config, config.density, topology).rounds for bucket in layout.buckets]
    small = set(layout.dense)
    numel = sum(spec.numel for spec in specs if spec.name in small)
    dtype = "float16" if dense_values(config, topology.nodes) == "fp16" else "float32"
    return [*rounds, (Round("small", ALLREDUCE, dtype, numel),)] if numel else rounds


def through_card(collective: Round, workers: int, workers_a_card: int) -> int:
    """Bytes that a network card receives in a collective.

    A ring of all workers in host order crosses each card once, for any number of workers behind it. In an alltoall a
    card passes the parts that its workers receive from other nodes. A round inside a node uses no card.

    Args:
        collective: round, see `Round`.
        workers: N >= 1.
        workers_a_card: G >= 1, a divisor of N.
    """
    if collective.group == INSIDE:
        return 0
    if collective.group == BETWEEN:
        return workers_a_card * collective.received(workers // workers_a_card)
    if collective.kind == ALLTOALL:
        return workers_a_card * (workers - workers_a_card) * collective.nbytes // workers
    return collective.received(workers) if workers > workers_a_card else 0


def loss_by_nodes(specs: Sequence[TensorSpec], config: DGCConfig, topology: Topology, speed: float) -> str:
    """Return why averaging inside nodes costs more time than it saves on network cards, in words; "" if it saves.

    A worker receives ``4n*(G-1)/G`` bytes inside its node at each step, in fp32.

    Args:
        specs, config: see `card_bytes`.
        topology: workers and nodes.
        speed: speed between workers of a node as a multiple of the card's, > 0.
    """
    inside = 4 * sum(s.numel for s in specs) * (topology.node_size - 1) // topology.node_size
    flat, nodes = (card_bytes(specs, config, each) for each in (Topology(0, topology.workers), topology))
    if inside <= speed * (flat - nodes):
        return ""
    return (
        f"at density {config.density:g} it would save {(flat - nodes) / 1e6:.3g} MB a step on a network card, "
        f"and move {inside / 1e6:.3g} MB to each worker inside its node"
    )


def within_budget(specs: Sequence[TensorSpec], config: DGCConfig, topology: Topology) -> DGCConfig:
    """Return `config` with the largest density, up to its own, at which `card_bytes` is within ``max_bytes_per_step``.

    Small tensors are always sent dense. The density is not lowered below `LEAST_DENSITY`. If it would have to be
    lowered, and `OWNERS_FROM` or more workers or nodes exchange packets, exchange "auto" becomes one with shard owners.

    Args:
        specs, config, topology: see `card_bytes`.
    """
    budget, asked = config.max_bytes_per_step, config.density
    if budget is None or topology.workers == 1 or card_bytes(specs, config, topology) <= budget:
        return config
    if config.exchange == AUTO and topology.nodes >= OWNERS_FROM:
        config = config.replace(exchange=SHARDED if topology.node_size == 1 else f"{HIERARCHICAL}+{SHARDED}")
        if card_bytes(specs, config, topology) <= budget:
            return config
    low, high = min(asked, LEAST_DENSITY), asked
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        fits = card_bytes(specs, config.replace(density=middle), topology) <= budget
        low, high = (middle, high) if fits else (low, middle)
    return config.replace(density=max(_rounded_down(low), min(asked, LEAST_DENSITY)))


def _rounded_down(density: float) -> float:
    """Round `density` down to a few decimal digits."""
    exact = Decimal(repr(density))
    return float(exact.quantize(Decimal(1).scaleb(exact.adjusted() - _DIGITS + 1), ROUND_DOWN))
