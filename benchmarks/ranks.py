"""Starts ranks on emulated hosts or on this machine, by ``horovodrun``; nothing outlives it.

``python -m benchmarks.ranks MODULE:FUNCTION FOLDER`` is one rank.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.netlab import Lab, lab
from benchmarks.netlab.hosts import enter
from benchmarks.processes import ended_within
from benchmarks.report import ROOT

HERE = "here"  # the rate of a link between ranks on this machine, with no emulated hosts
# For every method alike: large tensors lie in huge pages, where glibc can (2.35 and later). In a virtual machine each
# small page that is looked up costs a walk through the tables of both.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_ENDING = (signal.SIGTERM, signal.SIGHUP)


class LaunchError(RuntimeError):
    """A launch that failed or took too long, with the end of what it printed."""


def exit_on_signals() -> None:
    """Let SIGTERM, and a terminal that closes, end this process as an exception would: what it has started goes too."""
    for number in _ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _exit)


def _exit(number: int, _: object) -> None:
    for each in _ENDING:  # a terminal says it twice; what cleans up is not to be interrupted
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


@contextmanager
def hosts_at(count: int, rate: str, ranks: int = 1) -> Iterator[Lab | None]:
    """So many emulated hosts whose links have a rate; None at the rate `HERE`: ranks are on this machine."""
    if rate == HERE:
        yield None
    else:
        with lab(count, rate, ranks) as up:
            yield up


def launch(function: str, order: Any, ranks: int, hosts: Lab | None, seconds: float) -> list[Any]:
    """Call a function on every rank, over Gloo, each on one thread; what each returns, by rank.

    Args:
        function: "module:name", of one argument; it initialises Horovod, and returns what JSON can hold.
        order: its argument, as JSON gives it back.
        ranks: how many; as many as hosts have, where there are any.
        hosts: the lab that is up, or None for ranks on this machine.
        seconds: then it is killed with all that it started.

    Raises:
        LaunchError: it failed or took too long; nothing of it is left running.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    modules = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = {"PATH": path, "PYTHONPATH": modules, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    variables.update(_HUGE_PAGES)
    where = ["-H", hosts.slots] if hosts else []
    if hosts:  # torch.distributed looks for the address of the machine's name, which each host has its own of
        variables["GLOO_SOCKET_IFNAME"] = "eth0"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "order.json").write_text(json.dumps(order))
        rank = [sys.executable, "-m", "benchmarks.ranks", function, folder]
        command = ["horovodrun", "--gloo", "-np", str(ranks), *where, *rank]
        output_of(enter(1, command) if hosts else command, seconds, variables)
        return [json.loads(_result(folder, rank).read_text()) for rank in range(ranks)]


def _result(folder: str, rank: int) -> Path:
    return Path(folder, f"rank{rank}.json")


def output_of(command: Sequence[str], seconds: float, variables: Mapping[str, str], folder: Path = ROOT) -> str:
    """The output of `command`.

    Args:
        command: program and words.
        seconds: then it is killed with all that it started.
        variables: of its environment, beside this one's.
        folder: in which it runs; else this checkout's.

    Raises:
        LaunchError: it failed or took too long; nothing of it is left running.
    """
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        code, said = ended_within(command, seconds, env={**os.environ, **variables}, cwd=folder, **pipes)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{' '.join(command)}: not done after {seconds:.0f} s, killed") from None
    if code:
        raise LaunchError(f"{' '.join(command)}: exit {code}\n{said[-4000:]}")
    return said


def found_in(output: str, pattern: str) -> str:
    """The first group of `pattern` in what ranks have printed; LaunchError if it is not there."""
    found = re.search(pattern, output)
    if found is None:
        raise LaunchError(f"there is no {pattern!r} in what was printed:\n{output[-4000:]}")
    return found[1]


def main() -> None:
    """Be one rank."""
    function, folder = sys.argv[1:]
    module, _, name = function.partition(":")
    order = json.loads(Path(folder, "order.json").read_text())
    found = getattr(importlib.import_module(module), name)(order)
    _result(folder, int(os.environ["HOROVOD_RANK"])).write_text(json.dumps(found, allow_nan=False))


if __name__ == "__main__":
    main()
