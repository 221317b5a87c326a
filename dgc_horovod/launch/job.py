"""One job of `dgcrun`: the hosts are checked, Horovod's launcher runs it, and its end is looked at."""

from __future__ import annotations

import sys
import threading
from argparse import Namespace

from horovod.runner.util import network

from dgc_horovod import envvars, tools
from dgc_horovod.launch import activation_check, hosts, launcher, reports, settings, summary
from dgc_horovod.launch.child import Child
from dgc_horovod.launch.inputs import Ssh
from dgc_horovod.launch.settings import Job
from dgc_horovod.launch.status_server import StatusServer

_QUIET_SECONDS = 120.0  # after which a job of which nobody has heard is worth a word
_MISSED_REPORTS = 3.0  # intervals without a word of rank 0, after which it is taken to have been out of reach


def run_job(args: Namespace, job: Job, ssh: Ssh) -> int:
    """Run a job to its end; returns its exit code.

    Args:
        args: Horovod's parsed arguments.
        job: resolved settings of the job.
        ssh: way in which the hosts are reached.

    Raises:
        ConfigError: some host is not fit for it; nothing was started.
    """
    slots = hosts.host_slots(args)
    envvars.put_into_environment({**job.variables(), envvars.HOSTS.name: slots, **_nodes(job, slots, args.num_proc)})
    if not job.active:
        print(f"dgcrun: {settings.show(job).splitlines()[0]}", file=sys.stderr)
        return launcher.run(args)
    envvars.put_on_path(hosts.check(slots, args.command, ssh))

    def work(told: str) -> int:
        place, key = told.split()
        envvars.put_into_environment({envvars.STATUS_SERVER.name: place, envvars.STATUS_KEY.name: key})
        return launcher.run(args)

    child = Child(work)
    status = StatusServer()  # after the fork: its thread would not survive one
    description = summary.describe(args, job, slots)
    status.put(summary.RUN, description)
    status.put(summary.END, None)  # it has its place, whoever may fill all others
    quiet = threading.Timer(_QUIET_SECONDS, _say_if_quiet, (status,))
    quiet.daemon = True
    quiet.start()
    child.tell(f"{status.place(_own_addresses(slots))} {status.key}")
    code = child.wait(lambda: status.get_all(summary.GIVEN_UP).values())
    quiet.cancel()
    status.close()
    if args.report:
        tools.load("report.command").write_page(job, args.report, description)
    if code and status.get(activation_check.verdict(0)):
        _say("dgcrun: compression was not active on every rank, so every rank was stopped: see NotActivated above")
    return code or _look_at_the_end(status, job, args.num_proc or 1)


def _nodes(job: Job, slots: str, workers: int | None) -> dict[str, str]:
    """The number of workers of a node, which every rank must know alike before Horovod starts, if it is wanted."""
    config = job.config
    if config is None or not config.may_use_nodes or config.node_size is not None or not (slots and workers):
        return {}
    size = hosts.ranks_a_host(slots, workers)
    return {envvars.NODE_SIZE.name: str(size)} if size else {}


def _own_addresses(slots: str) -> list[str]:
    """Of this machine, those first by which the hosts are reached."""
    likely = [hosts.own_address_towards(name) for name in hosts.names_of(slots)]
    others = sorted(network.get_local_host_addresses()) if "" in likely or not likely else []
    return list(dict.fromkeys([*filter(None, likely), *others]))


def _say_if_quiet(status: StatusServer) -> None:
    if not status.heard_of:
        _say(
            f"dgcrun: for {_QUIET_SECONDS:.0f} s no rank has called hvd.init() with compression on; if the script "
            "should have by now, it trains uncompressed (PYTHONPATH reset? another Python?)"
        )


def _look_at_the_end(status: StatusServer, job: Job, workers: int) -> int:
    """The exit code of a job that has ended without an error: was it compressed?

    A rank 0 that cannot reach us ends with an error by itself where nothing was compressed: its silence proves nothing.
    """
    if job.method == "none":
        return 0
    end = status.get(summary.END)
    said = end.get("inactive") if isinstance(end, dict) else None
    if isinstance(said, str):  # rank 0 has told the user itself
        reason = said
    elif not status.heard_of:
        reason = (
            "no rank has called hvd.init() of horovod.torch or horovod.tensorflow in a Python that ran dgc_horovod's "
            f"sitecustomize (or none can reach port {status.port} of this machine)"
        )
    elif _has_wrapped(status):
        reason = ""
        _say("dgc_horovod: no summary: rank 0 has ended without Python's exit handlers (os._exit)")
    elif (silent := _silence_of_rank_0(status)) > _MISSED_REPORTS * reports.interval(workers):
        reason = ""
        _say(
            f"dgcrun: rank 0 was out of reach for the last {silent:.0f} s, so whether the job was compressed is not "
            "known here; its own last line says it"
        )
    else:
        reason = summary.OF_HOROVOD.wrapped
    if reason and reason != said:
        _say(f"dgc_horovod: {summary.not_active(job, reason)}")
    return summary.EXIT_INACTIVE if reason and not job.get(envvars.ALLOW_INACTIVE) else 0


def _has_wrapped(status: StatusServer) -> bool:
    """Whether rank 0 has told of an optimizer of ours, or any rank of steps that one has made."""
    told = [figures for figures in status.get_all(reports.PREFIX).values() if isinstance(figures, dict)]
    return bool(status.get(summary.WRAPPED)) or any(figures.get("timed_steps") for figures in told)


def _silence_of_rank_0(status: StatusServer) -> float:
    """Seconds since it has last told something; while it can, it does so at each interval of the reports."""
    keys = (activation_check.present(0, 0), summary.WRAPPED, reports.figures_of(0))
    return min(map(status.silent_for, keys))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
