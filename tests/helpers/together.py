"""Many tests in one: over MPI and on nodes ranks are started for each test, which takes longer than most do."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

_PARAM = type(pytest.param())


def call_each(*tests: Callable[..., Any], adapter: Any = None) -> None:
    """Call tests one after another, each with all its parameters; of adapters with `adapter` alone."""
    for test in tests:
        marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
        for rows in itertools.product(*(_rows(*mark.args) for mark in marks)):
            given = {name: value for row in rows for name, value in row.items()}
            if given.get("adapter", adapter) == adapter:
                test(**given)


def all_of(module: str) -> list[Callable[..., Any]]:
    """The tests of a module that ask for no ranks of their own."""
    found = [test for name, test in vars(sys.modules[module]).items() if name.startswith("test_") and callable(test)]
    return [test for test in found if "on_ranks" not in [mark.name for mark in getattr(test, "pytestmark", [])]]


def _rows(names: str | Sequence[str], values: Any) -> list[dict[str, Any]]:
    names = [names] if isinstance(names, str) else names
    rows = [row.values if isinstance(row, _PARAM) else row if len(names) > 1 else (row,) for row in values]
    return [dict(zip(names, row, strict=True)) for row in rows]
