"""Training on hosts behind slow links, dense and compressed: seconds per step and to a target quality.

It needs root for the hosts' links, and about an hour on 2 cores that do nothing else. What has been run is
kept, so that a study that was stopped goes on; to measure anew: --file.
"""

from __future__ import annotations

import argparse
import itertools

from benchmarks.command import Benchmark, argument
from benchmarks.netlab import unavailable
from benchmarks.ranks import HERE, hosts_at, launch
from benchmarks.report import check_machine, environment, write_results
from benchmarks.training import analysis, runs
from benchmarks.training.runs import HOSTS, KEPT, Launch, load
from benchmarks.training.tasks import STUDIED

LAUNCH_SECONDS, STEP_SECONDS = 90, 4  # far more than any takes; then it is killed


def measure(options: argparse.Namespace) -> None:
    """Run what is not kept yet, all launches for one lab on one lab."""
    from tqdm import tqdm

    study = load(options.file)
    check_machine(options.file, [study["environment"]] if study["runs"] else [])
    launches = options.launches or runs.plan(options.seeds, options.tasks, options.hosts)
    left = [found for each in launches if (found := each.missing(study["runs"]))]
    with tqdm(total=len(left), unit="launch", ncols=100) as bar:
        for (count, rate), group in itertools.groupby(left, lambda each: (each.hosts, each.rate)):
            with hosts_at(count, rate) as hosts:
                if hosts and f"{count} hosts, {rate}" not in study["links"]:
                    study["links"][f"{count} hosts, {rate}"] = round(hosts.one_way())
                for each in group:
                    bar.set_description(f"{each.task}, {count} hosts, {rate}, seed {each.seed}")
                    seconds = LAUNCH_SECONDS + STEP_SECONDS * sum(steps for _, steps in each.methods)
                    order = {"task": each.task, "seed": each.seed, "methods": each.methods}
                    found = launch("benchmarks.training.worker:rank", order, count, hosts, seconds)[0]
                    keys = [each.key(*run) for run in each.methods]
                    study["runs"].update(zip(keys, found, strict=True))
                    study["runs"] = dict(sorted(study["runs"].items()))
                    write_results(options.file, {**study, "environment": environment()})
                    bar.update()


def quick(options: argparse.Namespace) -> None:
    """One launch of a narrow model, on a lab or without one where none can be brought up."""
    if reason := unavailable():
        print(f"No shaped links here ({reason}): two ranks on this machine.")
    options.launches = [Launch.quick(HERE if reason else runs.FAST)]


COMMAND = Benchmark(
    "training", __doc__ or "", measure, lambda options: analysis.study(load(options.file)), KEPT,
    (
        argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="S", help="of the runs"),
        argument("--tasks", nargs="+", choices=STUDIED, default=STUDIED, help="what is trained"),
        argument("--hosts", type=int, nargs="+", choices=HOSTS, default=HOSTS, help="numbers of hosts"),
        lambda parser: parser.set_defaults(launches=()),
    ),
    quick,
)  # fmt: skip

if __name__ == "__main__":
    COMMAND.main()
