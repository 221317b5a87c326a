"""Bytes through a network card at a step, before anything is sent: what nodes save, and what fits into a budget."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_DOWN, Decimal

from dgc_horovod.config import AUTO, HIERARCHICAL, RULES, SHARDED, DGCConfig
from dgc_horovod.core.bucketing import TensorSpec, dense_values, plan
from dgc_horovod.core.workspace import message_spec
from dgc_horovod.exchange.contract import ALLREDUCE, ALLTOALL, BETWEEN, INSIDE, Round
from dgc_horovod.exchange.hierarchical import Topology

# How many times faster than their card workers of a node reach each other: host memory by way of a local connection
# (a few Gbit/s a worker, where each has a core, beside 1 Gbit/s), or NCCL
HOST_SPEED, NCCL_SPEED = 10.0, 1000.0
# So many that exchange packets lose less with owners than at the lower density of as many bytes (docs/quality.md)
OWNERS_FROM = 32
LEAST_DENSITY = 1e-4  # below it a coordinate is sent less than once in ten thousand steps
_HALVINGS, _DIGITS = 30, 3


def card_bytes(
    specs: Sequence[TensorSpec], config: DGCConfig, topology: Topology, workers_a_card: int | None = None
) -> int:
    """Bytes that a node's network card receives at a step, after the warm-up.

    Args:
        specs: name and shape of every tensor, in the model's order.
        config: compression settings.
        topology: workers and nodes; the rank does not matter.
        workers_a_card: number of workers behind one card; None: those of a node of `topology`.
    """
    card = topology.workers, workers_a_card or topology.node_size
    return sum(through_card(each, *card) for bucket in rounds_of(specs, config, topology) for each in bucket)


def rounds_of(specs: Sequence[TensorSpec], config: DGCConfig, topology: Topology) -> list[tuple[Round, ...]]:
    """The rounds of every bucket after the warm-up, and last the allreduce of what is not compressed, if there is any.

    Args:
        specs, config, topology: see `card_bytes`.
    """
    layout = plan(specs, config, topology.nodes)
    rounds = [message_spec(bucket, config, config.final_density, topology).rounds for bucket in layout.buckets]
    small = set(layout.dense)
    numel = sum(spec.numel for spec in specs if spec.name in small)
    dtype = "float16" if dense_values(config, topology.nodes) == "fp16" else "float32"
    return [*rounds, (Round("small", ALLREDUCE, dtype, numel),)] if numel else rounds


def through_card(collective: Round, workers: int, workers_a_card: int) -> int:
    """Bytes that a card receives in a collective.

    A ring of all workers in host order crosses each card once, however many are behind it; an alltoall of all brings
    each of them what it gets from those that are not. What goes round inside a node crosses no card.

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
    """Why averaging inside nodes would take longer than it saves on their cards, in words; "" if it would not.

    A worker receives ``4n*(G-1)/G`` bytes inside its node at each step, in fp32.

    Args:
        specs, config: see `card_bytes`.
        topology: workers and nodes.
        speed: how many times faster than a card workers of a node reach each other, > 0.
    """
    inside = 4 * sum(s.numel for s in specs) * (topology.node_size - 1) // topology.node_size
    flat, nodes = (card_bytes(specs, config, each) for each in (Topology(0, topology.workers), topology))
    if inside <= speed * (flat - nodes):
        return ""
    return (
        f"at density {config.final_density:g} it would save a card {(flat - nodes) / 1e6:.3g} MB a step, and move "
        f"{inside / 1e6:.3g} MB to each worker inside its node"
    )


def within_budget(specs: Sequence[TensorSpec], config: DGCConfig, topology: Topology) -> DGCConfig:
    """`config` at the largest density, up to its own, at which `card_bytes` keeps to ``max_bytes_per_step``.

    Small tensors are sent whole, whatever the budget is; and no density is below `LEAST_DENSITY`, unless that of
    `config` is. Where the density would have to fall, and `OWNERS_FROM` or more exchange packets, "auto" gives elements
    owners.

    Args:
        specs, config, topology: see `card_bytes`.
    """
    budget, asked = config.max_bytes_per_step, config.final_density
    if budget is None or topology.workers == 1 or card_bytes(specs, config, topology) <= budget:
        return config
    if config.exchange == AUTO and topology.nodes >= OWNERS_FROM:
        config = config.replace(exchange=SHARDED if topology.node_size == 1 else f"{HIERARCHICAL}+{SHARDED}")
        if card_bytes(specs, config, topology) <= budget:
            return config
    low, high = min(asked, LEAST_DENSITY), asked
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        fits = card_bytes(specs, _at(config, middle), topology) <= budget
        low, high = (middle, high) if fits else (low, middle)
    return _at(config, max(_rounded_down(low), min(asked, LEAST_DENSITY)))


def _rounded_down(density: float) -> float:
    """To a few digits, so that it can be read and written."""
    exact = Decimal(repr(density))
    return float(exact.quantize(Decimal(1).scaleb(exact.adjusted() - _DIGITS + 1), ROUND_DOWN))


def _at(config: DGCConfig, density: float) -> DGCConfig:
    name = "density" if RULES[config.rule].sets_density else "max_density"
    return config.replace(**{name: density})
