"""What to see first: one tile for each question, with the answer and whether it is as it should be."""

from __future__ import annotations

from typing import NamedTuple

from dgc_horovod.planning.trial import COMPRESSED, DENSE
from dgc_horovod.tools.report import figures
from dgc_horovod.tools.report.figures import count, milliseconds, percent, size, times_less
from dgc_horovod.tools.report.records import Run, number

_MODES = {DENSE: "stock Horovod", "fp16": "stock Horovod, fp16", COMPRESSED: "compressed"}  # fp16: of earlier versions
GOOD, LOOK, PLAIN = "good", "look", "plain"


class Tile(NamedTuple):
    """An answer.

    Args:
        question: what it answers.
        answer: the answer in a few words.
        more: one sentence more.
        state: ``GOOD``, ``LOOK`` (something should be done), or ``PLAIN`` (a figure).
    """

    question: str
    answer: str
    more: str
    state: str


def tiles(run: Run) -> list[Tile]:
    """All that there is something to say of."""
    found = [_end(run), _choice(run), _sent(run), _slow(run), _skipped(run), _replicas(run), _advice(run)]
    return [tile for tile in found if tile is not None]


def _end(run: Run) -> Tile:
    steps, seconds, skipped = (number(run.last, name) for name in ("steps", "seconds", "skipped"))
    answer = f"{count(steps)} steps in {seconds:,.0f} s"
    if skipped:
        answer += f", skipped {count(skipped)} of them"
    if run.ended:
        return Tile("The run", answer, "It has come to its end.", LOOK if skipped else GOOD)
    return Tile("The run", answer, "It goes on, or was stopped: there is no last record.", LOOK)


def _choice(run: Run) -> Tile | None:
    """Of compression auto: an exchange without a time of its own is being tried, or the trial was broken off."""
    mode, told = run.last.get("mode"), run.last.get("trial_seconds")
    if not isinstance(mode, str):
        return None
    timed = {name: seconds for name in _MODES if isinstance(told, dict) and (seconds := number(told, name)) > 0}
    times = ", ".join(f"{_MODES[name]} {milliseconds(seconds)}" for name, seconds in timed.items())
    more = f"A step, as timed: {times}." if timed else "No times were compared."
    if timed and mode not in timed:
        more += " It has no time of its own yet."
    stock = f"{count(figures.stock_steps(run))} of {count(number(run.last, 'steps'))} steps were stock Horovod's."
    return Tile("Exchange", _MODES.get(mode, mode), f"{more} {stock}", PLAIN)


def _sent(run: Run) -> Tile | None:
    moved = figures.traffic(run)
    if not moved.sent:
        return Tile("Bytes sent", "not counted", "Horovod's own exchange of dense gradients is not.", PLAIN)
    less = times_less(moved.dense_sent, moved.sent)
    return Tile("Bytes sent", less, f"A rank sent {size(moved.sent)}; fp32 would be {size(moved.dense_sent)}.", PLAIN)


def _slow(run: Run) -> Tile | None:
    slowest = figures.straggler(run)
    if slowest is None:
        return None
    name = f"rank {slowest.figures['rank']:.0f} ({slowest.figures['host']})"
    lost = f"{milliseconds(slowest.lost)} of every step, {percent(slowest.share)}"
    if slowest.notable:
        return Tile("Slowest rank", f"{name} is slow", f"The others wait for it {lost} of their time.", LOOK)
    return Tile("Slowest rank", "none stands out", f"The others wait for {name} {lost}.", GOOD)


def _skipped(run: Run) -> Tile:
    skipped, steps = number(run.last, "skipped"), number(run.last, "steps")
    if not skipped:
        stock = figures.stock_steps(run)
        more = "Stock Horovod's steps are all applied." if stock else "Every gradient was finite."
        return Tile("Skipped steps", "none", more, PLAIN if stock else GOOD)
    answer = f"{count(skipped)} of {count(steps)} ({percent(skipped / max(1.0, steps))})"
    first = figures.skips(run)
    more = f"The first is step {first[0][0]:.0f}: not finite on {first[0][1]}." if first else ""
    return Tile("Skipped steps", answer, more, LOOK)


def _replicas(run: Run) -> Tile:
    made, differed = number(run.last, "replica_checks"), number(run.last, "replica_mismatches")
    if differed:
        more = f"Of {count(made)} comparisons of weights; the ranks went on with those of the first."
        return Tile("Replicas", f"differed {count(differed)} times", more, LOOK)
    if not made:
        return Tile("Replicas", "not compared", _why_not_compared(run), PLAIN)
    return Tile("Replicas", "all alike", f"Weights were compared {count(made)} times.", GOOD)


def _why_not_compared(run: Run) -> str:
    stock = figures.stock_steps(run)
    if not stock:
        return "check_every is 0, or the run too short."
    if stock >= number(run.last, "steps"):
        return "Every step was stock Horovod's, which compares no weights."
    return "check_every is 0, or compressed steps too few: stock Horovod's compare no weights."


def _advice(run: Run) -> Tile:
    found = run.last.get("advice")
    texts = [str(text) for text in found] if isinstance(found, list) else []
    if not texts:
        return Tile("Advice", "none", "All figures stayed in the range that was seen to be sound.", GOOD)
    return Tile("Advice", f"{len(texts)} given", " ".join(f"{text}." for text in texts), LOOK)
