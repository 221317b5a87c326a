"""Jobs of Horovod's launcher: hosts are checked, and it runs as it is but for three names that are replaced meanwhile.

- The key of the status server stands on no command line, where ``ps`` would show it to every user of every host. Over
  Gloo, Horovod writes the environment into the lines that start ranks: ``ssh HOST 'env NAME=VALUE ... python'``. It is
  left out of them. A rank on this host inherits it; for another host it goes to ssh's standard input, where a shell
  of that host reads it. mpirun is told names only, and sends the values itself.
- The names that a discovery script prints go to ssh as those of ``-H`` do, and are checked like them.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import sys
import types
from argparse import Namespace
from collections.abc import Callable, Iterator

import horovod
from horovod.common import util
from horovod.runner import gloo_run, launch
from horovod.runner.common.util import config_parser
from horovod.runner.common.util import env as horovod_env
from horovod.runner.elastic.discovery import HostDiscoveryScript
from horovod.runner.util import network

from dgc_horovod import envvars
from dgc_horovod.errors import ConfigError
from dgc_horovod.launch import activation_check, hosts, reports, summary
from dgc_horovod.launch import job as one_job
from dgc_horovod.launch.inputs import Ssh, check_place, checked_slots
from dgc_horovod.launch.settings import Job
from dgc_horovod.launch.status_server import StatusServer
from dgc_horovod.names import replaced

_KEY = envvars.STATUS_KEY.name
_NEEDED = (
    (launch, ("parse_args", "_run", "argparse", "discovery", "is_gloo_used", "_is_elastic")),
    (gloo_run, ("get_remote_command", "env_util")),
    (config_parser, ("set_args_from_config",)),
)
_MISSED_REPORTS = 3.0  # intervals without a word of rank 0, after which it is taken to have been out of reach
_IF_QUIET = (
    f"dgcrun: for {one_job.QUIET_SECONDS:.0f} s no rank has called hvd.init() with compression on; if the script "
    "should have by now, it trains uncompressed (PYTHONPATH reset? another Python?)"
)


def check_horovod() -> None:
    """Raise ConfigError if Horovod's launcher is not laid out as we know it."""
    missing = [name for module, names in _NEEDED for name in names if not hasattr(module, name)]
    if missing:
        raise ConfigError(
            f"Horovod {horovod.__version__} is not laid out as 0.28.1 is (its launcher lacks {', '.join(missing)}); "
            "install 0.28.1, or use horovodrun with what dgcrun --print-env prints"
        )


def run_job(args: Namespace, job: Job, ssh: Ssh) -> int:
    """Run a job to its end; returns its exit code.

    Args:
        args: Horovod's parsed arguments, as `inputs.make_safe` left them.
        job: resolved settings of the job.
        ssh: way in which the hosts are reached.

    Raises:
        ConfigError: some host is not fit for it; nothing was started.
    """
    slots, addresses = hosts.host_slots(args), []
    envvars.put_into_environment({**job.variables(), envvars.HOSTS.name: slots, **_nodes(job, slots, args.num_proc)})
    if job.active:
        envvars.put_on_path(hosts.check(slots, args.command, ssh))
        addresses = _own_addresses(slots)

    def why_silent(status: StatusServer) -> str:
        return why_uncompressed(status, args.num_proc or 1)

    launcher = one_job.Launcher(lambda: _run(args), "stock Horovod", addresses, why_silent, _IF_QUIET)
    return one_job.run(args, job, slots, launcher)


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


def why_uncompressed(status: StatusServer, workers: int) -> str:
    """Why nothing was compressed in a job that has ended without a word of rank 0; "" where something was.

    A rank 0 that cannot reach us ends with an error by itself where nothing was compressed: its silence proves nothing.
    """
    if not status.heard_of:
        return (
            "no rank has called hvd.init() of horovod.torch or horovod.tensorflow in a Python that ran dgc_horovod's "
            f"sitecustomize (or none can reach port {status.port} of this machine)"
        )
    told = [figures for figures in status.get_all(reports.PREFIX).values() if isinstance(figures, dict)]
    if status.get(summary.WRAPPED) or any(figures.get("timed_steps") for figures in told):
        one_job.say("dgc_horovod: no summary: rank 0 has ended without Python's exit handlers (os._exit)")
        return ""
    # while it can, it tells something at each interval of the reports
    silent = min(map(status.silent_for, (activation_check.present(0, 0), summary.WRAPPED, reports.figures_of(0))))
    if silent > _MISSED_REPORTS * reports.interval(workers):
        one_job.say(
            f"dgcrun: rank 0 was out of reach for the last {silent:.0f} s, so whether the job was compressed is not "
            "known here; its own last line says it"
        )
        return ""
    return summary.OF_HOROVOD.wrapped


def _run(args: Namespace) -> int:
    """What ``horovodrun`` does after it has parsed its command line; returns the exit code."""
    util.EXTENSIONS.sort(reverse=True)  # the first one is asked what Horovod can do; TensorFlow loads slowly
    discovery = types.SimpleNamespace(**{**vars(launch.discovery), "HostDiscoveryScript": CheckedDiscovery})
    try:
        if args.log_level:
            logging.addLevelName(logging.NOTSET, "TRACE")
            logging.basicConfig(level=logging.getLevelName(args.log_level))
        with replaced(launch, discovery=discovery), _key_on_no_command_line():
            launch._run(args)
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        print(f"dgcrun: {error}", file=sys.stderr)
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


@contextlib.contextmanager
def _key_on_no_command_line() -> Iterator[None]:
    """While Horovod starts ranks, in a process whose environment may have the key."""
    if not envvars.value(envvars.STATUS_KEY) or horovod_env.is_kubeflow_mpi():
        yield  # kubectl exec hands no input on; a pod has no other users
        return
    exported = types.SimpleNamespace(**{**vars(horovod_env), "is_exportable": _is_exported})
    with_input = _with_key_as_input(gloo_run.get_remote_command)
    with replaced(gloo_run, env_util=exported, get_remote_command=with_input):
        yield


def _is_exported(name: str) -> bool:
    return name != _KEY and bool(horovod_env.is_exportable(name))


def _with_key_as_input(stock: Callable[..., str]) -> Callable[..., str]:
    def get_remote_command(local_command: str, *args: object, **kwargs: object) -> str:
        """Horovod's line for a shell of this host, which puts the key where only ssh reads it."""
        (line,) = shlex.split(local_command)
        reading = shlex.join(["exec", "sh", "-c", f"IFS= read -r {_KEY}; export {_KEY}; {line}"])
        return f"{stock(shlex.quote(reading), *args, **kwargs)} <<DGC_END\n${_KEY}\nDGC_END\n"

    return get_remote_command


class CheckedDiscovery(HostDiscoveryScript):  # type: ignore[misc]  # Horovod has no types
    """Horovod's discovery by a script, with the names checked that it prints."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """As Horovod's. Raises ConfigError for what is no host's name; Horovod ends the job, or keeps those it has."""
        try:
            found: dict[str, int] = super().find_available_hosts_and_slots()
            for name in found:
                checked_slots(f"{name}:1", "what the discovery script prints")
            check_place(list(found))
        except ValueError as error:  # Horovod itself says it in a thread that ends with the job
            print(f"dgcrun: {error}", file=sys.stderr, flush=True)
            raise
        return found
