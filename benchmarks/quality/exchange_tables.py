"""Nodes and shards beside a flat exchange of as many bytes, as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.quality.analysis import Outcome, is_clear
from benchmarks.quality.runs import LENGTHS, NODES
from benchmarks.quality.tasks import TASKS
from benchmarks.quality.training import Run
from benchmarks.report import markdown, spread

SHARDED = ("sharded, k", "sharded, 2k", "sharded, 4k")


def gaps(found: Sequence[Outcome], length: float) -> str:
    """What each exchange loses to dense training of the same seed."""
    by_run = {each.run: each for each in found}
    lines = []
    for task in TASKS:
        for workers, node_size in NODES.items():
            names = _variants(node_size)
            cells = [_gap(by_run, Run(task, name, workers, length=length)) for name in names]
            if any(cells):
                lines.append([f"{TASKS[task].title}, N = {workers}, nodes of {node_size}", *cells])
    head = ["loss less dense, nats", "flat", "nodes", "flat, as many bytes"]
    head += [part for name in SHARDED for part in (name, "flat, as many bytes")]
    return markdown(head, lines)


def verdicts(found: Sequence[Outcome], length: float) -> str:
    """Each exchange less the flat one of as many bytes, pairs of the same seed."""
    by_run = {each.run: each for each in found}
    lines = []
    for task in TASKS:
        for workers, node_size in NODES.items():
            cells = []
            for name in (f"nodes of {node_size}", *SHARDED):
                run = Run(task, name, workers, length=length)
                cells.append(_verdict(pairs(by_run, run, replace(run, variant=f"dgc, bytes of {name}"))))
            if any(cells):
                lines.append([f"{TASKS[task].title}, N = {workers}", *cells])
    return markdown(["less flat, as many bytes", "nodes", *SHARDED], lines)


def _variants(node_size: int) -> list[str]:
    others = [part for name in SHARDED for part in (name, f"dgc, bytes of {name}")]
    return ["dgc", f"nodes of {node_size}", f"dgc, bytes of nodes of {node_size}", *others]


def pairs(by_run: dict[Run, Outcome], run: Run, other: Run) -> list[float]:
    """Loss of `run` less that of `other`, for every seed that both have."""
    mine = {each.seed: found for each, found in by_run.items() if replace(each, seed=0) == run}
    theirs = {each.seed: found for each, found in by_run.items() if replace(each, seed=0) == other}
    return [mine[seed].loss - theirs[seed].loss for seed in sorted(mine.keys() & theirs.keys())]


def _gap(by_run: dict[Run, Outcome], run: Run) -> str:
    return spread(pairs(by_run, run, replace(run, variant="dense")), "+.3f")


def _verdict(values: Sequence[float]) -> str:
    """The mean of the pairs, bold where chance puts it so far from 0 less than once in 20 times (Student)."""
    text = spread(values, "+.3f")
    return f"**{text}**" if all(map(math.isfinite, values)) and is_clear(values) else text


def blocks(found: Sequence[Outcome]) -> dict[str, str]:
    """The tables of the page, by marker."""
    made = {}
    for name, table in (("many-workers", gaps), ("many-workers-verdicts", verdicts)):
        parts = [f"×{length:g} the steps\n\n{table(found, length)}" for length in LENGTHS[:2] if _has(found, length)]
        made[name] = "\n\n".join(parts)
    return made


def _has(found: Sequence[Outcome], length: float) -> bool:
    return any(each.run.workers in NODES and each.run.length == length for each in found)
