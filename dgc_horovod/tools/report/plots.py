"""The plots of a run, as SVG inside the page: transparent, in middle tones, with text in the page's own colour."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from dgc_horovod.tools.report import figures
from dgc_horovod.tools.report.figures import Run, number
from dgc_horovod.tools.report.html import tag

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MISSING = "There are no plots: matplotlib is not installed here (pip install matplotlib)."
_INCHES = 4.6, 2.7
_INK = "#010203"  # replaced by the colour of the page's text
_COLOURS = {"compute": "#4c8dd6", "compress": "#d98a2b", "decode": "#9a78d6", "wait": "#8d949c"}
_RED, _GREEN = "#dc4b57", "#2f9e6e"
_MOST_POINTS = 300  # of a curve
_FEW_RANKS = 12  # number of names that fit beside the bars
Plot = Callable[["Axes", Run], bool]  # draws into axes; returns whether there was anything to draw


def of_run(run: Run) -> list[Element]:
    """Return a figure with its caption for each plot that has data; a note without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return [tag("p", MISSING, class_="note")]
    made = []
    with matplotlib.rc_context(_settings()):
        for caption, draw in _PLOTS.items():
            picture = _drawn(draw, run, caption)
            if picture is not None:
                made.append(tag("figure", picture, tag("figcaption", caption)))
    return made


def _settings() -> Any:
    inks = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    return {
        **dict.fromkeys(inks, _INK),
        "font.size": 8.5,
        "svg.fonttype": "none",  # the page's own font
        "svg.hashsalt": "dgc",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
    }


def _drawn(draw: Plot, run: Run, caption: str) -> Element | None:
    from matplotlib.figure import Figure  # without pyplot: nothing is shown, no backend is chosen

    picture = Figure(figsize=_INCHES, layout="constrained")
    axes = picture.add_subplot()
    axes.set_xlabel("step")
    if not draw(axes, run):
        return None
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        picture.legend(handles, labels, loc="outside upper left", ncols=4, handlelength=1, columnspacing=1)
    file = io.StringIO()
    picture.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(file.getvalue(), caption)


def _inline(text: str, caption: str) -> Element:
    """Return a drawing for HTML: without namespaces, unused names and own rules, as wide as the page allows."""
    root = ElementTree.fromstring(text.replace(_INK, "currentColor"))
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):
                parent.remove(child)
    used = {value for element in root.iter() for value in _references(element)}
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for key in list(element.attrib):
            value = element.attrib.pop(key)
            if key != "id" or value in used:
                element.set(key.rpartition("}")[2], value)
    for key in ("width", "height"):
        root.attrib.pop(key, None)
    root.attrib |= {"role": "img", "aria-label": caption}
    return root


def _references(element: Element) -> Iterator[str]:
    for key, value in element.attrib.items():
        if key.endswith("href"):
            yield value.removeprefix("#")
        elif value.startswith("url(#"):
            yield value[len("url(#") : -1]


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
    told = [(rank, times) for rank in run.ranks if (times := figures.times(rank)) is not None]
    slowest = figures.straggler(run)
    if not told or slowest is None:
        return False
    places, start = list(range(len(told))), [0.0] * len(told)
    for name, colour in _COLOURS.items():
        widths = [1000 * getattr(times, name) for _, times in told]
        axes.barh(places, widths, left=start, color=colour, label=name, alpha=0.85)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    slow = [rank["rank"] for rank, _ in told].index(slowest.figures["rank"])
    if slowest.notable:
        axes.barh([slow], [start[slow]], color="none", edgecolor=_RED, linewidth=2)
    every = max(1, len(told) // _FEW_RANKS)
    axes.set_yticks(places[::every], [f"rank {rank['rank']:.0f}" for rank, _ in told][::every])
    for label, place in zip(axes.get_yticklabels(), places[::every], strict=True):
        if place == slow and slowest.notable:
            label.set(color=_RED, weight="bold")
    axes.invert_yaxis()
    axes.set_xlabel("ms a step")
    return True


def _waits(axes: Axes, run: Run) -> bool:
    slowest, every = figures.straggler(run), figures.series(run)
    if slowest is None or max(map(len, every.values()), default=0) < 2:
        return False
    for rank, points in every.items():
        slow = rank == slowest.figures["rank"]
        style: dict[str, Any] = (
            {"color": _RED, "linewidth": 2, "zorder": 3} if slow else {"color": _COLOURS["wait"], "linewidth": 1}
        )
        label = f"rank {rank}, waits least" if slow else None
        axes.plot(*_thinned([(step, 1000 * times.wait) for step, times in points]), label=label, **style)
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
                drawn = bool(axes.plot(*_thinned(points), color=colour, label=shown, marker=".", markersize=3))
        if logarithmic:
            axes.set_yscale("log")
        axes.set_ylabel(label)
        return drawn

    return draw


def _bytes(axes: Axes, run: Run) -> bool:
    for name, colour, shown in (("bytes_sent", _GREEN, "sent"), ("bytes_dense", _COLOURS["wait"], "fp32 would be")):
        points = [(step, rate / 1e6) for step, rate in figures.rates(run, name, "steps") if rate > 0]
        if not points:
            return False
        _draw_steps(axes, points, color=colour, label=shown)
    axes.set_yscale("log")
    axes.set_ylabel("MB a step and rank")
    return True


def _density(axes: Axes, run: Run) -> bool:
    points = [(step, rate) for step, rate in figures.rates(run, "selected", "elements") if rate > 0]
    if not points:
        return False
    _draw_steps(axes, points, color=_COLOURS["compute"])
    axes.set_yscale("log")
    axes.set_ylabel("share of elements sent")
    return True


def _draw_steps(axes: Axes, points: list[tuple[float, float]], **style: Any) -> None:
    """Draw means, each over all the steps that it covers."""
    axes.plot(*_thinned([(0, points[0][1]), *points]), drawstyle="steps-pre", **style)


def _thinned(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    every = -(-len(points) // _MOST_POINTS)
    kept = points[::every] if points[-1] in points[::every] else [*points[::every], points[-1]]
    return [x for x, _ in kept], [y for _, y in kept]


_PLOTS: dict[str, Plot] = {
    "Time of a step, rank by rank": _ranks,
    "Time of a step over the run, mean of the ranks": _steps_in_time,
    "Waiting for the other ranks": _waits,
    "Bytes of a step": _bytes,
    "Density": _density,
    "Residual norm / gradient norm": _curves({"residual_ratio": "of rank 0"}, "ratio", True),
    "Staleness: steps since an element was sent before": _curves(
        {"staleness_99": "99% are below", "staleness_mean": "mean"}, "steps", True
    ),
    "Overlap of the ranks' selections": _curves({"overlap": "of two ranks"}, "overlap", False),
}
