"""Jobs of Horovod's launcher: arguments and hosts are checked, and it runs but for three names that are replaced.

Horovod 0.28.1 starts ranks with ``sh -c`` and ssh. It quotes the command and the values of the environment; not quoted
are hosts, the identity file, interfaces, its own Python, the folder, names of variables, and what is for mpirun. These
are refused or quoted before it gets them (`make_safe`).

What is replaced while it runs:

- The key of the status server stands on no command line, where ``ps`` would show it to every user of every host. Over
  Gloo, Horovod writes the environment into the lines that start ranks: ``ssh HOST 'env NAME=VALUE ... python'``. It is
  left out of them. A rank on this host inherits it; for another host it goes to ssh's standard input, where a shell
  of that host reads it. mpirun is told names only, and sends the values itself.
- The names that a discovery script prints go to ssh as those of ``-H`` do, and are checked like them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import shutil
import sys
import types
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import horovod
from horovod.common import util
from horovod.runner import gloo_run, launch
from horovod.runner.common.util import config_parser
from horovod.runner.common.util import env as horovod_env
from horovod.runner.common.util import hosts as horovod_hosts
from horovod.runner.elastic.discovery import HostDiscoveryScript
from horovod.runner.util import network, remote
from horovod.runner.util.lsf import LSFUtils

from dgc_horovod import envvars, files
from dgc_horovod.errors import ConfigError
from dgc_horovod.launch import hosts, reports, summary
from dgc_horovod.launch import job as one_job
from dgc_horovod.launch.settings import Job
from dgc_horovod.launch.status_server import StatusServer
from dgc_horovod.names import replaced
from dgc_horovod.settings import CARRIED, can_carry

_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_MOST_SLOTS = 2**16  # Horovod counts them one by one
# what every shell takes as it stands, and no program for an option
_PLAIN = re.compile(r"[\w@%+=:,./~][\w@%+=:,./~-]*")
_ALLOWED = "letters, digits and any of @ % + = : , . / ~ - _, with no - in front"
_KEY = envvars.STATUS_KEY.name
_NEEDED = (
    (launch, ("parse_args", "run_commandline", "argparse", "discovery", "is_gloo_used", "_is_elastic")),
    (gloo_run, ("get_remote_command", "env_util")),
    (config_parser, ("set_args_from_config",)),
)
_MISSED_REPORTS = 3.0  # intervals without a word of rank 0, after which it is taken to have been out of reach
_IF_QUIET = (
    f"dgcrun: for {one_job.QUIET_SECONDS:.0f} s no rank has called hvd.init() with compression on; if the script "
    "should have by now, it trains uncompressed (PYTHONPATH reset? another Python?)"
)


def make_safe(args: Namespace) -> hosts.Ssh:
    """Check what a shell, ssh or mpirun would see of Horovod's parsed arguments, and put it into `args` as checked.

    Args:
        args: Horovod's parsed arguments; changed are hosts, the discovery script and what is for mpirun.

    Raises:
        ConfigError: something in there could be taken for a command or an option, or there is no rank to start;
            nothing was started.
    """
    for name, value in vars(args).items():
        for text in [value] if isinstance(value, str) else value if isinstance(value, (list, tuple, set)) else ():
            if isinstance(text, str) and not can_carry(text):
                flag = "the command" if name == "command" else f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} must be {CARRIED}, got {text!r}: no process can be given it")
    if args.num_proc is not None and args.num_proc < 1:
        raise ConfigError(f"-np must be at least 1, got {args.num_proc}")
    for name in unsafe_names():
        print(f"dgcrun: the variable {name!r} is not passed on: no shell can carry such a name", file=sys.stderr)
        envvars.put_into_environment({name: ""})
    if args.ssh_port is not None and not 0 < args.ssh_port < 2**16:
        raise ConfigError(f"--ssh-port must be 1 to 65535, got {args.ssh_port}")
    if args.ssh_identity_file is not None:
        _must_be_plain("--ssh-identity-file", args.ssh_identity_file)
    for nic in sorted(args.nics or ()):
        _must_be_plain("--network-interfaces", nic)
    args.hosts = _hosts(args)
    if args.host_discovery_script is not None:
        args.host_discovery_script = _words("--host-discovery-script", args.host_discovery_script, a_program=True)
    for flag in ("mpi_args", "binding_args"):
        if getattr(args, flag):
            setattr(args, flag, _words(f"--{flag.replace('_', '-')}", getattr(args, flag)))
    if args.output_filename:
        path, quoted = args.output_filename, shlex.quote(args.output_filename)
        if path.startswith("-"):
            raise ConfigError(
                f"--output-filename must not begin with -, got {path!r}; write ./{path} for a file of that name"
            )
        # Horovod starts ranks itself over Gloo, which it may take seconds to find out, else mpirun or jsrun does
        if quoted != path and not (
            launch.is_gloo_used(args.use_gloo, args.use_mpi, args.use_jsrun) or launch._is_elastic(args)
        ):
            args.output_filename = quoted
    _check_place(hosts.names_of(args.hosts or ""))
    return hosts.Ssh(args.ssh_port, args.ssh_identity_file)


def unsafe_names() -> list[str]:
    """Variables of the environment whose names a shell would take for something else."""
    names = [name for name in envvars.environment() if not _PLAIN.fullmatch(name)]
    return [name for name in names if not name.startswith("BASH_FUNC_")]  # a shell's own, which Horovod leaves out


def checked_slots(slots: str, source: str) -> str:
    """``a:8,b:8``, read by Horovod's own parser and written again.

    Raises:
        ConfigError: it is no such list, or a name in it is none that a host can have; names `source`.
    """
    try:
        horovod_hosts.parse_hosts_and_slots(slots)
        found = horovod_hosts.parse_hosts(slots)
    except ValueError:
        raise ConfigError(f"{source} must be HOST:SLOTS,HOST:SLOTS, e.g. a:8,b:8, got {slots!r}") from None
    for host in found:
        if not _HOST.fullmatch(host.hostname):
            raise ConfigError(
                f"{source}: a host's name has letters, digits, dots, _ and -, with no - in front, got "
                f"{host.hostname!r}; give another kind of name in ~/.ssh/config"
            )
        if host.slots > _MOST_SLOTS:
            raise ConfigError(f"{source}: {host.hostname} must have at most {_MOST_SLOTS} slots, got {host.slots}")
    return ",".join(f"{host.hostname}:{host.slots}" for host in found)


def _hosts(args: Namespace) -> str | None:
    """The hosts as checked; None where Horovod chooses, which is this host, or a discovery script tells."""
    if args.hosts:
        return checked_slots(args.hosts, "-H")
    if args.hostfile:
        return checked_slots(_from_file(args.hostfile), f"--hostfile {args.hostfile}")
    if LSFUtils.using_lsf() and not (args.host_discovery_script or args.show_config or args.print_env):
        allocation = envvars.environment().get("CSM_ALLOCATION_ID", "")
        _must_be_plain("CSM_ALLOCATION_ID", allocation, "; or name the hosts with -H")
        slots = ",".join(f"{host}:{LSFUtils.get_num_gpus()}" for host in LSFUtils.get_compute_hosts())
        return checked_slots(slots, "LSF")
    return None


def _from_file(path: str) -> str:
    try:
        files.read(path, 0)  # Horovod would wait for what is in a pipe
        return horovod_hosts.parse_host_files(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the hostfile {path} cannot be read: {error}") from None
    except IndexError:
        raise ConfigError(
            f"the hostfile {path} must have a line HOST slots=SLOTS for each host, and no other"
        ) from None


def _words(flag: str, text: str, a_program: bool = False) -> str:
    """`text` as the words that a shell would make of it, each quoted: nothing is expanded, nothing else is run."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}, got {text!r}") from None
    if a_program:
        words[:1] = map(os.path.expanduser, words[:1])
        if not words or shutil.which(words[0]) is None:
            raise ConfigError(
                f"{flag} must be a program that can be run, perhaps with arguments, got {text!r}; it is run without a "
                "shell, so put a pipe or $NAME into a script"
            )
    return shlex.join(words)


def _must_be_plain(what: str, text: str, advice: str = "") -> None:
    if not _PLAIN.fullmatch(text):
        raise ConfigError(f"{what} must have only {_ALLOWED}: Horovod gives it to a shell, got {text!r}{advice}")


def _check_place(names: Sequence[str]) -> None:
    """The folder and our Python go into lines for ssh, if any of these hosts is another one. Raises ConfigError."""
    if names and network.filter_local_addresses(names):
        _must_be_plain("with other hosts, the current folder", os.getcwd(), "; start from another")
        _must_be_plain("with other hosts, the path of Python", sys.executable, "; use one at another path")


def check_horovod() -> None:
    """Raise ConfigError if Horovod's launcher is not laid out as we know it."""
    missing = [name for module, names in _NEEDED for name in names if not hasattr(module, name)]
    if missing:
        raise ConfigError(
            f"Horovod {horovod.__version__} is not laid out as 0.28.1 is (its launcher lacks {', '.join(missing)}); "
            "install 0.28.1, or use horovodrun with what dgcrun --print-env prints"
        )


def run_job(args: Namespace, job: Job, ssh: hosts.Ssh) -> int:
    """Run a job to its end; returns its exit code.

    Args:
        args: Horovod's parsed arguments, as `make_safe` left them.
        job: resolved settings of the job.
        ssh: way in which the hosts are reached.

    Raises:
        ConfigError: some host, or the command, is not fit for it; nothing was started.
    """
    if Path(args.command[0]).name in one_job.TORCHS_LAUNCHERS:
        raise ConfigError(
            f"{args.command[0]} starts the ranks itself: leave -np out, and all other flags of horovodrun"
        )
    slots, addresses = hosts.host_slots(args), []
    envvars.put_into_environment({**job.variables(), envvars.HOSTS.name: slots, **_nodes(job, slots, args.num_proc)})
    if job.active:
        envvars.put_on_path(hosts.check(slots, args.command, ssh))
        addresses = _own_addresses(slots)
    launcher = one_job.Launcher(
        functools.partial(_run, args), "stock Horovod", addresses,
        functools.partial(why_uncompressed, workers=args.num_proc or 1), _IF_QUIET,
    )  # fmt: skip
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
    silent = min(map(status.silent_for, (reports.present(0, 0), summary.WRAPPED, reports.figures_of(0))))
    if silent > _MISSED_REPORTS * reports.interval(workers):
        one_job.say(
            f"dgcrun: rank 0 was out of reach for the last {silent:.0f} s, so whether the job was compressed is not "
            "known here; its own last line says it"
        )
        return ""
    return summary.Outcome.not_wrapped


def _run(args: Namespace) -> int:
    """Run ``horovodrun`` with its arguments as parsed; returns the exit code."""
    util.EXTENSIONS.sort(reverse=True)  # the first one is asked what Horovod can do; TensorFlow loads slowly
    discovery = types.SimpleNamespace(**{**vars(launch.discovery), "HostDiscoveryScript": CheckedDiscovery})
    try:
        with replaced(launch, parse_args=lambda: args, discovery=discovery), _key_on_no_command_line():
            launch.run_commandline()
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        print(f"dgcrun: {error}", file=sys.stderr)
        return 1


def _key_on_no_command_line() -> contextlib.AbstractContextManager[None]:
    """While Horovod starts ranks, in a process whose environment may have the key."""
    if not envvars.value(envvars.STATUS_KEY) or horovod_env.is_kubeflow_mpi():
        return contextlib.nullcontext()  # kubectl exec hands no input on; a pod has no other users
    exported = types.SimpleNamespace(**{**vars(horovod_env), "is_exportable": _is_exported})
    return replaced(gloo_run, env_util=exported, get_remote_command=_with_key_as_input)


def _is_exported(name: str) -> bool:
    return name != _KEY and bool(horovod_env.is_exportable(name))


def _with_key_as_input(local_command: str, *args: object, **kwargs: object) -> str:
    """Horovod's line for a shell of this host, which puts the key where only ssh reads it."""
    (line,) = shlex.split(local_command)
    reading = shlex.join(["exec", "sh", "-c", f"IFS= read -r {_KEY}; export {_KEY}; {line}"])
    return f"{remote.get_remote_command(shlex.quote(reading), *args, **kwargs)} <<DGC_END\n${_KEY}\nDGC_END\n"


class CheckedDiscovery(HostDiscoveryScript):  # type: ignore[misc]  # Horovod has no types
    """Horovod's discovery by a script, with the names checked that it prints."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """As Horovod's. Raises ConfigError for what is no host's name; Horovod ends the job, or keeps those it has."""
        try:
            found: dict[str, int] = super().find_available_hosts_and_slots()
            for name in found:
                checked_slots(f"{name}:1", "what the discovery script prints")
            _check_place(list(found))
        except ValueError as error:  # Horovod itself says it in a thread that ends with the job
            print(f"dgcrun: {error}", file=sys.stderr, flush=True)
            raise
        return found
