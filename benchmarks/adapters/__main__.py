"""Times both adapters on real ranks, in turns; prints a table, writes JSON and ``docs/benchmarks-kernels.md``."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from benchmarks.adapters.worker import ROWS
from benchmarks.ranks import found_in, output_of
from benchmarks.report import ROOT, markdown, save, write_into_page
from benchmarks.shapes import SHAPES

FRAMEWORKS = ("torch", "tensorflow")
TIMEOUT_SECONDS = 300
PAGE = ROOT / "docs" / "benchmarks-kernels.md"
PLAIN, _, COMPRESSED = ROWS


def measure(framework: str, model: str, ranks: int) -> dict[str, float]:
    """Milliseconds of each row, of one launch of `ranks` ranks."""
    command = ["horovodrun", "--gloo", "-np", str(ranks), sys.executable, "-m", "benchmarks.adapters.worker"]
    said = output_of(
        [*command, framework, model], TIMEOUT_SECONDS, {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    )
    return json.loads(found_in(said, r"RESULT (\{.*\})"))


def main() -> None:
    """Launch the frameworks in turns, so that both meet the same noise."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapters", description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="resnet50", help="whose shapes (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="on this machine (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, metavar="R", help="launches of each (default: %(default)s)")
    options = parser.parse_args()
    start = time.monotonic()
    launches: dict[str, list[dict[str, float]]] = {framework: [] for framework in FRAMEWORKS}
    for number in range(options.rounds):
        for framework in FRAMEWORKS:
            launches[framework].append(measure(framework, options.model, options.ranks))
            print(f"  round {number + 1}/{options.rounds}: {framework}", flush=True)
    medians = {
        framework: {row: statistics.median(launch[row] for launch in all_) for row in ROWS}
        for framework, all_ in launches.items()
    }
    for row in medians.values():
        row["overhead"] = row[COMPRESSED] - row[PLAIN]
    ratio = medians["tensorflow"]["overhead"] / medians["torch"]["overhead"]
    rows = [[name, *(f"{medians[f][name]:.1f}" for f in FRAMEWORKS)] for name in (*ROWS, "overhead")]
    rows[-1][0] = f"overhead: {COMPRESSED} − {PLAIN}"
    caption = (
        f"{options.model}, density 0.1%, {options.ranks} ranks of one thread on one machine over Gloo, milliseconds; "
        f"medians of {options.rounds} launches. Made by `python -m benchmarks.adapters`."
    )
    text = f"{markdown(['ms', 'PyTorch', 'TensorFlow, Keras 3'], rows)}\n\n{caption}"
    print(f"\n{text}\n\nadapters: {time.monotonic() - start:.0f} s")
    save("adapters", {"options": vars(options), "medians": medians, "ratio": ratio, "launches": launches})
    write_into_page(PAGE, "adapters", text)


if __name__ == "__main__":
    main()
