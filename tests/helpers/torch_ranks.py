"""Run cases on ranks that torchrun has started, without Horovod, and get what each rank returned."""

from __future__ import annotations

import shlex
import socket
import sys
import tempfile
from pathlib import Path

import pytest

from tests.helpers.jobs import run
from tests.helpers.standing_ranks import Environment, Results, StandingRanks, results_of


def torchrun(workers: int, *flags: str) -> list[str]:
    """The command that starts `workers` ranks on this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}", *flags]


def _agents(nodes: int, workers: int, words: list[str]) -> list[str]:
    """The command that starts a torchrun for each node, on this machine; it ends as the first node's does."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    each = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={workers // nodes}"]
    each += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    lines = [shlex.join([*each, f"--node-rank={node}", *words]) for node in range(nodes)]
    return ["sh", "-c", " & ".join(reversed(lines)) + "; code=$?; wait; exit $code"]


def run_torch_ranks(
    workers: int,
    cases: list[str],
    timeout: float = 150,
    environment: Environment | None = None,
    nodes: int = 1,
    fresh: bool = False,
    folder: Path | None = None,
    last: bool = False,
) -> Results:
    """What every rank's cases return, by case.

    On one node ranks that are up already run them, as in `ranks.run_ranks`.

    Args:
        workers: number of ranks, >= 1.
        cases: functions of ``tests.parallel.cases``, as "module.function".
        timeout: seconds, past which all are killed.
        environment: more variables while the cases run.
        nodes: number of nodes that they are on, a divisor of `workers`.
        fresh: whether the cases need processes of their own: they leave something behind.
        folder: that the cases find in ``DGC_TEST_FOLDER``, to keep checkpoints in.
        last: whether no other cases can follow on these ranks; see `ranks.run_ranks`.
    """
    if nodes == 1 and not fresh:
        standing = StandingRanks.of(workers, "ddp", lambda place: [*torchrun(workers), *_main(place)])
        results = standing.run(cases, timeout, folder, environment)
        if last:
            standing.end()
        if results is not None:
            return results
    StandingRanks.started += workers
    with tempfile.TemporaryDirectory(prefix="dgc-torch-ranks-") as place:
        words = [*_main(place), *cases]
        command = [*torchrun(workers), *words] if nodes == 1 else _agents(nodes, workers, words)
        code, log = run(command, timeout, {"DGC_TEST_FOLDER": str(folder or ""), **(environment or {})})
        found = results_of(Path(place), 0, workers)
        if code or found is None:
            pytest.fail(f"{cases} on {workers} ranks ended with {code}; output:\n{log[-6000:]}")
        return found


def _main(folder: str) -> list[str]:
    return ["-m", "tests.helpers.torch_rank_main", folder]
