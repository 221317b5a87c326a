"""The plots of a run, as images inside the page: matplotlib's SVG in data URIs, white in the dark theme too."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dgc_horovod.tools.report import figures
from dgc_horovod.tools.report.figures import Run, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES = 4.6, 2.7
_COLOURS = {"compute": "#4c8dd6", "compress": "#d98a2b", "decode": "#9a78d6", "wait": "#8d949c"}
_RED = "#dc4b57"
_MOST_POINTS = 300  # of a curve
_FEW_RANKS = 12  # number of names that fit beside the bars
_STYLE: dict[Any, Any] = {
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
Plot = Callable[["Axes", Run], bool]  # draws into axes; returns whether there was anything to draw
Points = list[tuple[float, float]]
PointsOf = Callable[[Run], Points]


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
        style: dict[str, Any] = {"color": _COLOURS["wait"], "linewidth": 1}
        if rank == slowest.figures["rank"]:
            style = {"color": _RED, "linewidth": 2, "zorder": 3, "label": f"rank {rank}, waits least"}
        _line(axes, [(step, 1000 * times.wait) for step, times in points], **style)
    axes.set_ylabel("ms waiting a step")
    axes.set_ylim(bottom=0)
    return True


def _lines(label: str, lines: dict[str, PointsOf], scale: str = "log") -> Plot:
    """Return a plot of lines: name in the legend -> points; `label`: of their axis."""

    def draw(axes: Axes, run: Run) -> bool:
        drawn = [_line(axes, points_of(run), label=name) for name, points_of in lines.items()]
        axes.set(yscale=scale, ylabel=label)
        return any(drawn)

    return draw


def _line(axes: Axes, points: Points, **style: Any) -> bool:
    """Draw a line through some hundreds of `points`; returns whether there are two of them."""
    if len(points) < 2:
        return False
    shown = points[:: -(-len(points) // _MOST_POINTS)]
    axes.plot(*zip(*shown, points[-1], strict=True), **style)
    return True


def _figure(name: str) -> PointsOf:
    """Return the points of a figure of rank 0, where it is above 0."""
    return lambda run: [(number(r, "steps"), number(r, name)) for r in run.records if number(r, name) > 0]


def _rate(name: str, over: str = "steps") -> PointsOf:
    """Return the growth of a counter of rank 0 for each growth by 1 of the counter `over`, where it is above 0."""

    def points(run: Run) -> Points:
        found: Points = []
        for before, now in itertools.pairwise(run.records):
            grown, units = (number(now, key) - number(before, key) for key in (name, over))
            if grown > 0 and units > 0:  # the mean is drawn over all the steps that it covers
                found += [(number(record, "steps"), grown / units) for record in (before, now)]
        return found

    return points


_PLOTS: dict[str, Plot] = {
    "Time of a step, rank by rank": _ranks,
    "Time of a step over the run, mean of the ranks": _steps_in_time,
    "Waiting for the other ranks": _waits,
    "Bytes of a step": _lines("bytes", {"sent": _rate("bytes_sent"), "fp32 would be": _rate("bytes_dense")}),
    "Density": _lines("share of elements sent", {"": _rate("selected", over="elements")}),
    "Residual norm / gradient norm": _lines("ratio", {"of rank 0": _figure("residual_ratio")}),
    "Staleness: steps since an element was sent before": _lines(
        "steps", {"99% are below": _figure("staleness_99"), "mean": _figure("staleness_mean")}
    ),
    "Overlap of the ranks' selections": _lines("overlap", {"of two ranks": _figure("overlap")}, scale="linear"),
}
