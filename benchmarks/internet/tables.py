"""What `benchmarks.internet` found, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.internet.worker import NO_OP
from benchmarks.quality.variants import AVERAGED, GPT_DENSE, LOCAL, LOWER, PER_STEP
from benchmarks.report import RESULTS, markdown

FILE = RESULTS / "internet.json.xz"
DENSE, FROZEN = "AdamW, dense", list(LOWER)[1]  # which sends as much a step as local steps of 15
BEHIND = f"{DENSE}, behind the link"
TARGETS = (2.0, 1.8)  # nats a byte, beside what is so much worse than dense at its end
MARGINS = (0.2, 0.1)
Runs = Mapping[str, Mapping[str, Any]]


def step_ms(run: Mapping[str, Any]) -> float:
    """Mean time of a step, exchanges included, without the first of all."""
    return statistics.mean(run["milliseconds"][1:])


def curve(runs: Runs, name: str) -> list[tuple[float, float]]:
    """(seconds behind the link, loss on what is not trained on) of a whole run."""
    dense = step_ms(runs[BEHIND])
    if name == FROZEN:
        later = step_ms(runs[PER_STEP])
        times = [dense * min(step, GPT_DENSE) + later * max(0, step - GPT_DENSE) for step, *_ in runs[name]["curve"]]
    else:
        ms = dense if name == DENSE else step_ms(runs[name])
        times = [step * ms for step, *_ in runs[name]["curve"]]
    return [(ms / 1e3, loss) for ms, (_, loss, _) in zip(times, runs[name]["curve"], strict=True)]


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
    """A table for each link and seed: bytes, time of a step, seconds to several losses beside dense."""
    parts = []
    for key, found in kept.items():
        if "link" not in found:
            continue  # broken off
        runs, link = found["runs"], found["link"]
        dense, behind = curve(runs, DENSE), runs[BEHIND]
        last = runs[DENSE]["loss"]
        targets = [*TARGETS, *(last + margin for margin in MARGINS)]
        head = ["", "kB sent a step", "less", "ms a step", "of dense", "loss at the end"]
        head += [f"min to {target:.2f} nats" for target in targets]
        lines = [[NO_OP, "", "", f"{step_ms(runs[NO_OP]):.0f}", _times(behind, runs[NO_OP]), ""]]
        lines[0] += [""] * len(targets)
        for name in (DENSE, FROZEN, *AVERAGED, *LOCAL):
            timed = {DENSE: behind, FROZEN: runs[PER_STEP]}.get(name, runs[name])
            line = [
                f"{name} (then)" if name == FROZEN else name,
                f"{timed['sent'] / 1e3:,.1f}",
                f"{behind['sent'] / timed['sent']:,.0f}×" if timed["sent"] else "",  # a run shorter than H
            ]
            line += [f"{step_ms(timed):,.0f}", _times(behind, timed)]
            if name in AVERAGED:
                lines.append([*line, "", *[""] * len(targets)])
                continue
            line.append(f"{runs[name]['loss']:.3f}")
            for target in targets:
                line.append(_to(curve(runs, name), dense, target))
            lines.append(line)
        parts.append(f"{key}; {link:.0f} Mbit/s one way\n\n{markdown(head, lines)}")
    return "\n\n".join(parts)


def _times(slower: Mapping[str, Any], faster: Mapping[str, Any]) -> str:
    return f"{step_ms(slower) / step_ms(faster):.1f}×"


def _to(points: Sequence[tuple[float, float]], dense: Sequence[tuple[float, float]], target: float) -> str:
    mine, theirs = seconds_to(points, target), seconds_to(dense, target)
    if mine is None:
        return "never"
    gain = f" ({theirs / mine:.1f}×)" if theirs is not None and points != dense else ""
    return f"{mine / 60:.1f}{gain}"
