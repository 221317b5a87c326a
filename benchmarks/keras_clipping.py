"""Keras scripts that clip and that nobody has edited, under ``dgcrun``: ``python -m benchmarks.keras_clipping``.

Trains examples/unmodified_keras.py, with ``model.fit``, on two ranks: dense, compressed as it is, and compressed
with the limit given by hand (``--dgc-clip-norm``). Every run's two replicas must have the same bits. Prints
a table and puts it into docs/tensorflow.md. About 10 minutes on 2 cores. Every run is kept in
``benchmarks/results/keras-clipping.json``, so that a study that was stopped goes on; remove the file to measure anew.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from benchmarks.existing import train
from benchmarks.quality.tables import spread
from benchmarks.ranks import exit_on_signals
from benchmarks.report import RESULTS, ROOT, markdown, remembered, write_into_page

KEPT = RESULTS / "keras-clipping.json"
DENSITY = "0.01"
SCRIPT = "unmodified_keras.py"


class Row(NamedTuple):
    """How the script clips, in words, its options, and their limit."""

    name: str
    options: tuple[str, ...]
    limit: str


ROWS = (
    Row("`model.fit`, `global_clipnorm=0.5`", ("--clip", "global_clipnorm"), "0.5"),
    Row("`model.fit`, `clipnorm=0.5`", ("--clip", "clipnorm"), "0.5"),
)


def accuracy(launcher: tuple[str, ...], options: tuple[str, ...], seed: int) -> float:
    """Of one run on two ranks, in per cent: from the file of results, or measured now."""
    command = (SCRIPT, *options)
    key = " ".join([*launcher, *command, "--seed", str(seed)])
    return 100 * float(remembered(KEPT, key, lambda: train(launcher, "Gloo", command, seed))["accuracy"])


def main() -> None:
    """Run everything."""
    exit_on_signals()
    from tqdm import tqdm

    parser = argparse.ArgumentParser(prog="python -m benchmarks.keras_clipping", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (default: %(default)s)")
    seeds = range(parser.parse_args().seeds)
    rows = []
    with tqdm(total=3 * len(ROWS) * len(seeds), unit="run") as bar:
        for row in ROWS:
            dgc = ("dgcrun", "--dgc", "--density", DENSITY)
            columns: list[list[float]] = []
            for launcher in (("dgcrun", "--compression", "none"), dgc, (*dgc, "--dgc-clip-norm", row.limit)):
                found = []
                for seed in seeds:
                    found.append(accuracy(launcher, (*row.options, "--limit", row.limit), seed))
                    bar.update()
                columns.append(found)
            between = [round(own - given, 6) for own, given in zip(*columns[1:], strict=True)]
            rows.append([row.name, *(spread(column, ".2f") for column in columns), spread(between, "+.2f")])
    text = markdown(["accuracy, %", "dense", "as it is", "with `--dgc-clip-norm`", "points between the two"], rows)
    text += (
        f"\n\nUnder `dgcrun --dgc --density {DENSITY}`, 2 ranks, mean ± sd of {len(seeds)} seeds (between the two: of "
    )
    text += "pairs of the same seed); the replicas of every run have the same bits. Made by "
    text += "`python -m benchmarks.keras_clipping`."
    print(text)
    write_into_page(ROOT / "docs/tensorflow.md", "keras-clipping", text)


if __name__ == "__main__":
    main()
