"""Run cases on ranks that torchrun has started, without Horovod, and get what each rank returned."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.jobs import run


def torchrun(workers: int, *flags: str) -> list[str]:
    """The command that starts `workers` ranks on this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}", *flags]


def run_torch_ranks(
    workers: int, cases: list[str], timeout: float = 150, environment: dict[str, str | None] | None = None
) -> list[dict[str, Any]]:
    """What every rank's cases return, by case.

    Args:
        workers: number of ranks, >= 1.
        cases: functions of ``tests.parallel.cases``, as "module.function".
        timeout: seconds, past which all are killed.
        environment: more variables; None removes one.
    """
    with tempfile.TemporaryDirectory(prefix="dgc-torch-ranks-") as folder:
        command = [*torchrun(workers), "-m", "tests.helpers.torch_rank_main", folder, *cases]
        code, log = run(command, timeout, environment)
        files = [Path(folder) / f"{rank}.json" for rank in range(workers)]
        if code or not all(file.exists() for file in files):
            pytest.fail(f"{cases} on {workers} ranks ended with {code}; output:\n{log[-6000:]}")
        return [json.loads(file.read_text()) for file in files]
