"""Scripts trained with and without compression, on real ranks of this machine, several seeds each.

Examples and what a setting does to them; scripts that nobody has edited, under ``dgcrun``, also those that clip. Every
run is kept: studies share runs, and a study that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command import Benchmark, argument
from benchmarks.ranks import LaunchError, found_in, output_of
from benchmarks.report import RESULTS, ROOT, complete, markdown, read_results, spread

FILE, TIMEOUT_SECONDS = RESULTS / "scripts.json", 600
CONTROLLERS = {"Gloo": "--gloo", "MPI": "--mpi '--mpi-args=--oversubscribe --allow-run-as-root'"}
# launchers; {} is the controller
STOCK, DGC = "horovodrun {} -np 2", "dgcrun {} -np 2 --dgc --density 0.01"
DENSE_KERAS = "dgcrun {} -np 2 --compression none"  # plain horovodrun cannot train it under Keras 3
Found = Sequence[Mapping[str, Any]]  # of a job, by seed


def _result(said: str) -> dict[str, Any]:
    """The RESULT line of an example."""
    return dict(json.loads(found_in(said, r"RESULT (\{.*\})")))


def _accuracy(said: str) -> dict[str, Any]:
    """The accuracy of an unedited script, and what its summary line says of the bytes."""
    ratio = re.search(r"(\S+)x less than fp32", said)
    return {"accuracy": float(found_in(said, r"accuracy (\d\.\d+)")), "ratio": float(ratio[1]) if ratio else None}


@dataclass(frozen=True)
class Job:
    """A script under a launcher, from one seed.

    Args:
        command: launcher and script, without Python and the seed; with the seed it is its name in the file of results.
        found: function of what it prints: its figures.
        saves: whether it saves the weights of each rank, whose bits must be the same.
    """

    command: str
    found: Callable[[str], dict[str, Any]] = _result
    saves: bool = False

    def key(self, seed: int) -> str:
        """Its name in the file of results."""
        return f"{self.command} --seed {seed}"

    def train(self, seed: int) -> dict[str, Any]:
        """Its figures; LaunchError if the ranks' weights differ."""
        words = shlex.split(self.key(seed))
        words.insert(next(i for i, word in enumerate(words) if word.endswith(".py")), sys.executable)
        with tempfile.TemporaryDirectory() as folder:
            words += ["--save", f"{folder}/weights"] if self.saves else []
            said = output_of(words, TIMEOUT_SECONDS, {"TF_CPP_MIN_LOG_LEVEL": "3"})
            replicas = [_weights(file) for file in sorted(Path(folder).iterdir())]
        if self.saves and (len(replicas) != 2 or replicas[0] != replicas[1]):
            raise LaunchError(f"{' '.join(words)}: the replicas differ")
        return self.found(said)


def _weights(file: Path) -> list[bytes]:
    """The bits of every array that a rank has saved."""
    if file.suffix == ".npz":
        return [array.tobytes() for array in np.load(file).values()]
    return [tensor.numpy().tobytes() for tensor in torch.load(file).values()]


@dataclass(frozen=True)
class Study:
    """A table.

    Args:
        page: that shows it.
        rows: by name, the jobs that are compared with each other.
        head: of the columns beside the name.
        cells: function of what the jobs of a row have found.
        caption: below it.
    """

    page: str
    rows: Mapping[str, tuple[Job, ...]]
    head: tuple[str, ...]
    cells: Callable[..., Sequence[str]]
    caption: str

    def jobs(self) -> list[Job]:
        """Every job, each once."""
        return list(dict.fromkeys(job for row in self.rows.values() for job in row))

    def table(self, name: str, kept: Mapping[str, Any]) -> str:
        """Of the seeds that every job has."""
        jobs = self.jobs()
        seeds = [n for n in range(100) if all(job.key(n) in kept for job in jobs)]
        if not seeds:
            return "No seed has all runs of this table yet."
        found = {job: [kept[job.key(n)] for n in seeds] for job in jobs}
        lines = [[row, *self.cells(*(found[job] for job in mine))] for row, mine in self.rows.items()]
        places = {(r["environment"]["processor"], r["environment"]["torch"]) for each in found.values() for r in each}
        others = f" Rows are of {len(places)} machines or versions." if len(places) > 1 else ""
        caption = f"{self.caption}; mean ± sd over {len(seeds)} seeds.{others}"
        return f"{markdown(self.head, lines)}\n\n{caption} Made by `python -m benchmarks.scripts {name}`."


def _example(script: str, compression: str, ranks: int = 2) -> tuple[Job, ...]:
    return (Job(f"horovodrun --gloo -np {ranks} examples/{script}.py --compression {compression}"),)


def _examples(choices: Mapping[str, str]) -> dict[str, tuple[Job, ...]]:
    return {
        f"{example}, {name}": _example(f"torch_{example}", compression)
        for example in ("digits", "lstm")
        for name, compression in choices.items()
    }


def _quality(runs: Found) -> list[str]:
    name, accuracy = runs[0]["quality_name"], runs[0]["quality_name"] == "accuracy"
    values = [run["quality"] * (100 if accuracy else 1) for run in runs]
    quality = f"{spread(values, '.2f')} %" if accuracy else f"{spread(values, '.3f')} {name}"
    return [quality, f"{statistics.mean(run['ratio'] for run in runs):.0f}×"]


def _of_settings(page: str, caption: str, rows: Mapping[str, tuple[Job, ...]]) -> Study:
    return Study(page, rows, ("", "quality", "less sent"), _quality, caption)


def _unmodified(script: str, *launchers: str, controller: str = "Gloo") -> tuple[Job, ...]:
    commands = [f"{launcher.format(CONTROLLERS[controller])} examples/unmodified_{script}" for launcher in launchers]
    return tuple(Job(command, _accuracy, saves=True) for command in commands)


def _existing() -> dict[str, tuple[Job, ...]]:
    script = "torch.py --fp16-allreduce"
    scripts = {
        "torch, fp16 flag": (script, STOCK, DGC),
        **{
            f"torch, clipping at {c}": (f"{script} --clip {c}", STOCK, f"{DGC} --dgc-clip-norm {c}")
            for c in ("1.0", "0.5")  # now and then, and in most steps
        },
        "Keras, model.fit": ("keras.py", DENSE_KERAS, DGC),
    }
    return {
        f"{name}, {controller}": _unmodified(*words, controller=controller)
        for name, words in scripts.items()
        for controller in CONTROLLERS
    }


def _gaps(runs: Found, others: Found) -> str:
    """Of pairs of the same seed, in points."""
    return spread([round(100 * (b["accuracy"] - a["accuracy"]), 6) for a, b in zip(runs, others, strict=True)], "+.2f")


def _accuracies(*columns: Found) -> list[str]:
    return [spread([100 * run["accuracy"] for run in column], ".2f") for column in columns]


def _existing_cells(dense: Found, dgc: Found) -> list[str]:
    less = statistics.mean(run["ratio"] for run in dgc)
    return [*_accuracies(dense, dgc), _gaps(dense, dgc), f"{less:.0f}×"]


_VALUES = (("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "8bit"), ("4bit", "8bit"), ("2bit", "8bit"))
_DEFAULT = "2 ranks, the examples' default settings"
_SAME_BITS = "the replicas of every run have the same bits"
STUDIES = {
    "examples": _of_settings(
        "examples/README.md", _DEFAULT,
        _examples({name: name for name in ("none", "fp16", "dgc", "topk", "gaussian")}),
    ),
    "keras": _of_settings(
        "examples/README.md", _DEFAULT,
        {
            **{f"model.fit, {x}": _example("keras_digits", x) for x in ("none", "fp16", "dgc", "gaussian")},
            **{f"own loop, {x}": _example("keras_loop", x) for x in ("none", "dgc")},
            "own loop, topk by the tape": _example("keras_loop", "topk --tape"),
        },
    ),
    "values": _of_settings(
        "docs/decisions/wire.md", "The examples on 2 ranks, compression dgc, their default settings",
        _examples({
            f"{values}, small tensors {dense}": f"dgc --values {values} --dense-values {dense}"
            for values, dense in _VALUES
        }),
    ),
    "clip-rule": _of_settings(
        "docs/algorithm.md", "The LSTM example on 4 ranks, c = 0.1, everything else at its default",
        {
            "dense, clipped at c": _example("torch_lstm", "none", ranks=4),
            "each rank clipped at sqrt(N)*c (ours)": _example("torch_lstm", "dgc --clip-norm 0.1", ranks=4),
            "at c": _example("torch_lstm", "dgc --clip-norm 0.05", ranks=4),
            "at c/sqrt(N) (the paper's letter)": _example("torch_lstm", "dgc --clip-norm 0.025", ranks=4),
        },
    ),
    "existing": Study(
        "examples/README.md", _existing(),
        ("accuracy, %", "dense", "dgc at density 0.01", "points", "less sent than fp32"), _existing_cells,
        f"2 ranks; points: of pairs of the same seed; {_SAME_BITS}",
    ),
    "keras-clipping": Study(
        "docs/tensorflow.md",
        {
            f"`model.fit`, `{name}=0.5`": _unmodified(
                f"keras.py --clip {name} --limit 0.5", DENSE_KERAS, DGC, f"{DGC} --dgc-clip-norm 0.5"
            )
            for name in ("global_clipnorm", "clipnorm")
        },
        ("accuracy, %", "dense", "script's clipping", "with `--dgc-clip-norm`", "difference of the two, points"),
        lambda dense, own, given: [*_accuracies(dense, own, given), _gaps(given, own)],
        f"`dgcrun --dgc --density 0.01`, 2 ranks; differences are of pairs of the same seed; {_SAME_BITS}",
    ),
}  # fmt: skip


def measure(options: argparse.Namespace) -> None:
    """Train what is not kept yet."""
    jobs = STUDIES[options.study].jobs()
    runs = {job.key(seed): partial(job.train, seed) for seed in range(options.seeds) for job in jobs}
    complete(options.file, runs, one_machine=False)


def texts() -> dict[tuple[Path, str], str]:
    """The table of every study, by page and marker."""
    kept = read_results(FILE)
    return {(ROOT / study.page, name): study.table(name, kept) for name, study in STUDIES.items()}


COMMAND = Benchmark(
    "scripts", __doc__ or "", measure,
    lambda options: STUDIES[options.study].table(options.study, read_results(options.file)), FILE,
    (argument("study", choices=STUDIES), argument("--seeds", type=int, default=3, help="runs of each job")),
)  # fmt: skip

if __name__ == "__main__":
    COMMAND.main()
