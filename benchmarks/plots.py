"""The plots of docs/benchmarks-network.md, from the JSON of the studies; matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.exchange.tables import NAMES, TITLES, Row, median
from benchmarks.planning import scaling
from benchmarks.report import label, panels, save_figure
from benchmarks.training.analysis import Curve
from benchmarks.training.tasks import TASKS

STYLES: dict[str, dict[str, Any]] = {
    "dense": {"color": "#444444", "marker": "o"},
    "fp16": {"color": "#999999", "marker": "o"},
    "torch DDP, PowerSGD 2": {"color": "#e69f00", "marker": "s", "linestyle": ":"},
    "published DGC": {"color": "#d55e00", "marker": "s"},
    "dgc": {"color": "#0072b2", "marker": "D", "linewidth": 2.2},
    "dgc, gaussian": {"color": "#009e73", "marker": "D"},
    "gaussian": {"color": "#009e73", "marker": "D"},
    "no exchange": {"color": "#bbbbbb", "marker": "", "linestyle": "--"},
}
_SHOWN = ("dense", "fp16", "torch DDP, PowerSGD 2", "published DGC", "dgc", "no exchange")


def step_times(rows: Sequence[Row], models: Sequence[str], workers: int, file: Path) -> None:
    """Time of the exchange over the link's rate, a panel a model.

    Args:
        rows: of the exchange study.
        models: one panel each.
        workers: N.
        file: to write.
    """
    figure, (line,) = panels(len(models), width=4.2 + 1.8 / len(models), height=3.8, sharey=True)
    for axes, model in zip(line, models, strict=True):
        mine = [row for row in rows if (row["model"], row["workers"]) == (model, workers)]
        rates = [rate for rate in NAMES if any(row["rate"] == rate for row in mine) and rate != "here"]
        for method in _SHOWN:
            points = [(at, median(mine, method, rate)) for at, rate in enumerate(rates)]
            points = [point for point in points if point[1] is not None]
            if points:
                axes.semilogy(*zip(*points, strict=True), label=method, **{**STYLES[method], "markersize": 5})
        axes.set_xticks(range(len(rates)), [NAMES[rate] for rate in rates])
        axes.set_title(f"{TITLES[model]}, {mine[0]['parameters'] / 1e6:.1f} M parameters", fontsize=10)
        axes.grid(alpha=0.3, which="major")
    line[0].set_ylabel("milliseconds a step")
    lines = line[-1].get_legend_handles_labels()
    figure.legend(*lines, loc="outside right upper", frameon=False, fontsize=8)
    save_figure(figure, file)


def bytes_sent(rows: Sequence[Row], file: Path) -> None:
    """Bytes that leave a host in a step, a group of bars a model; N = 2."""
    figure, ((axes,),) = panels(width=7.2, height=3.6)
    mine = [row for row in rows if row["workers"] == 2]
    models = [model for model in TITLES if any(row["model"] == model for row in mine)]
    shown = [method for method in _SHOWN if method != "no exchange"]
    for place, method in enumerate(shown):
        for at, model in enumerate(models):
            sent = next((r["bytes"] for r in mine if (r["model"], r["method"]) == (model, method)), None)
            if sent:
                label = method if at == 0 else None
                axes.bar(at + (place - 2) * 0.17, sent, 0.16, color=STYLES[method]["color"], label=label)
    axes.set_yscale("log")
    axes.set_xticks(range(len(models)), [TITLES[model] for model in models])
    axes.set_ylabel("bytes a step, from each host")
    axes.legend(frameon=False, fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.5, 1.14))
    save_figure(figure, file)


def efficiency(rows: Sequence[Row], model: str, rates: Sequence[str], density: float, file: Path) -> None:
    """Scaling efficiency over N, a panel a rate: measured (points) and modelled (dashed)."""
    figure, (line,) = panels(len(rates), sharey=True)
    for axes, rate in zip(line, rates, strict=True):
        mine = [row for row in rows if (row["model"], row["rate"]) == (model, rate)]
        for method in ("dense", "fp16", "published DGC", "dgc"):
            style = {**STYLES[method], "markersize": 5}
            found = {n: 100 * scaling.efficiency(ms) for n, ms in scaling.measured(mine, method).items()}
            if not found:
                continue
            axes.semilogx(*zip(*found.items(), strict=True), label=method, **style)
            if method in ("dense", "dgc"):
                guess = {2: found[2]} if 2 in found else {}
                guess |= {n: 100 * scaling.efficiency(ms) for n, ms in scaling.modelled(mine, method, density).items()}
                dashed = {**style, "linestyle": "--", "markerfacecolor": "white", "linewidth": 1.2}
                axes.semilogx(list(guess), list(guess.values()), label=f"{method}, modelled", **dashed)
        axes.set_xticks((2, 4, 8, *scaling.MODELLED), map(str, (2, 4, 8, *scaling.MODELLED)))
        axes.minorticks_off()
        axes.set_ylim(0, 100)
        label(axes, f"{TITLES[model]}, {NAMES[rate]}", x="hosts, N")
    line[0].set_ylabel("scaling efficiency, %")
    line[0].legend(frameon=False, fontsize=8)
    save_figure(figure, file)


def quality(curves: Sequence[Curve], hosts: int, file: Path) -> None:
    """Quality over training time, a row a task and a column a rate; a line a seed, dotted the target of the first.

    Dashed lines are runs whose seconds are steps times the time of a step, not the clock's.

    Args:
        curves: of the training study.
        hosts: N.
        file: to write.
    """
    mine = [curve for curve in curves if curve.hosts == hosts]
    tasks, rates = (list(dict.fromkeys(getattr(curve, name) for curve in mine)) for name in ("task", "rate"))
    figure, grid = panels(len(rates), len(tasks), 5.2, 3.2)
    for task, line in zip(tasks, grid, strict=True):
        for rate, axes in zip(rates, line, strict=True):
            for curve in (curve for curve in mine if (curve.task, curve.rate) == (task, rate)):
                first = curve.seed == mine[0].seed
                style = {"color": STYLES[curve.method]["color"], "label": curve.method if first else None}
                line_style = "--" if curve.computed else "-"
                axes.semilogx(curve.seconds, curve.quality, linewidth=1.2, linestyle=line_style, **style)
                if first and curve.method == "dense":
                    axes.axhline(curve.target, color="0.6", linestyle=":", linewidth=1)
            label(axes, f"{task}, {hosts} hosts, {NAMES[rate]}", x="seconds of training")
        line[0].set_ylabel(TASKS[task].unit)
    grid[0][0].legend(frameon=False, fontsize=8)
    save_figure(figure, file)
