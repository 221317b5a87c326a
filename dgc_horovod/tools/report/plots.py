"""The plots of a run, as images inside the page: matplotlib's SVG in data URIs, white in the dark theme too."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dgc_horovod.tools.report import figures
from dgc_horovod.tools.report.figures import Run, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES = 4.6, 2.7
_COLOURS = {"compute": "#4c8dd6", "compress": "#d98a2b", "decode": "#9a78d6", "wait": "#8d949c"}
_RED, _GREEN = "#dc4b57", "#2f9e6e"
_MOST_POINTS = 300  # of a curve
_FEW_RANKS = 12  # number of names that fit beside the bars
_STYLE: dict[Any, Any] = {
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
Plot = Callable[["Axes", Run], bool]  # draws into axes; returns whether there was anything to draw


def of_run(run: Run) -> dict[str, str] | None:
    """Return the URI of an image for each plot that has data, by caption; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    with matplotlib.rc_context(_STYLE):
        drawn = {caption: _drawn(draw, run) for caption, draw in _PLOTS.items()}
    return {caption: picture for caption, picture in drawn.items() if picture is not None}


def _drawn(draw: Plot, run: Run) -> str | None:
    from matplotlib.figure import Figure  # without pyplot: nothing is shown, no backend is chosen

    picture = Figure(figsize=_INCHES, layout="constrained")
    axes = picture.add_subplot()
    axes.set_xlabel("step")
    if not draw(axes, run):
        return None
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        picture.legend(handles, labels, loc="outside upper left", ncols=4, handlelength=1, columnspacing=1)
    file = io.BytesIO()
    picture.savefig(file, format="svg")
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


def _steps_in_time(axes: Axes, run: Run) -> bool:
    """Draw the mean over ranks; a rank with fewer records is left out."""
    of_ranks = list(figures.series(run).values())
    longest = max(map(len, of_ranks), default=0)
    whole = [points for points in of_ranks if len(points) == longest]
    if longest < 2:
        return False
    steps = [points[0] for points in whole[0]]
    means = [figures.mean([times for _, times in each]) for each in zip(*whole, strict=True)]
    parts = {name: [1000 * getattr(times, name) for times in means] for name in _COLOURS}
    edges, areas = [steps[0] - 1, *steps], {name: [values[0], *values] for name, values in parts.items()}
    axes.stackplot(edges, *areas.values(), labels=list(areas), colors=list(_COLOURS.values()), step="pre", alpha=0.85)
    if steps[0] > 1:
        axes.set_xlim(left=0)
    _mark_skips(axes, run)
    axes.set_ylabel("ms a step")
    return True


def _mark_skips(axes: Axes, run: Run) -> None:
    skips = figures.skips(run)
    for step, _ in skips:
        axes.axvline(step, color=_RED, linewidth=1.6)
    if skips:
        first = skips[0][0]
        axes.annotate(
            f"skipped: step {first:.0f}", (first, 1), xycoords=("data", "axes fraction"), color=_RED,
            textcoords="offset points", xytext=(3, -8), weight="bold",
        )  # fmt: skip


def _ranks(axes: Axes, run: Run) -> bool:
    told, slowest = run.timed, run.straggler
    if slowest is None:
        return False
    places, start = list(range(len(told))), [0.0] * len(told)
    for name, colour in _COLOURS.items():
        widths = [1000 * getattr(times, name) for _, times in told]
        axes.barh(places, widths, left=start, color=colour, label=name, alpha=0.85)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    every = max(1, len(told) // _FEW_RANKS)
    axes.set_yticks(places[::every], [f"rank {rank['rank']:.0f}" for rank, _ in told][::every])
    if slowest.notable:
        slow = slowest.place
        axes.barh([slow], [start[slow]], color="none", edgecolor=_RED, linewidth=2)
        if slow % every == 0:
            axes.get_yticklabels()[slow // every].set(color=_RED, weight="bold")
    axes.invert_yaxis()
    axes.set_xlabel("ms a step")
    return True


def _waits(axes: Axes, run: Run) -> bool:
    slowest, every = run.straggler, figures.series(run)
    if slowest is None or max(map(len, every.values()), default=0) < 2:
        return False
    for rank, points in every.items():
        shown = _thinned([(step, 1000 * times.wait) for step, times in points])
        (line,) = axes.plot(*zip(*shown, strict=True), color=_COLOURS["wait"], linewidth=1)
        if rank == slowest.figures["rank"]:
            line.set(color=_RED, linewidth=2, zorder=3, label=f"rank {rank}, waits least")
    axes.set_ylabel("ms waiting a step")
    axes.set_ylim(bottom=0)
    return True


def _curves(names: dict[str, str], label: str, logarithmic: bool) -> Plot:
    """Return a plot of some figures of rank 0: name in the records -> name in the legend."""

    def draw(axes: Axes, run: Run) -> bool:
        drawn = False
        for (name, shown), colour in zip(names.items(), (_COLOURS["compute"], _COLOURS["compress"]), strict=False):
            points = [(number(r, "steps"), number(r, name)) for r in run.records if number(r, name) > 0]
            if len(points) > 1:
                points, drawn = _thinned(points), True
                axes.plot(*zip(*points, strict=True), color=colour, label=shown, marker=".", markersize=3)
        axes.set(yscale="log" if logarithmic else "linear", ylabel=label)
        return drawn

    return draw


def _rates(names: dict[str, tuple[str | None, str]], over: str, unit: float, label: str) -> Plot:
    """Return a plot of how much counters of rank 0 grow in units for each growth by 1 of the counter `over`: name in
    the records -> name in the legend, colour.
    """

    def draw(axes: Axes, run: Run) -> bool:
        for name, (shown, colour) in names.items():
            points = [(step, rate / unit) for step, rate in figures.rates(run, name, over) if rate > 0]
            if not points:
                return False
            points = _thinned([(0, points[0][1]), *points])  # each mean is drawn over all the steps that it covers
            axes.plot(*zip(*points, strict=True), drawstyle="steps-pre", color=colour, label=shown)
        axes.set(yscale="log", ylabel=label)
        return True

    return draw


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    kept = points[:: -(-len(points) // _MOST_POINTS)]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


_PLOTS: dict[str, Plot] = {
    "Time of a step, rank by rank": _ranks,
    "Time of a step over the run, mean of the ranks": _steps_in_time,
    "Waiting for the other ranks": _waits,
    "Bytes of a step": _rates(
        {"bytes_sent": ("sent", _GREEN), "bytes_dense": ("fp32 would be", _COLOURS["wait"])},
        "steps",
        1e6,
        "MB a step and rank",
    ),
    "Density": _rates({"selected": (None, _COLOURS["compute"])}, "elements", 1, "share of elements sent"),
    "Residual norm / gradient norm": _curves({"residual_ratio": "of rank 0"}, "ratio", True),
    "Staleness: steps since an element was sent before": _curves(
        {"staleness_99": "99% are below", "staleness_mean": "mean"}, "steps", True
    ),
    "Overlap of the ranks' selections": _curves({"overlap": "of two ranks"}, "overlap", False),
}
