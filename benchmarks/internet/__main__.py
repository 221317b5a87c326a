"""A GPT of 5.1 M parameters on two hosts behind a slow link with delay: AdamW, dense and with local steps."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import ranks
from benchmarks.internet import tables
from benchmarks.internet.tables import DENSE, PER_STEP
from benchmarks.internet.worker import NO_OP
from benchmarks.netlab import Lab, NetlabError, lab
from benchmarks.quality.processes import pool
from benchmarks.quality.training import Run, train
from benchmarks.quality.variants import AVERAGED, LOCAL, LOCAL_DENSER
from benchmarks.ranks import LaunchError, exit_on_signals
from benchmarks.report import environment, read_results, write_results

HOSTS, POINTS = 2, 20  # points of a curve: when a loss is reached is read from it
TIMED_STEPS = 60  # of each run behind the link: whole rounds
DENSE_STEPS = 12  # there, at 5 s each
_SECONDS = 7200
Results = dict[str, dict[str, Any]]  # by name of the variant
EPILOG = """\
What a run learns is the same behind any link: it is simulated, each run by a process. Its seconds are its steps times
the time of one by real ranks behind the link. That needs root. It takes some five hours a seed on 2 cores; what is
learnt is kept, so that a study that was stopped goes on.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.internet", description=__doc__, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("--rate", default="50mbit", metavar="R", help="of each link (default: %(default)s)")
    made.add_argument("--delay", default="40ms", metavar="D", help="from host to host (default: %(default)s)")
    made.add_argument("--loss", default="0%", metavar="L", help="of packets (default: %(default)s)")
    made.add_argument("--task", default="gpt", metavar="T", help="of benchmarks.quality (default: %(default)s)")
    made.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="S", help="default: 0")
    made.add_argument("--steps", type=int, metavar="S", help="of each run (default: whole runs)")
    made.add_argument("--file", type=Path, default=tables.FILE, help="of results (default: benchmarks/results/...)")
    return made


def learn(options: argparse.Namespace, seed: int, kept: Results, keep: Callable[[], None]) -> None:
    """Train what a study of a seed has not kept yet."""
    left = [run for run in (_run(options, name, seed) for name in tables.TRAINED) if run.variant not in kept]
    with tqdm(total=len(left), unit="run", ncols=100) as bar, pool(os.cpu_count() or 1) as processes:
        futures = {processes.submit(train, run, steps=options.steps, points=POINTS): run for run in left}
        for future in as_completed(futures):
            kept[futures[future].variant] = future.result()
            keep()
            bar.update()


def measure(options: argparse.Namespace, seed: int) -> tuple[float, Results]:
    """What the link carries, and the first steps of the runs of a seed behind it, by name."""
    names = (DENSE, PER_STEP, *AVERAGED, *LOCAL, *LOCAL_DENSER)
    with lab(HOSTS, options.rate, 1, options.delay, options.loss) as hosts:
        link = round(hosts.one_way(), 1)
        orders = [{**_order(options, DENSE, seed, TIMED_STEPS), "exchanges": False}]
        orders += [_order(options, name, seed, DENSE_STEPS if name == DENSE else TIMED_STEPS) for name in names]
        return link, dict(zip([NO_OP, *names], _launch(orders, hosts), strict=True))


def _run(options: argparse.Namespace, variant: str, seed: int) -> Run:
    return Run(options.task, variant, HOSTS, seed)


def _order(options: argparse.Namespace, variant: str, seed: int, most: int) -> dict[str, Any]:
    run = replace(_run(options, variant, seed), real=True)
    return {"run": asdict(run), "steps": min(options.steps or run.steps, most), "exchanges": True}


def _launch(orders: Sequence[dict[str, Any]], hosts: Lab) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        words = [str(file), *map(json.dumps, orders)]
        ranks.launch("benchmarks.internet.worker", words, HOSTS, hosts, _SECONDS)
        found: list[dict[str, Any]] = json.loads(file.read_text())
    return found


def main() -> None:
    """Do what the command line says."""
    options = parser().parse_args()
    exit_on_signals()
    where = f"{options.task}, {options.rate}, {options.delay}, {options.loss}"
    kept = read_results(options.file) if options.file.exists() else {}

    def keep() -> None:
        write_results(options.file, json.dumps(dict(sorted(kept.items()))) + "\n")

    try:
        for seed in options.seeds:
            key, began = f"{where}, seed {seed}", {"environment": environment(), "steps": options.steps}
            if any(kept.get(key, {}).get(name) != value for name, value in began.items()):
                kept[key] = {**began, "learnt": {}}
            found = kept[key]
            learn(options, seed, found["learnt"], keep)
            found["link"], found["timed"] = measure(options, seed)
            keep()
    except (NetlabError, LaunchError, BrokenProcessPool) as error:
        raise SystemExit(f"benchmarks.internet: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print(tables.sooner(read_results(options.file)))


if __name__ == "__main__":
    main()
