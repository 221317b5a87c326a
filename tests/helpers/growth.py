"""What a process has more of after something was made, used and let go of many times."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CYCLES, MANY = 12, 300
_WARM_UP = 3  # cycles before the first look
_SLOW = [pytest.mark.slow, pytest.mark.timeout(5000), pytest.mark.on_ranks(2, timeout=4000, fresh=True)]
each_length = pytest.mark.parametrize("cycles", [CYCLES, pytest.param(MANY, marks=_SLOW)])


def growth(cycle: Callable[[], list[weakref.ref[Any]]], cycles: int) -> dict[str, float]:
    """What there is more after so many cycles, and of objects and memory how much of it in each.

    Args:
        cycle: function that makes something, uses it and lets go of it; it returns weak references to what is to go.
        cycles: number of cycles that are counted, after some that are not.
    """
    known = [each for _ in range(_WARM_UP) for each in cycle()]
    before = _seen()
    for _ in range(cycles):
        known += cycle()
    found = {name: after - before[name] for name, after in _seen().items()}
    in_each = {name: found.pop(name) / cycles for name in ("objects", "kilobytes")}
    return {**found, **in_each, "alive": sum(each() is not None for each in known)}


def _seen() -> dict[str, int]:
    gc.collect()
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "objects": len(gc.get_objects()),
        "kilobytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024,
    }


def check_growth(found: dict[str, float], objects: float = 40, kilobytes: float = 100) -> None:
    """What `growth` has found is little; counts of what an optimizer has exchanged stay, for the line at the end.

    Args:
        found: what it has returned.
        objects, kilobytes: that may stay of each cycle.
    """
    assert found["alive"] == 0 and found["files"] <= 1 and found["threads"] <= 1, found
    assert found["objects"] < objects and found["kilobytes"] < kilobytes, found
