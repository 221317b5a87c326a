"""The hosts of a job: a command on each, as Horovod will start the ranks there, and whether they are fit for it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from horovod.runner.common.util import env as horovod_env
from horovod.runner.common.util import hosts as horovod_hosts
from horovod.runner.util import network
from horovod.runner.util.remote import get_remote_command

from dgc_horovod import __version__, envvars
from dgc_horovod.errors import ConfigError
from dgc_horovod.launch.site import FOLDER
from dgc_horovod.launch.site.sitecustomize import is_ours

_SSH_SECONDS, _ANSWER_SECONDS = 10, 60
_SSH_FAILED, _NOT_FOUND = 255, 127  # ssh's own exit code, and a shell's
_PYTHON = re.compile(r"python[\d.]*t?")
_WRAPPERS = ("env", "nice", "ionice", "timeout", "numactl", "taskset", "nohup", "stdbuf", "setsid")
_MARK = "DGC_ANSWER "  # in front of an answer, among whatever else a process prints
# Run by a Python, with code that fills `found` and the arguments of that. Before anything else is imported: a script
# does not find its modules in the current folder, where any name may stand. What Python puts in front of its path for
# -c is not there under -P and PYTHONSAFEPATH.
_ANSWERING = f"""
import sys
if not getattr(sys.flags, "safe_path", False): sys.path.pop(0)
import json
found = {{}}
try: exec(sys.argv.pop(1))
except Exception as error: found["error"] = f"{{type(error).__name__}}: {{error}}".splitlines()[0]
print({_MARK!r} + json.dumps(found))
"""
_PROBE = """
import importlib.metadata, os, platform
found.update(python=sys.executable, folder=os.getcwd(), python_version=platform.python_version())
for name in ("horovod", "torch", "tensorflow", "tensorflow-cpu"):
    try: found[name] = importlib.metadata.version(name)
    except Exception: pass
import dgc_horovod, dgc_horovod.launch.site
found.update(version=dgc_horovod.__version__, site=dgc_horovod.launch.site.FOLDER)
"""
# A line of standard input has the environment; what follows in it is for the command.
_NEWLINE, _SHELLS_NAME = "DGC_NEWLINE", re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WITH_ENVIRONMENT = (
    f'{_NEWLINE}=$(printf "\\nx"); {_NEWLINE}=${{{_NEWLINE}%x}}; IFS= read -r DGC_LINE; eval "$DGC_LINE"; exec "$@"'
)


class Ssh(NamedTuple):
    """How Horovod's launcher reaches other hosts.

    Args:
        port: port of ssh; None: ssh's own.
        identity_file: path of the private key; None: ssh's own.
    """

    port: int | None = None
    identity_file: str | None = None


class HostReport(NamedTuple):
    """What one host has answered.

    Args:
        host: name of the host, as the job gives it.
        found: python, folder, site and the versions of packages there; empty if it did not answer.
        problem: reason why the job would not be compressed there, with what to do; "" if it would.
    """

    host: str
    found: dict[str, Any]
    problem: str


def host_slots(args: Namespace) -> str:
    """``a:8,b:8`` from arguments as `launcher.make_safe` left them; "" where only a discovery script knows."""
    return args.hosts or ("" if args.host_discovery_script else f"localhost:{args.num_proc or 1}")


def names_of(slots: str) -> list[str]:
    """The hosts of ``a:8,b:8``, each once."""
    return list(dict.fromkeys(part.rsplit(":", 1)[0] for part in slots.split(",") if part))


def sizes_of(slots: str) -> list[int]:
    """How many slots each host of ``a:8,b:8`` has."""
    return [int(part.rsplit(":", 1)[1]) for part in slots.split(",") if part]


def ranks_a_host(slots: str, workers: int) -> int:
    """How many ranks Horovod puts on each host, if it is the same number on all; else 0."""
    found = {slot.local_size for slot in _assignments(slots, workers)}
    return found.pop() if len(found) == 1 else 0


def host_of_rank(slots: str, workers: int) -> dict[int, str]:
    """The host that Horovod puts each rank on, as the job names it; nothing if `slots` does not tell."""
    return {slot.rank: slot.hostname for slot in _assignments(slots, workers)}


def _assignments(slots: str, workers: int) -> Sequence[Any]:
    """Where Horovod puts each rank; nothing if `slots` does not tell."""
    try:
        found: Sequence[Any] = horovod_hosts.get_host_assignments(horovod_hosts.parse_hosts(slots), workers)
    except Exception:  # Horovod's parser raises several kinds, and its launcher says what is wrong
        return ()
    return found


def interpreter_of(command: Sequence[str]) -> str | None:
    """The Python that `command` runs, perhaps behind `nice` and the like; None if it cannot be told."""
    pythons = [word for word in command if _PYTHON.fullmatch(Path(word).name)]
    if not command or command[0] in pythons or Path(command[0]).name in _WRAPPERS:
        return pythons[0] if pythons else None
    return None  # a script may run one in an environment of its own


def is_remote(host: str) -> bool:
    """Whether Horovod would use ssh to start a rank on `host`."""
    return bool(network.filter_local_addresses([host]))


def ask(
    host: str,
    interpreter: str,
    code: str,
    ssh: Ssh,
    seconds: float = _ANSWER_SECONDS,
    arguments: Sequence[str] = (),
    secret: str = "",
) -> dict[str, Any]:
    """Let a Python on a host run `code`; returns what that puts into its dictionary `found`.

    Args:
        host, ssh, seconds, secret: see `run_on`.
        interpreter: Python there.
        code: Python code, in which ``sys`` is imported.
        arguments: further words of the command line, for `code`.

    Returns:
        With ``error`` in it if something is wrong.
    """
    try:
        ended = run_on(host, [interpreter, "-c", _ANSWERING, code, *arguments], ssh, seconds, secret)
    except subprocess.TimeoutExpired:
        advice = "; is ssh to it possible without a password?" if is_remote(host) else ""
        return {"error": f"no answer within {seconds:g} s{advice}"}
    answers = [line.partition(_MARK)[2] for line in ended.stdout.splitlines() if _MARK in line]
    with contextlib.suppress(ValueError, RecursionError):
        if answers and isinstance(found := json.loads(answers[-1]), dict):
            return found
    said = ((ended.stderr.strip() or ended.stdout.strip()).splitlines() or ["no output"])[-1]
    if ended.returncode == _SSH_FAILED and is_remote(host):
        return {"error": f"{said}; ssh to it must work without a password"}
    status = ended.returncode
    how = f"exit code {status}" if status >= 0 else signal.Signals(-status).name
    return {"error": f"{interpreter} has ended with {how}: {said}"}


def run_on(
    host: str, command: Sequence[str], ssh: Ssh, seconds: float = _ANSWER_SECONDS, secret: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run `command` on `host` in this folder and with this environment, as Horovod starts a rank.

    Nothing of the environment stands on a command line, which ``ps`` shows to every user: for another host it goes to
    ssh's standard input.

    Args:
        host, command, ssh: name of the host, command line to run there, and way in which the host is reached.
        seconds: seconds within which it must have ended.
        secret: text that it reads from its standard input.

    Raises:
        subprocess.TimeoutExpired: it did not end within `seconds`.
    """
    environment = {
        name: text
        for name, text in envvars.environment().items()
        if horovod_env.is_exportable(name) and name != envvars.STATUS_KEY.name
    }
    if is_remote(host):
        words = ["exec", "sh", "-c", _WITH_ENVIRONMENT, "sh", *command]
        line = f"cd {shlex.quote(os.getcwd())} > /dev/null 2>&1 ; {shlex.join(words)}"
        handed = f"{_exports(environment)}\n{secret}"
        if horovod_env.is_kubeflow_mpi():  # which hands no input on
            line = f"printf %s {shlex.quote(handed)} | ( {line} )"
        words = shlex.split(get_remote_command(shlex.quote(line), host, ssh.port, ssh.identity_file, _SSH_SECONDS))
    else:
        words, handed = list(command), secret
    try:
        ended = subprocess.run(
            words, input=os.fsencode(handed), capture_output=True, timeout=seconds, env=environment
        )  # fmt: skip
    except (OSError, ValueError) as error:
        return subprocess.CompletedProcess(words, _NOT_FOUND, "", str(error))
    said = (output.decode(errors="replace") for output in (ended.stdout, ended.stderr))
    return subprocess.CompletedProcess(words, ended.returncode, *said)


def _exports(environment: Mapping[str, str]) -> str:
    """One line that a shell takes for that environment; a name that no shell can set is left out."""
    words = []
    for name, text in environment.items():
        if _SHELLS_NAME.fullmatch(name) and name != _NEWLINE:
            quoted = shlex.quote(text).replace("\n", f"'\"${_NEWLINE}\"'")
            words.append(f"command export {name}={quoted} 2> /dev/null")  # bash does not let go of its UID, say
    return "; ".join(words)


def examine(hosts: Sequence[str], interpreter: str, ssh: Ssh) -> list[HostReport]:
    """Ask every host, all at once, whether `interpreter` finds this version of dgc_horovod there."""
    with ThreadPoolExecutor(max_workers=32) as pool:
        answers = list(pool.map(lambda host: ask(host, interpreter, _PROBE, ssh), hosts))
    return [
        HostReport(host, found, _problem(found)) if "python" in found else HostReport(host, {}, found["error"])
        for host, found in zip(hosts, answers, strict=True)
    ]


def _problem(found: dict[str, Any]) -> str:
    if "version" not in found:
        return f"{found['python']} has no dgc_horovod ({found['error']}); install {__version__} for it there"
    if found["version"] != __version__:
        return f"{found['python']} has dgc_horovod {found['version']}, here it is {__version__}; install the same"
    if os.path.realpath(found["folder"]) != os.path.realpath(os.getcwd()):
        return f"the folder {os.getcwd()} is not there; start from one that every host has"
    return ""


def check(slots: str, command: Sequence[str], ssh: Ssh) -> list[str]:
    """Check every host before anything is started; returns the folders of the activation, this host's first.

    Args:
        slots: hosts and their slots, ``a:8,b:8``.
        command: command line of the job.
        ssh: way in which the hosts are reached.

    Raises:
        ConfigError: on some host the job would run uncompressed; names every such host and the reason.
    """
    interpreter = interpreter_of(command)
    names = names_of(slots) or ["localhost"]
    reports = examine(names, interpreter or sys.executable, ssh)
    bad = [report for report in reports if report.problem]
    # a shell script may well use another Python than ours: there the activation check at hvd.init() decides
    if bad and interpreter is not None:
        lines = [f"  {report.host}: {report.problem}" for report in bad]
        raise ConfigError("\n".join(["not every host can compress, so nothing was started:", *lines]))
    sites = [report.found.get("site") for report in reports]
    sound = [site for site in sites if isinstance(site, str) and is_ours(site) and os.pathsep not in site]
    return list(dict.fromkeys([FOLDER, *sound]))  # they go on every rank's PYTHONPATH


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
