"""The runs of the study, and the file that keeps their results, so that it goes on where it stopped."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.quality.tasks import ALL_TASKS, TASKS, digest
from benchmarks.quality.training import Run, train
from benchmarks.quality.variants import (
    ABLATION,
    ADAM,
    ADAM_DENSE,
    AUTOMATIC,
    AVERAGED,
    BETAS,
    CHOICES,
    EXCHANGES,
    LATER_AVERAGED,
    LATER_LOCAL,
    LOCAL,
    LOCAL_BETAS,
    LOCAL_DENSER,
    LOCAL_GENTLER,
    LOWEST,
    OPTIMIZERS,
    POWER_SGD,
    RUN_LENGTHS,
    UNMASKED,
    VARIANTS,
    WITH_OUTER,
    WITHOUT,
)
from benchmarks.ranks import launch
from benchmarks.report import RESULTS, check_machine, environment, read_results, write_results

KEPT, ADAM_KEPT = RESULTS / "quality.json.xz", RESULTS / "quality-adam.json.xz"
WORKERS, LENGTHS = (4, 8), (1.0, 4.0, 10.0)
ADAM_WORKERS, ADAM_SEED = (4, 8, 16, 32), 500  # the first seed of AdamW on the small model
FIRST_DENSE = tuple(ADAM_DENSE)[:2]  # by b1
NODES = {16: 4, 32: 4, 64: 8}  # workers, of them in a node
LONGER = ("dense", "topk (TopK-SGD)", "dgc", "dgc, density 0.1%")
LONGEST = 30.0
LOWEST_LONGEST = ("half the rate, dgc, density 0.1%", "half the rate, dgc, density 0.3%, values=2bit")
_REAL = ("dense", "dgc", "dgc, rule=gaussian")
_ONLY_WHERE_CLIPPED = ("+ local clipping", "DGC without clipping")
# settings of the compression that change no weight
_NOT_LEARNING = (
    "check_every", "on_mismatch", "on_nonfinite", "max_skipped", "exchange", "node_size", "max_bytes_per_step",
    "local_steps", "local_decay", "outer_rate", "outer_momentum", "offload",  # where there are none
    "automatic", "total_steps",  # there is nothing to choose in a simulation
    "momentum_dtype",  # which `settings` tells apart below
)  # fmt: skip
_LAUNCH_SECONDS, _STEP_SECONDS = 120, 3  # far more than any takes; then it is killed
Results = dict[str, dict[str, Any]]  # by key of the run


def _places(seeds: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Number of ranks and seed: others for each number of ranks, so that all pairs of runs are independent."""
    for i, workers in enumerate(WORKERS):
        yield from ((workers, seed + 100 * i) for seed in seeds)


def _ablation(seeds: Sequence[int]) -> Iterator[Run]:
    for workers, seed in _places(seeds):
        for task in TASKS:
            for variant in (*ABLATION, *WITHOUT, *CHOICES):
                if _is_one_of_its_own(task, variant):
                    yield Run(task, variant, workers, seed)


def _is_one_of_its_own(task: str, variant: str) -> bool:
    """Whether a variant differs from the others on a task: not all tasks clip, and each has one density already."""
    if variant in _ONLY_WHERE_CLIPPED:
        return TASKS[task].settings.clip_norm is not None
    return variant == "dgc" or settings(Run(task, variant)) != settings(Run(task, "dgc"))


def _longer(seeds: Sequence[int]) -> Iterator[Run]:
    for workers, seed in _places(seeds):
        for task in ("images", "lstm"):
            variants = [variant for variant in LONGER if _is_one_of_its_own(task, variant)]
            yield from (Run(task, variant, workers, seed, length) for length in LENGTHS for variant in variants)


def _optimizers(seeds: Sequence[int]) -> Iterator[Run]:
    yield from (Run("transformer", variant, 4, seed) for seed in seeds for variant in OPTIMIZERS)


def _adam(seeds: Sequence[int]) -> Iterator[Run]:
    """The second length shows most: all densities with four ranks, and up to 32 ranks."""
    fewest, least = ADAM_WORKERS[0], "AdamW, dgc, 0.1% in 2 bits"
    named = {workers: [*FIRST_DENSE, "AdamW, dgc"] for workers in ADAM_WORKERS}
    named |= {workers: [*named[workers], "AdamW, dgc, 0.3% in 2 bits"] for workers in WORKERS}
    for i, workers in enumerate(ADAM_WORKERS):
        for seed, variant in itertools.product(seeds, (*ADAM_DENSE, *ADAM) if workers == fewest else named[workers]):
            yield Run("transformer", variant, workers, seed + ADAM_SEED + 100 * i, LENGTHS[1])
    for length, seed, variant in itertools.product(LENGTHS, seeds, (*FIRST_DENSE, "AdamW, dgc", least)):
        yield Run("transformer", variant, fewest, seed + ADAM_SEED, length)


def _adam_gpt(seeds: Sequence[int]) -> Iterator[Run]:
    for seed, variant in itertools.product(seeds, (*FIRST_DENSE, "AdamW, dgc", "AdamW, dgc, 0.3% in 2 bits")):
        yield Run("gpt", variant, 4, seed)


def _adam_local(seeds: Sequence[int]) -> Iterator[Run]:
    for seed, variant in itertools.product(seeds, (*FIRST_DENSE, *LOCAL_BETAS)):
        yield Run("transformer", variant, min(WORKERS), seed + ADAM_SEED, LENGTHS[1])


def _local(seeds: Sequence[int]) -> Iterator[Run]:
    for seed in seeds:
        local = (*LOCAL, *LOCAL_DENSER, *LOCAL_GENTLER, *LATER_LOCAL)
        for variant in ("AdamW, dense", *AVERAGED, *WITH_OUTER, *LATER_AVERAGED, *local):
            yield Run("transformer", variant, min(WORKERS), seed + ADAM_SEED, LENGTHS[1])


def _gpt(seeds: Sequence[int]) -> Iterator[Run]:
    """The larger model, a seed after the other: local steps with four and eight ranks, longer; PowerSGD."""
    for seed in seeds:
        yield from (Run("gpt", variant, 4, seed, real=True) for variant in POWER_SGD)
        for i, workers in enumerate(WORKERS):
            for variant in ("AdamW, dense", *AVERAGED, *LOCAL, *LOCAL_DENSER):
                yield Run("gpt", variant, workers, seed + 100 * i)
        yield from (Run("gpt", variant, 4, seed) for variant in LOCAL_GENTLER)
        yield from (Run("gpt", variant, 4, seed) for variant in WITH_OUTER if " 15" in variant)
        longer = (name for name in (*AVERAGED, *LOCAL, *LOCAL_DENSER) if " 15" in name)
        yield from (Run("gpt", variant, 4, seed, LENGTHS[1]) for variant in ("AdamW, dense", *longer))


def _auto(seeds: Sequence[int]) -> Iterator[Run]:
    for seed, task, steps in itertools.product(seeds, TASKS, RUN_LENGTHS):
        if steps == max(RUN_LENGTHS) and task == "lstm":
            continue  # hours, and "longer" has such a run
        own = [name for name in ("dense", *AUTOMATIC, *UNMASKED) if name == "dense" or f", {steps:,} steps" in name]
        yield from (Run(task, name, 4, seed + 700, steps / TASKS[task].settings.steps) for name in own)


def _lowest(seeds: Sequence[int]) -> Iterator[Run]:
    for seed in seeds:
        for variant in ("dense", "dgc, density 0.1%", *LOWEST):
            yield Run("lstm", variant, min(WORKERS), seed, LENGTHS[-1])
        for variant in ("half the rate, dense", *LOWEST_LONGEST):
            yield Run("lstm", variant, max(WORKERS), seed + 100, LENGTHS[-1])
            yield Run("lstm", variant, min(WORKERS), seed, LONGEST)


def _real(seeds: Sequence[int]) -> Iterator[Run]:
    for workers, seed in _places([min(seeds)]):
        shown = _REAL if workers == min(WORKERS) else ("dgc",)  # more than that take long on few cores
        yield from (Run(task, variant, workers, seed, real=True) for task in TASKS for variant in shown)


def _exchanges(seeds: Sequence[int], lengths: Sequence[float]) -> Iterator[Run]:
    for i, (workers, node_size) in enumerate(NODES.items(), start=len(WORKERS)):
        other_nodes = [f"nodes of {other}" for other in set(NODES.values()) - {node_size}]
        for seed, length, task in itertools.product(seeds, lengths, TASKS):
            for variant in ("dense", "dgc", *EXCHANGES):
                if not variant.endswith(tuple(other_nodes)):
                    yield Run(task, variant, workers, seed + 100 * i, length)


STUDIES = {
    "ablation": _ablation,
    "longer": _longer,
    "lowest": _lowest,
    "optimizers": _optimizers,
    "adam": _adam,
    "adam-gpt": _adam_gpt,
    "adam-local": _adam_local,
    "local": _local,
    "gpt": _gpt,
    "auto": _auto,
    "real": _real,
    "exchanges": functools.partial(_exchanges, lengths=LENGTHS[:1]),
    "longer-exchanges": functools.partial(_exchanges, lengths=LENGTHS[1:2]),
}


def load(file: Path = KEPT) -> Results:
    """The results of runs as they would be done today."""
    kept = read_results(file).get("runs", {})
    return {key: found for key, found in kept.items() if found["settings"] == settings(Run(**found["run"]))}


def settings(run: Run) -> str:
    """Hash of a run's settings, of its task and its variant: results of others are not its own."""
    if run.task not in ALL_TASKS or run.variant not in VARIANTS:
        return "none"
    task, variant = ALL_TASKS[run.task].settings, VARIANTS[run.variant]
    config = variant.config(task, run.workers)
    given = {} if config is None else vars(config)
    fields = sorted((name, value) for name, value in given.items() if name not in _NOT_LEARNING)
    others = variant.clips, variant.forgets, variant.masks_below, variant.optimizer, variant.rate
    if given.get("momentum_dtype", "fp32") != "fp32":
        others = (*others, "momentum in bf16")
    if variant in EXCHANGES.values():
        others = (*others, variant.node_size, variant.shard_density)
    if config is not None and config.local_steps is not None:
        others = (*others, config.local_steps, config.local_decay, config.outer_rate, config.outer_momentum)
        others = (*others, "after", variant.dense_steps) if variant.dense_steps else others
    if variant.optimizer == "adamw":
        others = (*others, variant.betas) if variant.betas != BETAS else others
        splits = config is not None and config.momentum_correction and config.local_steps is None
        others = (*others, "shared second moment") if splits else others
    if run.task not in TASKS:
        others = (*others, task.adamw_lr, task.ramp, digest())
    if variant.dense_steps and config is not None and config.local_steps is None:
        others = (*others, "dense", variant.dense_steps)
    if variant.power_sgd:
        others = (*others, variant.power_sgd, variant.dense_steps)
    return hashlib.sha256(repr((task, fields, *others)).encode()).hexdigest()[:12]


def complete(plan: Iterable[Run], file: Path, processes: int) -> None:
    """Do what is not kept yet of a plan.

    Args:
        plan: runs; a run may be in it several times.
        file: of results.
        processes: simulated runs at a time; real ranks have the machine for themselves afterwards.

    Raises:
        OtherMachine: the file is of another machine or of other versions.
        BrokenProcessPool: a process was killed.
        LaunchError: real ranks failed or took too long; nothing of them is left running.
    """
    from tqdm import tqdm

    kept = read_results(file) or {"environment": environment(), "runs": {}}
    check_machine(file, [kept["environment"]])
    left = [run for run in dict.fromkeys(plan) if kept["runs"].get(run.key, {}).get("settings") != settings(run)]
    left.sort(key=lambda run: run.steps * run.workers, reverse=True)  # the longest first: no processor waits at the end
    with tqdm(total=sum(run.steps for run in left), unit="step", unit_scale=True, ncols=100) as bar:

        def keep(run: Run, found: dict[str, Any]) -> None:
            kept["runs"][run.key] = {"run": dataclasses.asdict(run), "settings": settings(run), **found}
            write_results(file, {**kept, "runs": dict(sorted(kept["runs"].items()))})
            bar.set_description(run.key, refresh=False)
            bar.update(run.steps)

        with pool(processes) as workers:
            futures = {workers.submit(train, run): run for run in left if not run.real}
            for future in as_completed(futures):
                keep(futures[future], future.result())
        for run in left:
            if run.real:
                keep(run, _launch(run))


def _launch(run: Run) -> dict[str, Any]:
    """Do a run on Horovod's ranks; what `train` gives on rank 0."""
    seconds = _LAUNCH_SECONDS + _STEP_SECONDS * run.steps
    found = launch("benchmarks.quality.worker:rank", dataclasses.asdict(run), run.workers, None, seconds)[0]
    return found  # type: ignore[no-any-return]


@contextmanager
def pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """So many processes with an interpreter of their own; after an exception, an interrupt too, nothing goes on."""
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as made:
        try:
            yield made
        except BaseException:
            for child in multiprocessing.active_children():  # the pool itself would finish what is in its queue
                child.kill()
            raise
