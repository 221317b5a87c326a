"""What `benchmarks.internet` found, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.internet.worker import NO_OP
from benchmarks.quality.variants import AVERAGED, LOCAL, LOCAL_DENSER, LOCAL_STEPS
from benchmarks.report import RESULTS, markdown

FILE = RESULTS / "internet.json.xz"
DENSE, PER_STEP = "AdamW, dense", "AdamW, dgc, 0.1% in 2 bits"  # which sends as much a step as local steps of 15
TRAINED = (DENSE, PER_STEP, *LOCAL_DENSER, *LOCAL, *AVERAGED)
TARGETS = (2.0, 1.8)  # nats a byte, beside what is so much worse than dense at its end
MARGINS = (0.2, 0.1)
LONG_ROUND = 15  # steps, of which nearly all exchange nothing
Runs = Mapping[str, Mapping[str, Any]]


def step_ms(run: Mapping[str, Any]) -> float:
    """Mean time of a step, exchanges included, without the first of all."""
    return statistics.mean(run["milliseconds"][1:])


def curve(learnt: Runs, timed: Runs, name: str) -> list[tuple[float, float]]:
    """(seconds behind the link, loss on what is not trained on) of a whole run."""
    return [(step_ms(timed[name]) * step / 1e3, loss) for step, loss, _ in learnt[name]["curve"]]


def seconds_to(points: Sequence[tuple[float, float]], target: float) -> float | None:
    """When a run is first as good as `target`, between evaluations by a straight line; None: it never is."""
    before = points[0]
    for point in points:
        if point[1] <= target:
            (t0, l0), (t1, l1) = before, point
            return t1 if l0 == l1 else t0 + (t1 - t0) * (l0 - target) / (l0 - l1)
        before = point
    return None


def sooner(kept: Mapping[str, Any]) -> str:
    """A table for each link and seed: bytes, time of a step, minutes to several losses beside dense."""
    return "\n\n".join(
        f"{key}; {found['link']:.0f} Mbit/s one way\n\n{_table(found['learnt'], found['timed'])}"
        for key, found in kept.items()
        if "link" in found  # not broken off
    )


def _table(learnt: Runs, timed: Runs) -> str:
    behind, dense = timed[DENSE], curve(learnt, timed, DENSE)
    targets = sorted([*TARGETS, *(learnt[DENSE]["loss"] + margin for margin in MARGINS)], reverse=True)
    lines = [[NO_OP, "", "", f"{step_ms(timed[NO_OP]):.0f}", _times(behind, timed[NO_OP]), *[""] * (1 + len(targets))]]
    for name in (name for name in (DENSE, PER_STEP, *AVERAGED, *LOCAL, *LOCAL_DENSER) if name in timed):
        own = timed[name]
        less = f"{behind['sent'] / own['sent']:,.0f}×" if own["sent"] else ""  # a run shorter than H sends nothing
        line = [name, f"{own['sent'] / 1e3:,.1f}", less]
        line += [f"{step_ms(own):,.0f}", _times(behind, own)]
        if name in learnt:
            points = curve(learnt, timed, name)
            line += [f"{learnt[name]['loss']:.3f}", *(_to(points, dense, target) for target in targets)]
        lines.append(line + [""] * (len(lines[0]) - len(line)))
    head = ["", "kB sent a step", "less", "ms a step", "as fast as dense", "loss at the end"]
    text = markdown([*head, *(f"min to {target:.2f} nats" for target in targets)], lines)
    return f"{text}\n\n{_between(timed)}"


def _between(timed: Runs) -> str:
    """What the steps take that exchange nothing, in rounds of several: a second answer beside NO_OP, in words."""
    found = []
    for names in (AVERAGED, LOCAL, LOCAL_DENSER):
        for name, steps in zip(names, LOCAL_STEPS, strict=True):
            own = [ms for step, ms in enumerate(timed[name]["milliseconds"], start=1) if step % steps and step > 1]
            found += [statistics.median(own)] if own and steps >= LONG_ROUND else []
    if not found:
        return ""
    times = [step_ms(timed[DENSE]) / ms for ms in (max(found), min(found))]
    return (
        f"In rounds of {LONG_ROUND} and more, steps that exchange nothing take {min(found):.0f} to {max(found):.0f} ms "
        f"in the median: {times[0]:.1f} to {times[1]:.1f} times as fast as dense."
    )


def _times(slower: Mapping[str, Any], faster: Mapping[str, Any]) -> str:
    return f"{step_ms(slower) / step_ms(faster):.1f}×"


def _to(points: Sequence[tuple[float, float]], dense: Sequence[tuple[float, float]], target: float) -> str:
    mine, theirs = seconds_to(points, target), seconds_to(dense, target)
    if mine is None:
        return "never"
    gain = f" ({theirs / mine:.1f}×)" if theirs is not None and points != dense else ""
    return f"{mine / 60:.1f}{gain}"
