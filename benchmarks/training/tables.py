"""The figures of the training study as Markdown."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from benchmarks.report import markdown
from benchmarks.training import analysis, runs
from benchmarks.training.tasks import STUDIED, TASKS


def study(found: runs.Study) -> str:
    """All figures as Markdown, one table a task, number of hosts and rate, and what they rest on."""
    rows = analysis.rows(found["runs"])
    text = []
    for (task, hosts, rate), group in itertools.groupby(rows, lambda row: (row.task, row.hosts, row.rate)):
        text.append(f"### {task}, {hosts} hosts, {rate}\n\n{_table(list(group))}")
    return "\n\n".join([*text, _footnotes(found)])


def _table(rows: Sequence[analysis.Row]) -> str:
    head = ["", TASKS[rows[0].task].unit, "steps to target", "seconds to target", "gain", "bar", "ms a step"]
    head += ["samples/s", "efficiency", "MB received a step", "less"]
    return markdown(head, [[row.method, *_cells(row)] for row in rows])


def _cells(row: analysis.Row) -> list[str]:
    quality = f"{statistics.mean(row.quality):.2f}{_deviation(row.quality)}" if row.quality else ""
    capped = " (0.8 of the cap)" if row.bar is not None and row.bar < analysis.BARS[row.rate] else ""
    bar = "" if row.bar is None else f"{row.bar:.1f}×{capped} {'met' if row.met else 'MISSED'}"
    return [
        quality,
        _median(row.steps, ".0f"),
        f"{_median(row.seconds, '.1f')}{'*' if row.extrapolated else ''}",
        _median(row.gain, ".2f", "×"),
        bar,
        f"{row.step_ms:.1f}",
        f"{row.samples_per_s:.0f}",
        f"{row.efficiency:.0%}",
        f"{row.received:.3g}",
        f"{row.less:.0f}×" if row.received else "",
    ]


def _deviation(values: Sequence[float]) -> str:
    return f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""


def _median(values: Sequence[float], form: str, unit: str = "") -> str:
    """The median and, for several seeds, the range."""

    def shown(value: float) -> str:
        return format(value, form) if math.isfinite(value) else "never"

    middle = statistics.median(values)
    ends = f" ({shown(min(values))}–{shown(max(values))})" if len(values) > 1 else ""
    return f"{shown(middle)}{unit if math.isfinite(middle) else ''}{ends}"


def _footnotes(study: runs.Study) -> str:
    found = analysis.checks(study["runs"])
    links = "; ".join(f"{name}: {rate} Mbit/s" for name, rate in study["links"].items())
    lines = [
        "\\* steps × median time of a step, not the clock's. "
        "No-op: dense's steps without any exchange; its gain is the cap. "
        "Bytes of dense and fp16 are those of a ring, not counted.",
        "The target is the last quality of that seed's dense run, less the margin; every method reaches it at its "
        f"first evaluation that is as good. {_schedules()}",
        f"Median over seeds and range. Links as measured: {links or 'none, ranks on this machine'}.",
        f"Replicas with the same weights: {_of(found['replicas'])} runs. "
        f"Same losses on both links, bit for bit: {_of(found['same_bits'])} runs; "
        f"of the others the largest difference is {found['largest_difference']:.1%}.",
        *(
            f"{name}: steps × time of a step is {ratio:.3f} of the clock's"
            for name, ratio in found["product_over_clock"].items()
        ),
    ]
    return "\n\n".join(lines)


def _schedules() -> str:
    """How long the compressed runs' schedules are."""
    longer = [f"{TASKS[name].settings.stretch:g} times as long ({name})" for name in STUDIED]
    return f"A compressed run's learning-rate schedule is {' or '.join(longer)} as the others'."


def _of(pair: tuple[int, int]) -> str:
    return f"{pair[0]} of {pair[1]}"
