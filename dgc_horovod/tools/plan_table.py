"""The plan over the number of workers: the best method for each, as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from dgc_horovod.config import HIERARCHICAL, DGCConfig
from dgc_horovod.core.bucketing import LEAST_DENSITY, TensorSpec
from dgc_horovod.planning.cluster import Cluster, Machine
from dgc_horovod.planning.cost_model import DENSE, EXCHANGES, FP16, METHODS, Cost, cost
from dgc_horovod.stats import size

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


_HEADS = {**{name: name for name in METHODS}, EXCHANGES[3]: "hier.+sharded"}
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


def text(found: Table, config: DGCConfig) -> str:
    """Return tables of time, efficiency, bytes and memory, with a budget density; the method to take is marked."""
    names = [name for name in METHODS if any(name in costs for costs in found.values())]
    blocks = []
    for title, value in _BLOCKS if config.max_bytes_per_step is None else (*_BLOCKS, _DENSITY):
        lines = [title, f"{'N':>8}" + "".join(f"{_HEADS[name]:>15}" for name in names)]
        for workers, costs in found.items():
            chosen = best(costs).name
            cells = [_cell(costs[name], value, name == chosen) for name in names]
            lines.append(f"{workers:>8,}" + "".join(cells))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _cell(cost: Cost, value: Callable[[Cost], float], chosen: bool) -> str:
    if value is _DENSITY[1]:
        shown = f"{value(cost):.3g}" if cost.name in EXCHANGES else ""
    else:
        shown = _shown(value(cost))
    return f"{shown:>14}{'*' if chosen else ' '}"


def budget_of(config: DGCConfig) -> list[str]:
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


def head(elements: int, computing: float, config: DGCConfig, cluster: Cluster) -> str:
    """Return a line on the model, the step, the density and the link."""
    card, workers = cluster.card, f"{cluster.node_size} worker{'s' * (cluster.node_size > 1)}"
    link = f"{workers} a card of {card.bits / 1e9:.3g} Gbit/s, {1e3 * card.latency:g} ms"
    density = f"density {'' if config.max_bytes_per_step is None else 'up to '}{config.density:g}"
    return f"{elements / 1e6:,.4g} M elements, {1e3 * computing:,.4g} ms of computing a step, {density}, {link}"
