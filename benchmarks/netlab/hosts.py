"""Hosts that are up: what a lab keeps in /run, the right to have one, commands on hosts, what their links carry."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.netlab import probe
from benchmarks.netlab.network import PREFIX, Link, NetlabError, address

STATE = Path("/run/dgc-netlab")  # names of namespaces are the machine's, so the rest is too
KEY, NO_SSH = STATE / "key", STATE / "no-ssh"
CLAIM_SECONDS = 1.0  # a killed process's child, if it was just being started, holds the claim until it runs its program


def reserve() -> socket.socket:
    """Claim the machine's only lab, until the socket is closed: at the latest by the end of this process.

    Raises:
        NetlabError: another process has claimed it.
    """
    claim = socket.socket(socket.AF_UNIX)
    deadline = time.monotonic() + CLAIM_SECONDS
    while True:
        try:
            claim.bind(f"\0{PREFIX}claim")  # a name in the kernel: it ends with the last that holds it
            return claim
        except OSError:
            if time.monotonic() > deadline:
                claim.close()
                raise NetlabError("another process has a lab up on this machine; wait until it has ended") from None
        time.sleep(0.05)


def file(number: int, kind: str) -> Path:
    """A file of a host: "pid" of its ssh server, or "log" of what that says."""
    return STATE / f"{number}.{kind}"


def server(number: int) -> int | None:
    """Process id of a host's ssh server, if it still lives."""
    pid_file = file(number, "pid")
    written = pid_file.read_text() if pid_file.exists() else ""
    with contextlib.suppress(psutil.Error):
        if written and f"{KEY}.pub" in psutil.Process(int(written)).cmdline():  # and not another with the same id
            return int(written)
    return None


def hostname(number: int) -> str:
    """Name of a host; only the lab's own hosts know it."""
    return f"host{number}"


@dataclass(frozen=True)
class Lab:
    """The hosts that are up, counted from 1.

    Args:
        hosts: how many.
        ranks: that are to run on each.
        link: what each link is like, by its settings.
    """

    hosts: int
    ranks: int = 1
    link: Link = field(default_factory=Link)

    @property
    def names(self) -> list[str]:
        """Names of the hosts, as `hostname` gives them there."""
        return [hostname(number) for number in range(1, self.hosts + 1)]

    @property
    def addresses(self) -> list[str]:
        """Addresses of the hosts, as all names resolve to them everywhere."""
        return [address(number) for number in range(1, self.hosts + 1)]

    @property
    def slots(self) -> str:
        """The launcher's ``-H``: ``host1:2,host2:2``."""
        return ",".join(f"{name}:{self.ranks}" for name in self.names)

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

    def one_way(self, seconds: float = 1.0) -> float:
        """TCP throughput from the first host to the second in Mbit/s, measured alone for `seconds`."""
        return self.measure([(1, 2)], seconds)[0]

    def measure(self, pairs: Sequence[tuple[int, int]], seconds: float = 1.0) -> list[float]:
        """TCP throughput of streams that run at the same time.

        Args:
            pairs: (sender, receiver) of each stream.
            seconds: of what is counted; half a second more is not.

        Returns:
            Mbit/s of payload of each stream; packet headers take 4.4% of a link.

        Raises:
            NetlabError: a host is not up, or a stream broke off.
        """
        with contextlib.ExitStack() as stack:

            def end(number: int, *arguments: str) -> subprocess.Popen[str]:
                return stack.enter_context(self._probe(number, *arguments))

            receivers = [end(receiver, "receive", str(seconds)) for _, receiver in pairs]
            ports = [_heard(each) for each in receivers]
            for (sender, receiver), port in zip(pairs, ports, strict=True):
                end(sender, "send", address(receiver), port)
            for each in receivers:
                _heard(each)
            for each in receivers:
                assert each.stdin
                each.stdin.write("begin\n")
                each.stdin.flush()
            return [float(_heard(each)) for each in receivers]

    @contextlib.contextmanager
    def _probe(self, number: int, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-IS", probe.__file__, *arguments]
        pipe = subprocess.PIPE
        # In a session of its own: Ctrl-C is ours alone, and one line is enough.
        with self.start(number, command, stdin=pipe, stdout=pipe, start_new_session=True) as process:
            try:
                yield process
            finally:
                process.kill()


def _heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    if not (line := process.stdout.readline().strip()):
        raise NetlabError("a measured stream broke off")
    return line


def _kill_tree(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def enter(number: int, command: Sequence[str]) -> list[str]:
    """`command` such that it runs on a host, in the same folder; the process stays the same, by exec.

    Args:
        number: of the host.
        command: program and arguments.

    Raises:
        NetlabError: the host is not up.
    """
    if not (pid := server(number)):
        raise NetlabError(f"host {number} is not up")
    # Its own namespaces and not new ones like them: Horovod takes processes as on one host if all these are the same.
    join = ["nsenter", "--target", str(pid), "--mount", "--uts", "--net", "--"]
    return [*join, "sh", "-c", 'cd "$1" && shift && exec "$@"', "netlab", os.getcwd(), *command]
