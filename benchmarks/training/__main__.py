"""Training on hosts behind slow links, dense and compressed: seconds per step and to a target quality."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks.netlab import NetlabError, lab, unavailable
from benchmarks.ranks import LaunchError, exit_on_signals
from benchmarks.report import OtherMachine, check_machine
from benchmarks.training import runs, tables
from benchmarks.training.tasks import STUDIED

EPILOG = """\
It needs root for the hosts' links, and about an hour on 2 cores that do nothing else. What has been run is
kept, so that a study that was stopped goes on; to measure anew: --file.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    shape = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        prog="python -m benchmarks.training", description=__doc__, epilog=EPILOG, formatter_class=shape
    )
    top.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="S", help="default: 0 1 2")
    top.add_argument("--tasks", nargs="+", choices=STUDIED, default=STUDIED, help="default: both")
    top.add_argument("--hosts", type=int, nargs="+", choices=runs.HOSTS, default=runs.HOSTS, help="default: both")
    top.add_argument(
        "--file", type=Path, default=runs.KEPT, help=f"of results (default: benchmarks/results/{runs.KEPT.name})"
    )
    top.add_argument("--table", action="store_true", help="run nothing, print the tables of what is kept")
    top.add_argument("--quick", action="store_true", help="a dozen steps, to see that it works; nothing is kept")
    return top


def measure(launches: Sequence[runs.Launch], file: Path) -> None:
    """Run what is not kept yet, all launches for one lab on one lab."""
    study = runs.load(file)
    check_machine(file, [study["environment"]] if study["runs"] else [])
    left = [found for launch in launches if (found := runs.missing(launch, study))]
    with tqdm(total=len(left), unit="launch", ncols=100) as bar:
        for (count, rate), group in itertools.groupby(left, lambda launch: (launch.hosts, launch.rate)):
            # without a lab: ranks of this machine, whose link is memory
            with contextlib.nullcontext() if rate == runs.UNSHAPED else lab(count, rate) as hosts:
                for launch in group:
                    bar.set_description(f"{launch.task}, {count} hosts, {rate}, seed {launch.seed}")
                    runs.keep(launch, hosts, file)
                    bar.update()


def quick() -> None:
    """A launch of seconds on a lab, or without one where none can be brought up."""
    if reason := unavailable():
        print(f"No shaped links here ({reason}): two ranks on this machine, unshaped.")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "training.json"
        measure([runs.quick(runs.UNSHAPED if reason else runs.FAST)], file)
        print(tables.study(runs.load(file)))
    print("\nA dozen steps: these figures mean nothing, they show that everything works.")


def main() -> None:
    """Do what the command line says."""
    options = parser().parse_args()
    exit_on_signals()
    try:
        if options.quick:
            quick()
            return
        if not options.table:
            if reason := unavailable():
                raise NetlabError(reason)
            plan = [each for each in runs.plan(options.seeds) if each.task in options.tasks]
            measure([each for each in plan if each.hosts in options.hosts], options.file)
        print(tables.study(runs.load(options.file)))
    except (NetlabError, LaunchError, OtherMachine) as error:
        raise SystemExit(f"benchmarks.training: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
