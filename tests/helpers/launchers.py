"""Commands that start ranks on this machine."""

from __future__ import annotations

import functools
import shlex
import socket
import subprocess
import sys

from tests.helpers.jobs import ROOT

# The program horovodrun, but it asks torch and not TensorFlow, which loads for seconds, how Horovod was built.
_HOROVODRUN = (
    "from horovod.common.util import EXTENSIONS; EXTENSIONS.sort(reverse=True); "
    "from horovod.runner.launch import run_commandline; run_commandline()"
)


@functools.cache
def built_controllers() -> set[str]:
    """Which of "gloo" and "mpi" this Horovod can launch with."""
    code = "import horovod.torch as h; print('gloo' * h.gloo_built(), 'mpi' * h.mpi_built())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    return set(out.stdout.split())


def horovodrun(workers: int, controller: str = "gloo", *flags: str) -> list[str]:
    """The command that starts `workers` ranks of Horovod over "gloo" or "mpi"."""
    command = [sys.executable, "-c", _HOROVODRUN, f"--{controller}", "-np", str(workers), *flags]
    if controller == "mpi":
        command += ["--mpi-args=--oversubscribe --allow-run-as-root"]
    return [*command, sys.executable]


def torchrun(workers: int, *flags: str) -> list[str]:
    """The command that starts `workers` ranks of torch.distributed."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}", *flags]


def torchrun_on_nodes(nodes: int, workers: int, words: list[str]) -> list[str]:
    """The command that starts a torchrun for each node; it ends as the first node's does."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    each = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={workers // nodes}"]
    each += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    lines = [shlex.join([*each, f"--node-rank={node}", *words]) for node in range(nodes)]
    return ["sh", "-c", " & ".join(reversed(lines)) + "; code=$?; wait; exit $code"]
