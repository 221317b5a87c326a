"""Runs rows: three launches, what they say and leave behind, and what is not as it should be.

A launch is ``python -m benchmarks.integrations.running WAY FOLDER ROW...``, of rows that start alike. Each rank writes
what came of each phase to ``FOLDER/WAY-RANK.json``, rank 0 also the weights to ``ROW-PHASE.npy``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.integrations.rows import DENSITY, EXACT, RANKS, ROWS, Row
from benchmarks.integrations.training import Run, Trained, rank
from benchmarks.ranks import LaunchError, output_of
from benchmarks.report import ROOT

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


Ranks = list[dict[str, Any]]  # what each rank has found
SECONDS = 900  # of a launch
NEAR, LEAST_LEARNED, LEASTSAVED = 1e-6, 0.5, 3.0
PACKAGES = ("torch", "transformers", "accelerate", "peft", "lightning", "ray", "horovod", "keras", "tensorflow-cpu")
SAVED = re.compile(r"dgc_horovod: dgc, density .*?, ([\d.]+)x less than fp32")
_LAST = 1500  # characters of what a failed launch has printed


def variables(settings: Mapping[str, Any]) -> dict[str, str]:
    """What compresses with these fields of DGCConfig, by variables alone."""
    texts = {f"DGC_{name.upper()}": "off" if value is False else str(value) for name, value in settings.items()}
    return {"DGC_COMPRESSION": "dgc", **_activation(), **texts}


def _activation() -> dict[str, str]:
    """The path to our start-up file, where no entry point of torch does it: in a checkout that is not installed."""
    if any(entry.name == "dgc_horovod" for entry in importlib.metadata.entry_points(group="torch.backends")):
        return {}
    return {"PYTHONPATH": f"{ROOT / 'dgc_horovod/launch/site'}:{ROOT}"}


def together(names: Iterable[str]) -> list[list[str]]:
    """Rows whose ranks start alike, in their order: to start them takes longer than most of them."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in names:
        row = ROWS[name]
        alike = (row.launcher, row.starts, row.job.split(".")[0], *row.settings.items(), bool(row.missing()))
        groups.setdefault(alike, []).append(name)
    return list(groups.values())


def launched(way: str, folder: Path, names: Sequence[str], settings: Mapping[str, str]) -> tuple[str, Ranks]:
    """What a launch prints, and what each rank finds in each phase of each row.

    Args:
        way: of launches, see `phases`.
        folder: for its files.
        names: of rows that start alike.
        settings: variables of our own.

    Raises:
        LaunchError: it failed, or took too long.
    """
    words = [*ROWS[names[0]].launcher, "-m", "benchmarks.integrations.running", way, str(folder), *names]
    few = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    said = output_of(words, SECONDS, {**few, **settings})
    return said, [json.loads(Path(folder, f"{way}-{rank}.json").read_text()) for rank in range(RANKS)]


def run(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The figures of rows that start alike, by row; ``missing`` or ``error`` where there are none."""
    if ROWS[names[0]].missing():
        return {name: {"missing": ROWS[name].missing()} for name in names}
    more = ROWS[names[0]].settings
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        try:
            _, alone = launched(LINES, folder, names, ROWS[names[0]].dense)
            _, exact = launched(BY_VARIABLE_EXACT, folder, names, variables({**EXACT, **more}))
            said, used = launched(BY_VARIABLE, folder, names, variables({"density": DENSITY, **more}))
        except LaunchError as error:
            return {name: {"error": str(error)[-_LAST:]} for name in names}
        found = {}
        for name in names:
            ranks = ([rank[name] for rank in launch] for launch in (alone, exact, used))
            found[name] = {**_figures(ROWS[name], folder / name, *ranks), "told": SAVED.search(said) is not None}
        return found


def _figures(row: Row, saved: Path, alone: Ranks, exact: Ranks, used: Ranks) -> dict[str, Any]:
    near, first, resumed = "unusual" if row.differs else "dense", alone[0].get("compressed"), alone[0].get("resumed")
    distance, same = _distance(saved, near, BY_VARIABLE_EXACT), _same(exact) and _same(used)
    found = {"dense": alone[0]["dense"]["loss"], "by_variable": _of_way(used[0][BY_VARIABLE], distance, same)}
    if first is not None:
        found["lines"] = _of_way(first, _distance(saved, near, "exact"), _same(alone))
        found["lines"]["resumed"] = None if resumed is None else resumed["digest"] == first["digest"]
    return found


def _of_way(phase: Mapping[str, Any], distance: float, same: bool) -> dict[str, Any]:
    stats = phase["stats"]
    less = stats["bytes_dense"] / stats["bytes_sent"] if stats else 0.0
    return {"loss": phase["loss"], "saved": less, "distance": distance, "same": same}


def _distance(saved: Path, *phases: str) -> float:
    """The largest difference of the weights of two phases."""
    first, second = (np.load(f"{saved}-{phase}.npy") for phase in phases)
    return float(np.abs(first - second).max())


def _same(ranks: Ranks) -> bool:
    """Whether every phase ended with the same weights on all ranks."""
    return all(rank[phase]["digest"] == ended["digest"] for rank in ranks for phase, ended in ranks[0].items())


def faults(row: Row, found: Mapping[str, Any]) -> list[str]:
    """What is not as it should be."""
    if "error" in found:
        return [found["error"]]
    wrong = [] if found.get("told", True) else ["the last line does not tell how much less was sent"]
    for way in (way for way in ("by_variable", "lines") if way in found):
        here, untrained = found[way], math.log(row.classes)
        learned = (untrained - here["loss"]) / (untrained - found["dense"])
        away = f"at density 1 weights differ by {here['distance']:.1e} from those without compression"
        checks = {
            away: here["distance"] <= NEAR,
            "replicas differ": here["same"],
            f"{here['saved']:.2g} times fewer bytes than fp32, not {LEASTSAVED:g}": here["saved"] >= LEASTSAVED,
            f"the loss has fallen by {learned:.2g} of what it does without compression": learned >= LEAST_LEARNED,
            "a run that resumes ends elsewhere than one without a break": here.get("resumed") is not False,
        }
        wrong += [f"{way}: {text}" for text, holds in checks.items() if not holds]
    return wrong


def main() -> None:
    """Start the ranks, where the launcher has not."""
    way, folder, *names = sys.argv[1:]
    from benchmarks.integrations.running import on_rank as named  # not __main__'s, which other processes do not have

    body, starts = functools.partial(named, way, Path(folder), names), ROWS[names[0]].starts
    _named(starts)(body) if starts else body()


if __name__ == "__main__":
    main()
