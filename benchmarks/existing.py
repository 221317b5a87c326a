"""Scripts that nobody has edited, dense and under ``dgcrun --dgc``: ``python -m benchmarks.existing``.

Trains examples/unmodified_torch.py (with fp16 allreduce; and with clipping at c) and examples/unmodified_keras.py on
two ranks, over Gloo and over MPI, and compares the accuracies; every run's two replicas must have the same bits.
Prints a table and puts it into examples/README.md. About 15 minutes on 2 cores. Every run is kept in
``benchmarks/results/existing.json``, so that a study that was stopped goes on; remove the file to measure anew.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.quality.tables import spread
from benchmarks.ranks import found_in, output_of
from benchmarks.report import RESULTS, ROOT, markdown, remembered, write_into_page

KEPT = RESULTS / "existing.json"
CLIPS = ("1.0", "0.5")  # now and then, and in most steps
DENSITY = "0.01"
CONTROLLERS = {"Gloo": ["--gloo"], "MPI": ["--mpi", "--mpi-args=--oversubscribe --allow-run-as-root"]}
RUN_TIMEOUT_SECONDS = 300


class Script(NamedTuple):
    """An unedited script: how it is called, and the launchers of its dense and of its compressed run."""

    name: str
    command: tuple[str, ...]
    dense: tuple[str, ...]
    compressed: tuple[str, ...]


_DGC = ("dgcrun", "--dgc", "--density", DENSITY)
SCRIPTS = (
    Script("torch, fp16 flag", ("unmodified_torch.py", "--fp16-allreduce"), ("horovodrun",), _DGC),
    *(
        Script(
            f"torch, clipping at {c}",
            ("unmodified_torch.py", "--fp16-allreduce", "--clip", c),
            ("horovodrun",),
            (*_DGC, "--dgc-clip-norm", c),
        )
        for c in CLIPS
    ),
    # plain horovodrun cannot train it under Keras 3
    Script("Keras, model.fit", ("unmodified_keras.py",), ("dgcrun", "--compression", "none"), _DGC),
)


def run(launcher: tuple[str, ...], controller: str, command: tuple[str, ...], seed: int) -> dict[str, Any]:
    """What `train` gives: from the file of results, or now."""
    key = " ".join([launcher[0], controller, *launcher[1:], *command, "--seed", str(seed)])
    return remembered(KEPT, key, lambda: train(launcher, controller, command, seed))


def train(launcher: tuple[str, ...], controller: str, command: tuple[str, ...], seed: int) -> dict[str, Any]:
    """One run on two ranks: its accuracy, and what its summary line says of the bytes."""
    with tempfile.TemporaryDirectory() as folder:
        script = [sys.executable, f"examples/{command[0]}", *command[1:], "--seed", str(seed), "--save", f"{folder}/w"]
        words = [launcher[0], *CONTROLLERS[controller], "-np", "2", *launcher[1:], *script]
        said = output_of(words, RUN_TIMEOUT_SECONDS, {"TF_CPP_MIN_LOG_LEVEL": "3"})
        replicas = [_weights(file) for file in sorted(Path(folder).iterdir())]
    if len(replicas) != 2 or replicas[0] != replicas[1]:
        sys.exit(f"{' '.join(words)}: the replicas differ")
    ratio = re.search(r"(\S+)x less than fp32", said)
    return {"accuracy": float(found_in(said, r"accuracy (\d\.\d+)")), "ratio": float(ratio[1]) if ratio else None}


def _weights(file: Path) -> list[bytes]:
    """The bits of every array that a rank has saved."""
    if file.suffix == ".npz":
        return [array.tobytes() for array in np.load(file).values()]
    return [tensor.numpy().tobytes() for tensor in torch.load(file).values()]


def main() -> None:
    """Run everything."""
    from tqdm import tqdm

    parser = argparse.ArgumentParser(prog="python -m benchmarks.existing", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (default: %(default)s)")
    seeds = range(parser.parse_args().seeds)
    runs = [(script, controller) for script in SCRIPTS for controller in CONTROLLERS]
    rows = []
    with tqdm(total=2 * len(runs) * len(seeds), unit="run") as bar:
        for script, controller in runs:
            found: dict[str, list[dict[str, Any]]] = {"dense": [], "dgc": []}
            for seed in seeds:
                for kind, launcher in (("dense", script.dense), ("dgc", script.compressed)):
                    found[kind].append(run(launcher, controller, script.command, seed))
                    bar.update()
            dense, dgc = ([100 * run["accuracy"] for run in each] for each in found.values())
            gaps = [round(b - a, 6) for a, b in zip(dense, dgc, strict=True)]
            less = statistics.mean(run["ratio"] for run in found["dgc"])
            shown = [spread(dense, ".2f"), spread(dgc, ".2f"), spread(gaps, "+.2f")]
            rows.append([f"{script.name}, {controller}", *shown, f"{less:.0f}×"])
    text = markdown(["accuracy, %", "dense", f"dgc at density {DENSITY}", "points", "less sent than fp32"], rows)
    text += (
        f"\n\n2 ranks, mean ± sd of {len(seeds)} seeds (of the points: of pairs of the same seed); the two replicas of "
    )
    text += "every run have the same bits."
    print(text)
    write_into_page(ROOT / "examples/README.md", "existing", f"{text} Made by `python -m benchmarks.existing`.")


if __name__ == "__main__":
    main()
