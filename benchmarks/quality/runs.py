"""The runs of the study, and the file that keeps their results, so that it goes on where it stopped."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.quality import variants as all_of
from benchmarks.quality.tasks import ALL_TASKS, TASKS, digest
from benchmarks.quality.training import Run, train
from benchmarks.quality.variants import ADAM_DENSE, EXCHANGES, VARIANTS, Variant
from benchmarks.ranks import launch
from benchmarks.report import RESULTS, read_results
from dgc_horovod.config import DGCConfig

KEPT, ADAM_KEPT = RESULTS / "quality.json.xz", RESULTS / "quality-adam.json.xz"
WORKERS, LENGTHS = (4, 8), (1.0, 4.0, 10.0)
ADAM_WORKERS, ADAM_SEED = (4, 8, 16, 32), 500  # the first seed of AdamW on the small model
FIRST_DENSE = tuple(ADAM_DENSE)[:2]  # by b1
_IN_2_BITS = tuple(all_of.ADAM_IN_2_BITS)[:-1]  # but for the lowest density
NODES = {16: 4, 32: 4, 64: 8}  # workers, of them in a node
LONGER = ("dense", "topk (TopK-SGD)", "dgc", "dgc, density 0.1%")
LONGEST = 30.0
LOWEST_LONGEST = ("half the rate, dgc, density 0.1%", "half the rate, dgc, density 0.3%, values=2bit")
_ONLY_WHERE_CLIPPED = ("+ local clipping", "DGC without clipping")
# settings of the compression that are in every hash; others only where they are set, so that one more changes no hash
_IN_EVERY_HASH = (
    "density", "rule", "scope", "momentum_correction", "factor_masking", "clip_norm", "threshold", "max_density",
    "warmup", "local_steps", "local_decay", "outer_rate", "outer_momentum", "values", "dense_values", "min_numel",
    "compress_1d", "bucket_bytes", "seed",
)  # fmt: skip
# those that change no weight, in none
_NOT_LEARNING = (
    "check_every", "on_mismatch", "on_nonfinite", "max_skipped", "exchange", "node_size", "max_bytes_per_step",
    "offload", "automatic", "total_steps",  # there is nothing to choose in a simulation
)  # fmt: skip
_IN_CONFIG = ("fields", "received")  # of a variant: its compression says what they bring
_LAUNCH_SECONDS, _STEP_SECONDS = 120, 3  # far more than any takes; then it is killed
Results = dict[str, dict[str, Any]]  # by key of the run


def _places(seeds: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Number of ranks and seed: others for each number of ranks, so that all pairs of runs are independent."""
    for i, workers in enumerate(WORKERS):
        yield from ((workers, seed + 100 * i) for seed in seeds)


def _runs(
    task: str, names: Iterable[str], workers: int, seeds: Iterable[int], *lengths: float, real: bool = False
) -> Iterator[Run]:
    """Every variant from every seed, of every length; of length 1 where none is given."""
    for length, seed, variant in itertools.product(lengths or (1.0,), seeds, names):
        yield Run(task, variant, workers, seed, length, real)


def _from(first: int, seeds: Iterable[int]) -> list[int]:
    return [first + seed for seed in seeds]


def _ablation(seeds: Sequence[int]) -> Iterator[Run]:
    for (workers, seed), task in itertools.product(_places(seeds), TASKS):
        names = (*all_of.ABLATION, *all_of.WITHOUT, *all_of.CHOICES)
        yield from _runs(task, _of_their_own(task, names), workers, [seed])


def _of_their_own(task: str, names: Iterable[str]) -> list[str]:
    """The variants that differ from the others on a task: not all tasks clip, and each has one density already."""

    def differs(variant: str) -> bool:
        if variant in _ONLY_WHERE_CLIPPED:
            return TASKS[task].settings.clip_norm is not None
        return variant == "dgc" or settings(Run(task, variant)) != settings(Run(task, "dgc"))

    return [name for name in names if differs(name)]


def _longer(seeds: Sequence[int]) -> Iterator[Run]:
    for (workers, seed), task in itertools.product(_places(seeds), ("images", "lstm")):
        yield from _runs(task, _of_their_own(task, LONGER), workers, [seed], *LENGTHS)


def _optimizers(seeds: Sequence[int]) -> Iterator[Run]:
    return _runs("transformer", all_of.OPTIMIZERS, 4, seeds)


def _adam(seeds: Sequence[int]) -> Iterator[Run]:
    """The second length shows most: all densities with four ranks, and up to 32 ranks."""
    for i, workers in enumerate(ADAM_WORKERS):
        names = (*FIRST_DENSE, "AdamW, dgc", *(_IN_2_BITS if workers in WORKERS else []))
        names = names if i else (*ADAM_DENSE, *all_of.ADAM)
        yield from _runs("transformer", names, workers, _from(ADAM_SEED + 100 * i, seeds), LENGTHS[1])
    names = (*FIRST_DENSE, "AdamW, dgc", "AdamW, dgc, 0.1% in 2 bits")
    yield from _runs("transformer", names, ADAM_WORKERS[0], _from(ADAM_SEED, seeds), *LENGTHS)


def _adam_gpt(seeds: Sequence[int]) -> Iterator[Run]:
    for workers in WORKERS:
        yield from _runs("gpt", (*FIRST_DENSE, "AdamW, dgc", *_IN_2_BITS), workers, seeds)


def _adam_local(seeds: Sequence[int]) -> Iterator[Run]:
    names = (*FIRST_DENSE, *all_of.LOCAL_BETAS)
    yield from _runs("transformer", names, min(WORKERS), _from(ADAM_SEED, seeds), LENGTHS[1])
    yield from _runs("gpt", [name for name in names if name.endswith("b1 0.5")], min(WORKERS), seeds)


def _local(seeds: Sequence[int]) -> Iterator[Run]:
    averaged = (*all_of.AVERAGED, *all_of.WITH_OUTER, *all_of.LATER_AVERAGED)
    local = (*all_of.LOCAL, *all_of.LOCAL_DENSER, *all_of.LOCAL_GENTLER, *all_of.LATER_LOCAL)
    names = ("AdamW, dense", *averaged, *local)
    return _runs("transformer", names, min(WORKERS), _from(ADAM_SEED, seeds), LENGTHS[1])


def _gpt(seeds: Sequence[int]) -> Iterator[Run]:
    """The larger model, a seed after the other: local steps with four and eight ranks, longer; PowerSGD."""
    names = ("AdamW, dense", *all_of.AVERAGED, *all_of.LOCAL, *all_of.LOCAL_DENSER)
    of_15 = [name for name in (*names, *all_of.WITH_OUTER) if " 15" in name]
    for seed in seeds:
        yield from _runs("gpt", all_of.POWER_SGD, 4, [seed], real=True)
        for i, workers in enumerate(WORKERS):
            yield from _runs("gpt", names, workers, [seed + 100 * i])
        yield from _runs("gpt", (*all_of.LOCAL_GENTLER, *set(of_15).difference(names)), 4, [seed])
        yield from _runs("gpt", ("AdamW, dense", *set(of_15).intersection(names)), 4, [seed], LENGTHS[1])


def _auto(seeds: Sequence[int]) -> Iterator[Run]:
    for task, steps in itertools.product(TASKS, all_of.RUN_LENGTHS):
        if steps == max(all_of.RUN_LENGTHS) and task == "lstm":
            continue  # hours, and "longer" has such a run
        own = [name for name in (*all_of.AUTOMATIC, *all_of.UNMASKED) if f", {steps:,} steps" in name]
        yield from _runs(task, ("dense", *own), 4, _from(700, seeds), steps / TASKS[task].settings.steps)


def _lowest(seeds: Sequence[int]) -> Iterator[Run]:
    longest, fewest = ("half the rate, dense", *LOWEST_LONGEST), min(WORKERS)
    yield from _runs("lstm", ("dense", "dgc, density 0.1%", *all_of.LOWEST), fewest, seeds, LENGTHS[-1])
    yield from _runs("lstm", longest, max(WORKERS), _from(100, seeds), LENGTHS[-1])
    yield from _runs("lstm", longest, fewest, seeds, LONGEST)


def _exchanges(seeds: Sequence[int], length: float) -> Iterator[Run]:
    for i, (workers, node_size) in enumerate(NODES.items(), start=len(WORKERS)):
        other_nodes = tuple(f"nodes of {other}" for other in set(NODES.values()) - {node_size})
        names = [name for name in ("dense", "dgc", *EXCHANGES) if not name.endswith(other_nodes)]
        for task in TASKS:
            yield from _runs(task, names, workers, _from(100 * i, seeds), length)


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
    "exchanges": functools.partial(_exchanges, length=LENGTHS[0]),
    "longer-exchanges": functools.partial(_exchanges, length=LENGTHS[1]),
}


def load(file: Path = KEPT) -> Results:
    """The results of runs as they would be done today, on whatever machine, and whatever text it had."""
    return {key: found for key, found in read_results(file).items() if _is_todays(found)}


def _is_todays(found: Mapping[str, Any]) -> bool:
    run = Run(**found["run"])
    return run.task in ALL_TASKS and run.variant in VARIANTS and found["settings"] == settings(run)


def settings(run: Run) -> str:
    """Hash of a run's settings, of its task and its variant, but not of its text: results of others are not its own."""
    task, variant = ALL_TASKS[run.task].settings, VARIANTS[run.variant]
    config = variant.config(task, run.workers)
    learning = {} if config is None else {name: x for name, x in vars(config).items() if name not in _NOT_LEARNING}
    fields = {name: x for name, x in learning.items() if name in _IN_EVERY_HASH or x != getattr(DGCConfig, name)}
    # likewise only where they are set
    others = {name: x for name, x in vars(variant).items() if name not in _IN_CONFIG and x != getattr(Variant, name)}
    # "": where a text was part of the hash, so that the hashes of all that is kept stay
    return hashlib.sha256(repr((task, sorted(fields.items()), others, "")).encode()).hexdigest()[:12]


def _text(run: Run) -> str:
    """Digest of the text of a run, which differs from one machine to another; "" if it is the repository's own."""
    return "" if run.task in TASKS else digest()


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
    longest_first = sorted(dict.fromkeys(plan), key=lambda run: run.steps * run.workers, reverse=True)
    # on another text a run is another one, though a page shows it
    older = [
        key
        for key, found in read_results(file).items()
        if not _is_todays(found) or found.get("text", "") != _text(Run(**found["run"]))
    ]
    for real in (False, True):
        cells = {run.key: functools.partial(done, run) for run in longest_first if run.real is real}
        report.complete(file, cells, again=older, processes=0 if real else processes)


def done(run: Run) -> dict[str, Any]:
    """Do a run, on Horovod's ranks or on simulated ones: what `train` gives, with all that it is of."""
    order, seconds = dataclasses.asdict(run), _LAUNCH_SECONDS + _STEP_SECONDS * run.steps
    launched = run.real and launch("benchmarks.quality.worker:rank", order, run.workers, None, seconds)[0]
    return {"run": order, "settings": settings(run), "text": _text(run), **(launched or train(run))}
