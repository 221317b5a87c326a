"""One launch of rows that start alike: ``python -m benchmarks.integrations.job WAY FOLDER ROW...``.

Each rank writes what came of each phase to ``FOLDER/WAY-RANK.json``, rank 0 also the weights to ``ROW-PHASE.npy``.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.integrations.rows import DENSITY, EXACT, ROWS, Row
from benchmarks.integrations.training import Run, Trained, rank

# Launches: dense runs, and those of a script that compresses by itself; two by variables.
LINES, BY_VARIABLE_EXACT, BY_VARIABLE = "lines", "by-variable-exact", "by-variable"


def phases(row: Row, way: str, folder: Path) -> Iterator[tuple[str, Run]]:
    """Names and runs of a launch, one after the other."""
    plain = Run(folder / "dense")
    if way != LINES:  # variables decide
        yield way, replace(plain, folder=folder / way, usual=way == BY_VARIABLE)
        return
    yield "dense", plain
    if row.differs:
        yield "unusual", replace(plain, folder=folder / "unusual", usual=False)
    if row.lines:
        from dgc_horovod.config import DGCConfig

        exact, config = (DGCConfig(**settings, **row.settings) for settings in (EXACT, {"density": DENSITY}))
        yield "exact", Run(folder / "exact", exact, usual=False)
        yield "compressed", (used := Run(folder / "compressed", config, saves=row.resumes))
        if row.resumes:
            yield "resumed", replace(used, saves=False, resumes=True)


def on_rank(way: str, folder: Path, names: Sequence[str]) -> None:
    """Run every phase of some rows on this rank."""
    torch.set_num_threads(1)
    found = {name: dict[str, Any]() for name in names}
    for name in names:
        train: Callable[[Run], Trained] = _named(ROWS[name].job)
        for phase, run in phases(ROWS[name], way, folder / name):
            torch.manual_seed(0)
            run.folder.mkdir(parents=True, exist_ok=True)
            ended = train(run)
            found[name][phase] = {"digest": ended.digest, "loss": ended.loss, "stats": ended.stats}
            if rank() == 0:
                np.save(folder / f"{name}-{phase}.npy", ended.weights)
    Path(folder, f"{way}-{rank()}.json").write_text(json.dumps(found))


def _named(name: str) -> Any:
    module, function = name.split(".")
    return getattr(importlib.import_module(f"benchmarks.integrations.jobs.{module}"), function)


def main() -> None:
    """Start the ranks, where the launcher has not."""
    way, folder, *names = sys.argv[1:]
    from benchmarks.integrations.job import on_rank as named  # not __main__'s, which other processes do not have

    body, starts = functools.partial(named, way, Path(folder), names), ROWS[names[0]].starts
    _named(starts)(body) if starts else body()


if __name__ == "__main__":
    main()
