"""Auto until it has chosen, then every method in turn, some steps of each at a time: whatever the framework."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, Protocol

from dgc_horovod.planning.trial import Trial

NOTHING, DENSE, DGC, AUTO = METHODS = ("no exchange", "dense", "dgc", "auto")
DENSITY = 0.01
_TURNS, _TURN_SECONDS, _MOST_STEPS = 8, 4.0, 60


class Trainer(Protocol):
    """A model that one method trains."""

    def step(self) -> float:
        """Seconds of a step."""

    @property
    def trial(self) -> Trial:
        """That of auto."""


def measure(make: Callable[[str], Trainer], mean: Callable[[float], float]) -> dict[str, Any]:
    """Auto's steps until it has chosen, what it found, and the milliseconds of every method's steps.

    Args:
        make: function that makes the trainer of a method.
        mean: function that gives the mean of a number over the ranks, when all of them have come.
    """
    auto = make(AUTO)
    choosing = [auto.step()]
    while not auto.trial.ended:
        choosing.append(auto.step())
    trainers = {AUTO: auto, **{method: make(method) for method in METHODS if method != AUTO}}
    longest = mean(statistics.median(choosing))
    steps = max(1, min(_MOST_STEPS, int(_TURN_SECONDS / longest)))
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    for turn in range(_TURNS + 1):  # the first is not counted: selection has not settled yet
        first = turn % len(METHODS)  # each comes after each of the others
        for method in (*METHODS[first:], *METHODS[:first]):
            mean(0.0)
            taken = [trainers[method].step() for _ in range(steps)]
            times[method] += taken if turn else []
    return {
        "mode": auto.trial.mode,
        "found": {mode: round(1e3 * seconds, 2) for mode, seconds in auto.trial.seconds.items()},
        "choosing_ms": [round(1e3 * seconds, 2) for seconds in choosing],
        "ms": {method: [round(1e3 * seconds, 2) for seconds in taken] for method, taken in times.items()},
    }
