"""Unmodified scripts that clip, dense, compressed, and compressed with their threshold given by hand.

Trains `script.py` on two ranks, prints a table and puts it into docs/quality.md. Ten minutes on 2 cores. Every run
is kept in ``benchmarks/results/clipping.json``; remove the file to measure anew.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from benchmarks.clipping.script import CHOICES
from benchmarks.ranks import found_in, output_of
from benchmarks.report import RESULTS, ROOT, markdown, remembered, write_into_page

KEPT = RESULTS / "clipping.json"
IDIOMS = {"after": "after synchronize()", "before": "before step()"}
_DGC = ("dgcrun", "--dgc", "--density", "0.01")
_TIMEOUT_SECONDS = 300


def loss(launcher: tuple[str, ...], task: str, idiom: str, seed: int) -> float:
    """Of one run, on text that the model was not trained on: from the file of results, or now."""
    words = [launcher[0], "--gloo", "-np", "2", *launcher[1:], sys.executable, "-m", "benchmarks.clipping.script"]
    words += [task, idiom, str(seed)]
    key = " ".join([*launcher, task, idiom, str(seed)])
    run = remembered(
        KEPT, key, lambda: {"loss": float(found_in(output_of(words, _TIMEOUT_SECONDS, {}), r"loss (\d\S+)"))}
    )
    return float(run["loss"])


def table(seeds: range) -> str:
    """A row for each script: mean losses, and how far the script alone is from its threshold given by hand."""
    rows = []
    for task, (clip, _) in CHOICES.items():
        optimizer = "SGD" if task == "lstm" else "AdamW"
        dense = [loss(("horovodrun",), task, "after", seed) for seed in seeds]
        for idiom, words in IDIOMS.items():
            given = [loss((*_DGC, "--dgc-clip-norm", str(clip)), task, idiom, seed) for seed in seeds]
            alone = [loss(_DGC, task, idiom, seed) for seed in seeds]
            gaps = [a - b for a, b in zip(alone, given, strict=True)]
            gap = f"{statistics.mean(gaps):+.3f} ± {statistics.stdev(gaps):.3f}" if len(gaps) > 1 else f"{gaps[0]:+.3f}"
            means = [f"{statistics.mean(each):.3f}" for each in (dense, given, alone)]
            rows.append([f"{task}, {optimizer}, clips to {clip:g} {words}", *means, gap])
    head = ["loss in nats", "dense, clips after synchronize()", "--dgc-clip-norm c", "--dgc alone", "difference"]
    return markdown(head, rows)


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clipping", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (default: %(default)s)")
    seeds = range(parser.parse_args().seeds)
    text = table(seeds)
    print(text)
    text += f"\n\n2 ranks, density 1%, mean of {len(seeds)} seeds. Made by `python -m benchmarks.clipping`."
    write_into_page(ROOT / "docs/quality.md", "clipping", text)


if __name__ == "__main__":
    main()
