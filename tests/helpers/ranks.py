"""Cases on ranks: functions in ``tests/parallel/cases`` that return what a test reads. New tests use `on_ranks`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers.launchers import built_controllers
from tests.helpers.on_ranks import on_ranks

__all__ = ["built_controllers", "run_ranks", "run_torch_ranks"]


def run_ranks(workers: int, cases: list[str], controller: str = "gloo", timeout: float = 240, **others: Any) -> Any:
    """What each rank's cases return, by case; `controller` "nodes": on two nodes; see `on_ranks`."""
    kind = "keras" if all(case.startswith("keras_") for case in cases) else "torch"
    nodes = 2 if controller == "nodes" else 1
    where = "gloo" if controller == "nodes" else controller
    return _run(workers, kind, cases, controller=where, nodes=nodes, timeout=timeout, **others)


def run_torch_ranks(workers: int, cases: list[str], timeout: float = 150, **others: Any) -> Any:
    """The same on ranks that torchrun has started, without Horovod."""
    return _run(workers, "ddp", cases, timeout=timeout, **others)


def _run(
    workers: int, kind: str, cases: list[str], folder: Path | None = None,
    environment: Mapping[str, str] | None = None, **others: Any,
) -> Any:  # fmt: skip
    variables = {"DGC_TEST_FOLDER": str(folder or ""), **(environment or {})}
    return on_ranks(returned, workers, kind, arguments={"cases": cases}, environment=variables, **others)


def returned(cases: list[str]) -> dict[str, Any]:
    """On a rank: what each case returns, as JSON has it."""
    found = {}
    for case in cases:
        module, function = case.split(".")
        found[case] = getattr(importlib.import_module(f"tests.parallel.cases.{module}"), function)()
    return json.loads(json.dumps(found))
