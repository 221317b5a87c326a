"""The page of a run: tiles with the main answers, plots, and tables of all figures; its style is `page.css`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from dgc_horovod.notices import not_finite
from dgc_horovod.planning.trial import COMPRESSED, DENSE
from dgc_horovod.stats import size
from dgc_horovod.tools.report import figures, plots
from dgc_horovod.tools.report.figures import Run, entries, mapping, milliseconds, number, percent, plain

_NO_PLOTS = "There are no plots: matplotlib is not installed here (pip install matplotlib)."
_NOT_COMPARED = "check_every is 0, or compressed steps too few: uncompressed ones compare no weights."
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = Path(__file__).with_name("page.css")
_MODES = {DENSE: "uncompressed", COMPRESSED: "compressed"}
GOOD, LOOK, PLAIN = "good", "look", "plain"


class Tile(NamedTuple):
    """A tile with one answer.

    Args:
        question: the question that it answers.
        answer: the answer in a few words.
        more: one sentence more.
        state: ``GOOD``, ``LOOK`` (something should be done), or ``PLAIN`` (a figure).
    """

    question: str
    answer: str
    more: str
    state: str


def tiles(run: Run) -> list[Tile]:
    """Return all tiles of a run."""
    found = [_end(run), _choice(run), _sent(run), _slow(run), _skipped(run), _replicas(run), _advice(run)]
    return [tile for tile in found if tile is not None]


def _end(run: Run) -> Tile:
    steps, seconds, skipped = (run.number(name) for name in ("steps", "seconds", "skipped"))
    answer = f"{steps:,.0f} steps in {seconds:,.0f} s"
    if skipped:
        answer += f", skipped {skipped:,.0f} of them"
    if run.ended:
        return Tile("The run", answer, "It has come to its end.", LOOK if skipped else GOOD)
    return Tile("The run", answer, "It is running, or was stopped: there is no last record.", LOOK)


def _choice(run: Run) -> Tile | None:
    """The tile of compression auto."""
    mode, told = run.last.get("mode"), mapping(run.last, "trial_seconds")
    if not isinstance(mode, str):
        return None
    timed = {name: seconds for name in _MODES if (seconds := number(told, name)) > 0}
    times = ", ".join(f"{_MODES[name]} {milliseconds(seconds)}" for name, seconds in timed.items())
    more = f"A step, as timed: {times}." if timed else "No times were compared."
    stock = f"{run.number('stock_steps'):,.0f} of {run.number('steps'):,.0f} steps were uncompressed."
    return Tile("Exchange", _MODES.get(mode, mode), f"{more} {stock}", PLAIN)


def _sent(run: Run) -> Tile:
    sent, dense = run.number("bytes_sent"), run.number("bytes_dense")
    if not sent:
        return Tile("Bytes sent", "not counted", "The uncompressed exchange is not counted.", PLAIN)
    more = f"A rank sent {size(sent)}; fp32 would be {size(dense)}."
    return Tile("Bytes sent", figures.times_less(dense, sent), more, PLAIN)


def _slow(run: Run) -> Tile | None:
    slowest = run.straggler
    if slowest is None:
        return None
    name = f"rank {slowest.figures['rank']:.0f} ({slowest.figures['host']})"
    lost = f"{milliseconds(slowest.lost)} of every step, {percent(slowest.share)}"
    if slowest.notable:
        return Tile("Slowest rank", f"{name} is slow", f"The others wait for it {lost} of their time.", LOOK)
    return Tile("Slowest rank", "none stands out", f"The others wait for {name} {lost}.", GOOD)


def _skipped(run: Run) -> Tile:
    skipped, steps = run.number("skipped"), run.number("steps")
    if not skipped:
        stock = run.number("stock_steps")
        more = "Stock Horovod's steps are all applied." if stock else "Every gradient was finite."
        return Tile("Skipped steps", "none", more, PLAIN if stock else GOOD)
    answer = f"{skipped:,.0f} of {steps:,.0f} ({percent(skipped / max(1.0, steps))})"
    first = figures.skips(run)
    more = f"The first: {not_finite(int(first[0][0]), first[0][1])}." if first else ""
    return Tile("Skipped steps", answer, more, LOOK)


def _replicas(run: Run) -> Tile:
    made, differed = run.number("replica_checks"), run.number("replica_mismatches")
    if differed:
        more = f"Of {made:,.0f} comparisons of weights; the ranks went on with those of the first."
        return Tile("Replicas", f"differed {differed:,.0f} times", more, LOOK)
    if not made:
        return Tile("Replicas", "not compared", _NOT_COMPARED, PLAIN)
    return Tile("Replicas", "all alike", f"Weights were compared {made:,.0f} times.", GOOD)


def _advice(run: Run) -> Tile:
    texts = [str(text) for text in entries(run.last, "advice", object)]
    if not texts:
        return Tile("Advice", "none", "All figures stayed in the range of sound runs.", GOOD)
    return Tile("Advice", f"{len(texts)} given", " ".join(f"{text}." for text in texts), LOOK)


_HEALTH = {
    "residual_ratio": ("residual norm / gradient norm", "gradients that are not sent yet"),
    "staleness_mean": ("staleness, mean", "steps since an element that is sent was sent before"),
    "staleness_99": ("staleness, 99%", "99% of them waited less"),
    "overlap": ("overlap of the ranks' selections", "share of a rank's elements that another rank sends too"),
}


def page(run: Run) -> str:
    """Return the page as HTML, which loads nothing and runs nothing."""
    command, method = run.description.get("command"), run.last.get("method", "")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("title", f"dgc_horovod: {command or method}"),
        tag("style", _STYLE.read_text("utf-8")),
    )
    tables = (_ranks, _bytes, _health, _skips, _buckets, _job, _settings)
    main = tag(
        "main",
        tag("h1", f"Compression {method}"),
        tag("p", tag("code", str(command or "a script that was started without dgcrun"))),
        tag("section", *map(_tile, tiles(run)), class_="tiles"),
        tag("section", *_plots(run), class_="plots"),
        tag("div", *(section for shown in tables for section in shown(run)), class_="tables"),
    )
    root = tag("html", head, tag("body", main), lang="en")
    return "<!doctype html>\n" + ElementTree.tostring(root, encoding="unicode", method="html") + "\n"


def tag(name: str, *content: str | Element, **attributes: str) -> Element:
    """An element of a page, with all text escaped: first a text, if any, then elements.

    ``class_`` stands for the attribute ``class``.
    """
    made = Element(name, {key.rstrip("_").replace("_", "-"): text for key, text in attributes.items()})
    for part in content:
        if isinstance(part, str):
            made.text = part
        else:
            made.append(part)
    return made


def _plots(run: Run) -> list[Element]:
    drawn = plots.of_run(run)
    if drawn is None:
        return [tag("p", _NO_PLOTS, class_="note")]
    return [
        tag("figure", tag("img", src=uri, alt=caption), tag("figcaption", caption)) for caption, uri in drawn.items()
    ]


def _section(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], note: str = "", marked: int | None = None
) -> list[Element]:
    """A table under its title, with a note; nothing without rows.

    It scrolls by itself where the screen is narrow; row `marked` stands out.
    """
    lines = [
        tag("tr", *(tag("td", cell) for cell in row), **({"class_": "marked"} if i == marked else {}))
        for i, row in enumerate(rows)
    ]
    heads = tag("tr", *(tag("th", text, scope="col") for text in head))
    table = tag("div", tag("table", tag("thead", heads), tag("tbody", *lines)), class_="scroll")
    notes = [tag("p", note, class_="note")] if note else []
    return [tag("section", tag("h2", title), table, *notes)] if rows else []


def _tile(tile: Tile) -> Element:
    word = "look" if tile.state == LOOK else ""
    heading = tag("h3", tile.question, tag("span", word, class_="word"))
    return tag("div", heading, tag("p", tile.answer, class_="answer"), tag("p", tile.more), class_=f"tile {tile.state}")


def _ranks(run: Run) -> list[Element]:
    slowest, rows = run.straggler, []
    for rank, times in run.timed:
        parts = (times.step, times.compute, times.compress, times.decode, times.wait)
        waits = plain(number(rank, "residual_ratio", math.nan))
        rows.append([f"{rank['rank']:.0f}", rank["host"], *map(milliseconds, parts), waits])
    head = ["rank", "host", "a step", "computing", "compressing", "decoding", "waiting", "residual / gradient"]
    note = (
        "Mean over all steps but the first. The slowest rank is the one that waits least: the others wait for it. "
        "Computing is the rest of a step, data and evaluation included."
    )
    if len(rows) < 2:
        note += " Only rank 0 is known: the others report if dgcrun has started them."
    return _section("Ranks", head, rows, note, slowest.place if slowest is not None and slowest.notable else None)


def _bytes(run: Run) -> list[Element]:
    steps, rows = max(1.0, run.number("steps")), []
    for name, counter in (("sent", "bytes_dense"), ("received", "bytes_dense_received")):
        ours, dense = run.number(f"bytes_{name}"), run.number(counter)
        less = figures.times_less(dense, ours), figures.times_less(dense / 2, ours)
        rows.append([name, size(ours), size(ours / steps), size(dense), less[0], size(dense / 2), less[1]])
    elements, stock = run.number("elements"), run.number("stock_steps")
    where = f"of the {steps - stock:,.0f} steps that were compressed" if stock else "over the run"
    density = percent(run.number("selected") / elements) if elements else ""
    note = f"Density {where}, warm-up included: {density}. " if elements else ""
    note += "Of one rank, counted as for ring algorithms; small tensors, headers and checks are in it."
    head = ["rank 0", "in all", "a step", "fp32 would be", "", "fp16 would be", ""]
    return _section("Bytes", head, rows if run.number("bytes_sent") else [], note)


def _health(run: Run) -> list[Element]:
    rows = [
        [name, plain(run.number(key, math.nan)), meaning] for key, (name, meaning) in _HEALTH.items() if key in run.last
    ]
    note = "Of rank 0, at the last step that was examined. docs/tuning.md has the ranges of sound runs, and advice."
    return _section("Is it sound?", ["", "last", "what it is"], rows, note)


def _skips(run: Run) -> list[Element]:
    rows = [[f"{step:.0f}", where] for step, where in figures.skips(run)]
    return _section("Skipped steps", ["step, from 0", "a gradient was not finite on"], rows)


def _buckets(run: Run) -> list[Element]:
    steps, rows = max(1.0, run.number("steps")), []
    for i, bucket in enumerate(entries(run.last, "buckets", dict)):
        seconds = [number(bucket, f"{part}_seconds") / steps for part in ("compress", "decode", "exchange")]
        rows.append([
            str(i), f"{number(bucket, 'elements'):,.0f}", percent(number(bucket, "density")),
            size(number(bucket, "bytes")), plain(number(bucket, "threshold")),
            plain(number(bucket, "residual_norm")), f"{number(bucket, 'age'):,.0f}", *map(milliseconds, seconds),
        ])  # fmt: skip
    head = ["bucket", "elements", "density", "bytes a step", "least sent", "residual norm", "oldest waits, steps",
            "compressing", "decoding", "under way"]  # fmt: skip
    return _section("Buckets", head, rows)


def _job(run: Run) -> list[Element]:
    told = run.description
    versions = {"dgc_horovod": run.last.get("version", ""), **mapping(told, "versions")}
    rows = [[str(name), str(version)] for name, version in versions.items()]
    rows += [[name, str(told[name])] for name in ("started", "hosts", "workers", "folder") if told.get(name)]
    return _section("What ran", ["", ""], rows)


def _settings(run: Run) -> list[Element]:
    rows = [[str(cell) for cell in row] for row in entries(run.description, "settings", list)]
    return _section("Settings", ["setting", "value", "where from"], rows)
