"""Bytes through a network card at a step, before anything is sent; and the density that keeps them within a budget."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_DOWN, Decimal

from dgc_horovod.config import DGCConfig
from dgc_horovod.core.bucketing import TensorSpec, dense_values, plan
from dgc_horovod.core.workspace import message_spec
from dgc_horovod.exchange.contract import ALL, BETWEEN
from dgc_horovod.exchange.topology import Topology
from dgc_horovod.rules import RULES
from dgc_horovod.stats import ring_received

LEAST_DENSITY = 1e-4  # below it a coordinate is sent less than once in ten thousand steps
_HALVINGS, _DIGITS = 30, 3


def card_bytes(specs: Sequence[TensorSpec], config: DGCConfig, topology: Topology) -> int:
    """Bytes that a node's network card receives at a step, after the warm-up.

    Collectives among all ranks are counted as rings in host order, which cross each card once, however many workers
    are behind it. What goes round inside a node crosses none.

    Args:
        specs: name and shape of every tensor, in the model's order.
        config: compression settings.
        topology: workers and nodes; the rank does not matter.
    """
    layout, received = plan(specs, config, topology.nodes), 0
    for bucket in layout.buckets:
        for collective in message_spec(bucket, config, config.final_density, topology).rounds:
            if collective.group == ALL:
                received += collective.received(topology.workers)
            elif collective.group == BETWEEN:
                received += topology.node_size * collective.received(topology.nodes)
    width = 2 if dense_values(config, topology.nodes) == "fp16" else 4
    dense = set(layout.dense)
    return received + ring_received(width * sum(s.numel for s in specs if s.name in dense), topology.workers)


def within_budget(specs: Sequence[TensorSpec], config: DGCConfig, topology: Topology) -> DGCConfig:
    """`config` at the largest density, up to its own, at which `card_bytes` keeps to ``max_bytes_per_step``.

    Small tensors are sent whole, whatever the budget is; and no density is below `LEAST_DENSITY`, unless that of
    `config` is.

    Args:
        specs, config, topology: see `card_bytes`.
    """
    budget, asked = config.max_bytes_per_step, config.final_density
    if budget is None or topology.workers == 1 or card_bytes(specs, config, topology) <= budget:
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
