"""Hosts that Horovod can be launched across: each with a name, an address and an ssh server.

with lab(2, "1gbit") as hosts:
    hosts.run(1, ["horovodrun", "--gloo", "-np", "2", "-H", "nlh1:1,nlh2:1", "python", "train.py"])
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.netlab import network
from benchmarks.netlab.network import address, namespace
from benchmarks.netlab.tools import NetlabError, call
from benchmarks.report import ROOT

STATE = Path("/run/dgc-netlab")  # names of namespaces are the machine's, so the rest is too
KEY, NO_SSH = STATE / "key", STATE / "no-ssh"
# In the place of the host's /etc/ssh/ssh_config, so that plain `ssh nlh2` works and nobody's known_hosts is written.
SSH_CONFIG = f"""Host *
    IdentityFile {KEY}
    IdentitiesOnly yes
    BatchMode yes
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
"""
# Of a host's first process. An empty folder hides the user's ~/.ssh, whose settings would win over those above.
START = 'hostname "$0"; if [ -d "$1" ]; then mount --bind "$2" "$1"; fi; shift 2; exec "$@"'


def hostname(number: int) -> str:
    """Name of a host."""
    return f"nlh{number}"


@dataclass(frozen=True)
class Lab:
    """The hosts that are up, counted from 1."""

    hosts: int

    @property
    def names(self) -> list[str]:
        """Names of the hosts, as `hostname` gives them there."""
        return [hostname(number) for number in range(1, self.hosts + 1)]

    @property
    def addresses(self) -> list[str]:
        """Addresses of the hosts, as all names resolve to them everywhere."""
        return [address(number) for number in range(1, self.hosts + 1)]

    def start(
        self, number: int, command: Sequence[str], env: dict[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start `command` on a host; it dies with the lab.

        Args:
            number: of the host.
            command: program and arguments.
            env: more environment variables; those of this process are passed on.
            options: more of what `subprocess.Popen` takes.

        Raises:
            NetlabError: the host is not up.
        """
        environment = {**os.environ, **(env or {})}
        return subprocess.Popen(enter(number, command), env=environment, text=True, **options)

    def run(
        self, number: int, command: Sequence[str], timeout: float = 60, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `command` on a host, with nothing on its standard input.

        Args:
            number: of the host.
            command: program and arguments.
            timeout: seconds; then it is killed with all that it started.
            env: more environment variables; those of this process are passed on.

        Returns:
            Its exit status and, as text, both outputs.

        Raises:
            NetlabError: the host is not up.
            subprocess.TimeoutExpired: the time is over.
        """
        pipe = subprocess.PIPE
        with self.start(number, command, env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                _kill_tree(process.pid)  # a child left alone would hold the outputs open
                raise
        return subprocess.CompletedProcess(list(command), process.returncode, out, err)


def _kill_tree(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@contextlib.contextmanager
def lab(hosts: int, rate: str = network.UNSHAPED) -> Iterator[Lab]:
    """A lab that is taken down at the end, with all that still runs on its hosts.

    Args:
        hosts: how many.
        rate: of each link in each direction, as `tc` takes it ("1gbit"), or "none".

    Raises:
        NetlabError: it cannot be brought up here.
    """
    servers = up(hosts, rate)
    try:
        yield Lab(hosts)
    finally:
        down()
        for server in servers:
            server.wait()


def up(hosts: int, rate: str) -> list[subprocess.Popen[str]]:
    """Bring a lab up, in the place of one that is up already; the ssh servers.

    Args:
        hosts: how many.
        rate: of each link in each direction, as `tc` takes it ("1gbit"), or "none".

    Raises:
        NetlabError: it cannot be brought up here; nothing is left of it.
    """
    if not 1 <= hosts <= network.MOST_HOSTS:
        raise NetlabError(f"a lab has from 1 to {network.MOST_HOSTS} hosts, not {hosts}")
    if reason := network.unavailable():
        raise NetlabError(reason)
    down()
    try:
        return _bring_up(hosts, rate)
    except BaseException:
        down()
        raise


def _bring_up(hosts: int, rate: str) -> list[subprocess.Popen[str]]:
    numbers = range(1, hosts + 1)
    NO_SSH.mkdir(parents=True)
    STATE.chmod(0o700)
    call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "netlab", "-f", str(KEY))
    network.add_switch()
    table = "".join(f"{address(number)} {hostname(number)}\n" for number in numbers)
    for number in numbers:
        network.add_host(number, rate)
        overlay = network.OVERLAYS / namespace(number)
        (overlay / "ssh").mkdir(parents=True)
        (overlay / "ssh" / "ssh_config").write_text(SSH_CONFIG)
        (overlay / "hosts").write_text(f"127.0.0.1 localhost\n{table}")
    servers = [_start_server(number) for number in numbers]  # all at once, as each takes a while
    for number, server in zip(numbers, servers, strict=True):
        _await_server(number, server)
    return servers


def _start_server(number: int) -> subprocess.Popen[str]:
    """The first process on a host, which keeps its name and its own view of /etc."""
    enter_new = ["ip", "netns", "exec", namespace(number), "unshare", "--uts"]
    user_ssh = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".ssh"  # where ssh looks, whatever HOME says
    start = ["sh", "-ec", START, hostname(number), str(user_ssh), str(NO_SSH)]
    serve = [sys.executable, "-m", "benchmarks.netlab.server", f"{KEY}.pub"]
    with _file(number, "log").open("w") as log:
        server = subprocess.Popen(
            [*enter_new, *start, *serve],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    _file(number, "pid").write_text(str(server.pid))
    return server


def _await_server(number: int, server: subprocess.Popen[str]) -> None:
    assert server.stdout
    with server.stdout as output:
        if output.readline() != "ready\n":
            said = _file(number, "log").read_text().strip()
            raise NetlabError(f"the ssh server of {hostname(number)} did not start: {said}")


def _file(number: int, kind: str) -> Path:
    return STATE / f"{number}.{kind}"


def enter(number: int, command: Sequence[str]) -> list[str]:
    """`command` such that it runs on a host, in the same folder; the process stays the same, by exec.

    Args:
        number: of the host.
        command: program and arguments.

    Raises:
        NetlabError: the host is not up.
    """
    if not (pid := _running_server(number)):
        others = len(list(STATE.glob("*.pid")))
        raise NetlabError(f"host {number} is not up, {others} hosts are: python -m benchmarks.netlab up N RATE")
    # Its own namespaces and not new ones like them: Horovod takes processes as on one host if all these are the same.
    join = ["nsenter", "--target", str(pid), "--mount", "--uts", "--net", "--"]
    return [*join, "sh", "-c", 'cd "$1" && shift && exec "$@"', "netlab", os.getcwd(), *command]


def _running_server(number: int) -> int | None:
    """Process id of a host's ssh server, if that still is one of its processes."""
    file, name = _file(number, "pid"), namespace(number)
    if not file.exists() or name not in network.names():
        return None
    pid = int(file.read_text())
    return pid if pid in network.processes(name) else None


def down() -> None:
    """Remove all of a lab, if one is up.

    Raises:
        NetlabError: it cannot be removed.
    """
    for name in network.names():
        network.remove(name)
    for overlay in network.OVERLAYS.glob(f"{network.PREFIX}*"):
        shutil.rmtree(overlay)
    with contextlib.suppress(OSError):  # there is none, or it holds what others have put there
        network.OVERLAYS.rmdir()
    shutil.rmtree(STATE, ignore_errors=True)
