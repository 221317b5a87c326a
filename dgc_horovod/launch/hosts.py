"""The hosts of a job: a command on each, as Horovod will start the ranks there, and whether they are fit for it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod.runner.common.util import env as horovod_env
from horovod.runner.common.util import hosts as horovod_hosts
from horovod.runner.util import network
from horovod.runner.util.lsf import LSFUtils
from horovod.runner.util.remote import get_remote_command

from dgc_horovod import __version__, envvars
from dgc_horovod.errors import ConfigError
from dgc_horovod.launch.marked import marked
from dgc_horovod.launch.site import FOLDER

_SSH_SECONDS, _ANSWER_SECONDS = 10, 60
_SSH_FAILED = 255  # ssh's own exit code
_MARK = "DGC_HOST "
_PYTHON = re.compile(r"python[\d.]*t?")
_WRAPPERS = ("env", "nice", "ionice", "timeout", "numactl", "taskset", "nohup", "stdbuf", "setsid")
# Run by the job's own interpreter, with the job's environment and folder, on every host.
_PROBE = f"""
import sys
sys.path.pop(0)  # the current folder, which is not where a script finds its modules
import importlib.metadata, json, os, platform, socket
found = dict(hostname=socket.gethostname(), python=sys.executable, folder=os.getcwd())
found["python_version"] = platform.python_version()
for name in ("horovod", "torch", "tensorflow", "tensorflow-cpu"):
    try: found[name] = importlib.metadata.version(name)
    except Exception: pass
try:
    import dgc_horovod, dgc_horovod.launch.site
    found.update(version=dgc_horovod.__version__, site=dgc_horovod.launch.site.FOLDER)
except Exception as error:
    found["error"] = type(error).__name__ + ": " + str(error)
print({_MARK!r} + json.dumps(found))
"""


@dataclass(frozen=True)
class Ssh:
    """How Horovod's launcher reaches other hosts."""

    port: int | None = None
    identity_file: str | None = None


@dataclass(frozen=True)
class HostReport:
    """What one host has answered.

    Args:
        host: as the job names it.
        found: hostname, python, folder, site and the versions of packages there; empty if it did not answer.
        problem: why the job would not be compressed there, with what to do; "" if it would.
    """

    host: str
    found: dict[str, Any]
    problem: str


def host_slots(args: Any) -> str:
    """``a:8,b:8`` from Horovod's parsed arguments; "" where only a discovery script knows."""
    if not args.hosts and not args.hostfile and not args.host_discovery_script and LSFUtils.using_lsf():
        return ",".join(f"{host}:{LSFUtils.get_num_gpus()}" for host in LSFUtils.get_compute_hosts())
    if args.hosts:
        return args.hosts
    if args.hostfile:
        return horovod_hosts.parse_host_files(args.hostfile)
    return "" if args.host_discovery_script else f"localhost:{args.num_proc or 1}"


def names_of(slots: str) -> list[str]:
    """The hosts of ``a:8,b:8``, each once."""
    return list(dict.fromkeys(part.rsplit(":", 1)[0] for part in slots.split(",") if part))


def host_of_rank(slots: str, rank: int, workers: int) -> str:
    """The host that Horovod puts `rank` on, as the job names it; "" if `slots` does not tell."""
    try:
        plan = horovod_hosts.get_host_assignments(horovod_hosts.parse_hosts(slots), workers)
    except Exception:  # Horovod's parser raises several kinds; this only decorates a message
        return ""
    return next((slot.hostname for slot in plan if slot.rank == rank), "")


def interpreter_of(command: Sequence[str]) -> str | None:
    """The Python that `command` runs, perhaps behind `nice` and the like, or as a script; None if it cannot be told."""
    pythons = [word for word in command if _PYTHON.fullmatch(Path(word).name)]
    if not command or command[0] in pythons or Path(command[0]).name in _WRAPPERS:
        return pythons[0] if pythons else None
    if pythons:  # a script may be about to run it, in an environment of its own
        return None
    return _of_script(shutil.which(command[0]) or command[0])


def _of_script(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            first = file.readline(512).decode(errors="replace")
    except OSError:
        return None
    words = first.removeprefix("#!").split() if first.startswith("#!") else []
    return next((word for word in words if _PYTHON.fullmatch(Path(word).name)), None)


def is_remote(host: str) -> bool:
    """Whether Horovod would use ssh to start a rank on `host`."""
    return bool(network.filter_local_addresses([host]))


def run_on(
    host: str, command: Sequence[str], ssh: Ssh, seconds: float = _ANSWER_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run `command` on `host` in this folder and with this environment, as Horovod starts a rank.

    Raises:
        subprocess.TimeoutExpired: it did not end within `seconds`.
    """
    line = _shell_line(host, command, ssh)
    return subprocess.run(
        ["/bin/sh", "-c", line], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds
    )


def _shell_line(host: str, command: Sequence[str], ssh: Ssh) -> str:
    """The line for a shell that does what `run_on` says."""
    values = (f"{k}={shlex.quote(v)}" for k, v in envvars.environment().items() if horovod_env.is_exportable(k))
    inner = f"cd {shlex.quote(os.getcwd())} > /dev/null 2>&1 ; env {' '.join(values)} {shlex.join(command)}"
    if not is_remote(host):
        return inner
    return get_remote_command(shlex.quote(inner), host, ssh.port, ssh.identity_file, _SSH_SECONDS)


def ask(hosts: Sequence[str], interpreter: str, ssh: Ssh) -> list[HostReport]:
    """Ask every host, all at once, whether `interpreter` finds this version of dgc_horovod there."""
    with ThreadPoolExecutor(max_workers=32) as pool:
        return list(pool.map(lambda host: _ask_one(host, interpreter, ssh), hosts))


def _ask_one(host: str, interpreter: str, ssh: Ssh) -> HostReport:
    try:
        answer = run_on(host, [interpreter, "-c", _PROBE], ssh)
    except subprocess.TimeoutExpired:
        return HostReport(host, {}, f"no answer within {_ANSWER_SECONDS} s; is ssh to it possible without a password?")
    found = marked(answer.stdout, _MARK)
    if found is None:
        said = ((answer.stderr.strip() or answer.stdout.strip()).splitlines() or ["no output"])[-1]
        if answer.returncode == _SSH_FAILED and is_remote(host):
            return HostReport(host, {}, f"{said}; ssh to it must work without a password")
        return HostReport(host, {}, f"{interpreter} cannot be run there: {said}")
    return HostReport(host, found, _problem(found))


def _problem(found: dict[str, Any]) -> str:
    if "version" not in found:
        return (
            f"{found['python']} has no dgc_horovod ({found.get('error', 'unknown error')}); "
            f"install {__version__} for it there"
        )
    if found["version"] != __version__:
        return f"{found['python']} has dgc_horovod {found['version']}, here it is {__version__}; install the same"
    if os.path.realpath(found["folder"]) != os.path.realpath(os.getcwd()):
        return f"the folder {os.getcwd()} is not there; start from one that every host has"
    return ""


def check(slots: str, command: Sequence[str], ssh: Ssh) -> list[str]:
    """Check every host before anything is started; returns the folders of the activation, this host's first.

    Args:
        slots: ``a:8,b:8``.
        command: of the job.
        ssh: how to reach the hosts.

    Raises:
        ConfigError: on some host the job would run uncompressed; names every such host and the reason.
    """
    interpreter = interpreter_of(command)
    names = names_of(slots) or ["localhost"]
    reports = ask(names, interpreter or sys.executable, ssh)
    bad = [report for report in reports if report.problem]
    # a shell script may well use another Python than ours: there the roll-call at hvd.init() decides
    if bad and interpreter is not None:
        lines = [f"  {report.host}: {report.problem}" for report in bad]
        raise ConfigError("\n".join(["not every host can compress, so nothing was started:", *lines]))
    return list(dict.fromkeys([FOLDER, *(report.found["site"] for report in reports if "site" in report.found)]))


def own_address_towards(host: str) -> str:
    """The IPv4 address of this machine that `host` can reach, the loopback one for itself; "" if there is no route."""
    if not is_remote(host):
        return "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing; the route tells the address
            return probe.getsockname()[0]
    except OSError:
        return ""
