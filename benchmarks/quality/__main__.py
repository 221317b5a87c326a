"""Trains three small models dense and compressed, part by part, and keeps how well each does."""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

from benchmarks.quality import runs, selection, selection_tables, tables
from benchmarks.quality.training import Run
from benchmarks.ranks import LaunchError, exit_on_signals
from benchmarks.report import OtherMachine, read_results

STUDIES = (*runs.STUDIES, "selection")
QUICK_LENGTH = 0.02
EPILOG = """\
studies:
  ablation    DGC part by part, rules, codecs and densities; 4 and 8 ranks, three tasks
  longer      the gap to dense training in runs of 1, 4 and 10 times the length
  lowest      what brings the LSTM at density 0.1% closer to dense training; up to 30 times the length
  optimizers  Nesterov's momentum and AdamW
  adam        AdamW at several densities, 4 to 32 ranks; 1, 4 and 10 times the length
  adam-gpt    the same for a GPT of 5.1 M parameters, four ranks
  local       AdamW with local steps, averaged and compressed, from the start and after dense steps
  gpt         the same for a GPT of 5.1 M parameters, beside PowerSGD
  auto        runs of 300 and of 30,000 steps at the density that --compression auto takes for them
  real        some of the runs on Horovod's own ranks; the others are simulated in one process
  exchanges   nodes and shards of 16, 32 and 64 workers, beside a flat exchange of as many bytes
  longer-exchanges  the same at 4 times the length
  selection   what top-k and the Gaussian rule leave behind, on vectors and on gradients

All but gpt take a day on two cores, gpt ten hours. What has been run is kept, so that a study that was stopped goes
on; to measure anew: --file. `python -m benchmarks.page` makes docs/quality.md of it. The studies of AdamW at each step
have a file of their own, which that page reads:

  python -m benchmarks.quality adam adam-gpt --file benchmarks/results/quality-adam.json.xz
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m benchmarks.quality",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument(
        "studies", nargs="*", choices=[*STUDIES, "all"], default="all", metavar="STUDY", help="default: all"
    )
    top.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="S", help="default: 0 1 2")
    top.add_argument("--processes", type=int, default=os.cpu_count(), metavar="P", help="default: %(default)s")
    top.add_argument(
        "--file", type=Path, default=runs.KEPT, help=f"of results (default: benchmarks/results/{runs.KEPT.name})"
    )
    top.add_argument("--table", action="store_true", help="run nothing, print the tables of what is kept")
    top.add_argument("--quick", action="store_true", help="a few steps of each kind, to see that it works")
    return top


def quick() -> None:
    """A few steps of each kind; nothing is kept."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "quality.json"
        plan = [Run("lstm", variant, 2, length=QUICK_LENGTH) for variant in ("dense", "+ residual (TopK-SGD)", "dgc")]
        runs.complete([*plan, replace(plan[-1], real=True)], file, processes=1)
        print(tables.every_run(runs.load(file)))
    print(f"\n{selection_tables.vectors(selection.vectors(draws=1))}\n")
    print(
        selection_tables.gradients(
            {"images, TopK-SGD": selection.gradients("images", "+ residual (TopK-SGD)", steps=9)}
        )
    )
    print("\nA few steps: these figures mean nothing, they show that everything works.")


def of_other_settings(file: Path, kept: runs.Results) -> int:
    """How many runs `file` has that `runs.load` leaves out."""
    return len(read_results(file)["runs"]) - len(kept) if file.exists() else 0


def main() -> None:
    """Do what the command line says."""
    top = parser()
    options = top.parse_args()
    if options.processes < 1:
        top.error(f"--processes must be 1 or more, got {options.processes}")
    studies = STUDIES if "all" in options.studies else options.studies
    exit_on_signals()
    try:
        if options.quick:
            quick()
            return
        if not options.table:
            plans = [runs.STUDIES[name](options.seeds) for name in studies if name in runs.STUDIES]
            runs.complete(itertools.chain(*plans), options.file, options.processes)
            if "selection" in studies:
                selection.complete(selection.beside(options.file))
        kept = runs.load(options.file)
        print(tables.every_run(kept) or f"Nothing is kept in {options.file} yet.")
        if left_out := of_other_settings(options.file, kept):
            print(f"\n{left_out} more runs in {options.file} are of other settings than today's: they are left out.")
    except (LaunchError, OtherMachine, BrokenProcessPool, ModuleNotFoundError) as error:
        raise SystemExit(f"benchmarks.quality: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
