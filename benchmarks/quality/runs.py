"""Which runs the study has, and the file that keeps what they found, so that it goes on where it stopped."""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import ranks
from benchmarks.quality.tasks import TASKS
from benchmarks.quality.training import Run, train
from benchmarks.quality.variants import ABLATION, CHOICES, OPTIMIZERS, WITHOUT
from benchmarks.report import RESULTS, check_machine, environment, replace_file

KEPT = RESULTS / "quality.json"
WORKERS, LENGTHS = (4, 8), (1.0, 4.0, 10.0)
LONGER = ("dense", "topk (TopK-SGD)", "dgc", "dgc, values=2bit, density ×2")
LAUNCH_SECONDS, STEP_SECONDS = 120, 0.5  # far more than any takes; then it is killed
Results = dict[str, dict[str, Any]]  # by key of the run


def ablation(seeds: Sequence[int]) -> Iterator[Run]:
    """Every variant on every task."""
    for workers, seed, task in itertools.product(WORKERS, seeds, TASKS):
        for variant in (*ABLATION, *WITHOUT, *CHOICES):
            if TASKS[task].settings.clip_norm is not None or variant not in (
                "+ local clipping",
                "DGC without clipping",
            ):
                yield Run(task, variant, workers, seed)


def longer(seeds: Sequence[int]) -> Iterator[Run]:
    """How the gap to dense training closes as runs get longer."""
    for workers, seed, task, length in itertools.product(WORKERS, seeds, ("images", "lstm"), LENGTHS):
        yield from (Run(task, variant, workers, seed, length) for variant in LONGER)


def optimizers(seeds: Sequence[int]) -> Iterator[Run]:
    """Other optimizers than SGD with momentum."""
    yield from (Run("transformer", variant, 4, seed) for seed in seeds for variant in OPTIMIZERS)


def real(seeds: Sequence[int]) -> Iterator[Run]:
    """Some of the others, by Horovod's own ranks."""
    for task, workers, variant in itertools.product(TASKS, WORKERS, ("dense", "dgc", "dgc, rule=gaussian")):
        yield Run(task, variant, workers, min(seeds), real=True)


STUDIES = {"ablation": ablation, "longer": longer, "optimizers": optimizers, "real": real}


def load(file: Path = KEPT) -> Results:
    """What is kept."""
    return json.loads(file.read_text())["runs"] if file.exists() else {}


def complete(plan: Iterable[Run], file: Path, processes: int) -> None:
    """Do what is not kept yet of a plan.

    Args:
        plan: runs; a run may be in it several times.
        file: of results.
        processes: simulated runs at a time; real ranks have the machine for themselves afterwards.

    Raises:
        OtherMachine: the file is of another machine or of other versions.
        LaunchError: real ranks failed or took too long; nothing of them is left running.
    """
    kept = json.loads(file.read_text()) if file.exists() else {"environment": environment(), "runs": {}}
    check_machine(file, [kept["environment"]])
    left = [run for run in dict.fromkeys(plan) if run.key not in kept["runs"]]
    left.sort(key=lambda run: run.steps * run.workers, reverse=True)  # the longest first: no processor waits at the end
    with tqdm(total=sum(run.steps for run in left), unit="step", unit_scale=True, ncols=100) as bar:
        for run, found in _found([run for run in left if not run.real], [run for run in left if run.real], processes):
            kept["runs"][run.key] = {"run": dataclasses.asdict(run), **found}
            _write(kept, file)
            bar.set_description(run.key, refresh=False)
            bar.update(run.steps)


def _found(alone: list[Run], real: list[Run], processes: int) -> Iterator[tuple[Run, dict[str, Any]]]:
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(train, run): run for run in alone}
        try:
            yield from ((futures[future], future.result()) for future in as_completed(futures))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for run in real:
        yield run, launch(run)


def launch(run: Run) -> dict[str, Any]:
    """Do a run on Horovod's ranks; what `train` gives on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        words = [json.dumps(dataclasses.asdict(run)), str(file)]
        seconds = LAUNCH_SECONDS + STEP_SECONDS * run.steps
        ranks.launch("benchmarks.quality.worker", words, run.workers, None, seconds)
        return json.loads(file.read_text())


def _write(kept: dict[str, Any], file: Path) -> None:
    runs = ",\n".join(f"  {json.dumps(name)}: {json.dumps(run)}" for name, run in sorted(kept["runs"].items()))
    replace_file(file, f'{{\n "environment": {json.dumps(kept["environment"])},\n "runs": {{\n{runs}\n }}\n}}\n')
