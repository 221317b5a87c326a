"""Trains three small models dense and compressed, part by part, and keeps how well each does.

studies:
  ablation    DGC part by part, rules, codecs and densities; 4 and 8 ranks, three tasks
  longer      the gap to dense training in runs of 1, 4 and 10 times the length
  lowest      what brings the LSTM at density 0.1% closer to dense training; up to 30 times the length
  optimizers  Nesterov's momentum, AdamW, RMSprop, Adafactor, Lion, Muon
  adam        AdamW at several densities, 4 to 32 ranks; 1, 4 and 10 times the length
  adam-gpt    the same for a GPT of 5.1 M parameters, four and eight ranks
  adam-local  AdamW with local steps, by the momentum of the inner optimizer
  local       AdamW with local steps, averaged and compressed, from the start and after dense steps
  gpt         the same for a GPT of 5.1 M parameters, beside PowerSGD
  auto        runs of 300 to 30,000 steps at the density that --compression auto takes for them
  exchanges   nodes and shards of 16, 32 and 64 workers, beside a flat exchange of as many bytes
  longer-exchanges  the same at 4 times the length

All but gpt take a day on two cores, gpt ten hours. What has been run is kept, so that a study that was stopped goes
on; to measure anew: --file. `python -m benchmarks.page` makes docs/quality.md of it. The studies adam,
adam-gpt and adam-local have a file of their own, which that page reads:

  python -m benchmarks.quality adam adam-gpt adam-local --file benchmarks/results/quality-adam.json.xz
"""

from __future__ import annotations

import argparse
import itertools
import os
from dataclasses import replace

from benchmarks.command import Benchmark, argument
from benchmarks.quality import runs, tables
from benchmarks.quality.training import Run
from benchmarks.report import read_results

SEEDS, QUICK_LENGTH = (0, 1, 2), 0.02


def measure(options: argparse.Namespace) -> None:
    """Do what is not kept yet of the studies; to be quick a few steps of each kind."""
    if options.quick:
        plan = [Run("lstm", name, 2, length=QUICK_LENGTH) for name in ("dense", "+ residual (TopK-SGD)", "dgc")]
        runs.complete([*plan, replace(plan[-1], real=True)], options.file, processes=1)
        return
    studies = runs.STUDIES if "all" in options.studies else options.studies
    plans = (runs.STUDIES[name](SEEDS) for name in studies)
    runs.complete(itertools.chain(*plans), options.file, os.cpu_count() or 1)


def table(options: argparse.Namespace) -> str:
    """Every run that is kept, and how many are of other settings than today's."""
    kept = runs.load(options.file)
    others = len(read_results(options.file)) - len(kept)
    said = f"\n\n{others} more runs are of other settings than today's: they are left out." if others else ""
    return tables.every_run(kept) + said


COMMAND = Benchmark(
    "quality", __doc__ or "", measure, table, runs.KEPT,
    (argument("studies", nargs="*", choices=[*runs.STUDIES, "all"], default="all", metavar="STUDY", help="see below"),),
    quick=True,
)  # fmt: skip

if __name__ == "__main__":
    COMMAND.main()
