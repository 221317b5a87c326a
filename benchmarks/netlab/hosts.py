"""Hosts that are up: commands on them, and what their links really carry."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from benchmarks.netlab import probe, state
from benchmarks.netlab.network import address
from benchmarks.netlab.tools import NetlabError


def hostname(number: int) -> str:
    """Name of a host; only the lab's own hosts know it."""
    return f"host{number}"


@dataclass(frozen=True)
class Lab:
    """The hosts that are up, counted from 1.

    Args:
        hosts: how many.
        ranks: that are to run on each.
    """

    hosts: int
    ranks: int = 1

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
        """What the launcher's ``-H`` takes: ``host1:2,host2:2``."""
        return ",".join(f"{name}:{self.ranks}" for name in self.names)

    @property
    def num_proc(self) -> int:
        """What the launcher's ``-np`` takes: ranks on all hosts together."""
        return self.hosts * self.ranks

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
    if not (pid := state.server(number)):
        up = f"{found.hosts} hosts are" if (found := state.read()) else "no lab is"
        raise NetlabError(f"host {number} is not up, {up}; see python -m benchmarks.netlab status")
    # Its own namespaces and not new ones like them: Horovod takes processes as on one host if all these are the same.
    join = ["nsenter", "--target", str(pid), "--mount", "--uts", "--net", "--"]
    return [*join, "sh", "-c", 'cd "$1" && shift && exec "$@"', "netlab", os.getcwd(), *command]
