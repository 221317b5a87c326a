"""Trains with other libraries on two ranks of this machine, with and without compression, a row after the other.

Per row: the weights of density 1 beside those without compression, whether the replicas are equal, bytes, the loss on
held-out data, and whether training resumes bit for bit. Tiny models; nothing is downloaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from benchmarks.command import Benchmark, argument
from benchmarks.integrations import cost, running
from benchmarks.integrations.rows import ROWS
from benchmarks.ranks import LaunchError
from benchmarks.report import RESULTS, ROOT, keep, markdown, read_results, versions, write_into_page

FILE, PAGE, COST = RESULTS / "integrations.json", ROOT / "docs" / "integrations.md", "cost"


def measure(options: argparse.Namespace) -> None:
    """Run the rows that are asked for, and keep each; the page shows them, where they are the file's that it has."""
    from tqdm import tqdm

    if options.cost:
        keep(options.file, COST, cost.measure())
    groups = running.together(options.rows or ([] if options.cost else ROWS))
    wrong = 0
    for names in (bar := tqdm(groups, unit="launch", disable=not groups)):
        bar.set_description(", ".join(names))
        for name, found in running.run(names).items():
            keep(options.file, name, {**found, "versions": versions(*running.PACKAGES)})
            for fault in running.faults(ROWS[name], found):
                wrong += 1
                bar.write(f"{name}: {fault}")
    if options.file == FILE:
        for marker, text in texts().items():
            write_into_page(PAGE, marker, text)
    if wrong:
        raise LaunchError(f"{wrong} things are not as they should be; see above")


def texts() -> dict[str, str]:
    """The tables of the page, by marker."""
    kept = read_results(FILE)
    used = {f"{name} {version}" for row in ROWS if row in kept for name, version in kept[row]["versions"].items()}
    made = f"Made by `scripts/integrations`, with {', '.join(sorted(used, key=str.lower))}."
    found = {"rows": f"{table(kept)}\n\n{made}"}
    if COST in kept:
        found["cost"] = f"{cost.table(kept[COST])} Made by `scripts/integrations --cost`."
    return found


def table(kept: Mapping[str, Any]) -> str:
    """A line for each row and way."""
    lines = []
    for name, row in ROWS.items():
        if (found := kept.get(name)) is None:
            continue
        if "missing" in found or "error" in found:
            why = f"not installed: {', '.join(found['missing'])}" if "missing" in found else "failed"
            lines.append([row.title, why, *[""] * 5])
        for way, edit in (("by_variable", row.edit), ("lines", row.lines)):
            if way in found:
                lines.append([row.title if way == "by_variable" else "", edit, *_cells(found, way)])
    head = ["", "edit", "exact", "replicas", "fewer bytes", "loss, dense", "loss", "resumed"]
    return markdown(head, lines)


def _cells(found: Mapping[str, Any], way: str) -> list[str]:
    here = found[way]
    resumed = {None: "–", True: "bit for bit", False: "DIFFERS"}[here.get("resumed")]
    exact = f"{here['distance']:.0e}" if here["distance"] else "bit for bit"
    same = "equal" if here["same"] else "DIFFER"
    return [exact, same, f"{here['saved']:.1f}×", f"{found['dense']:.3f}", f"{here['loss']:.3f}", resumed]


def _row(name: str) -> str:
    if name not in ROWS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(ROWS)}")
    return name


COMMAND = Benchmark(
    "integrations", __doc__ or "", measure, lambda options: table(read_results(options.file)), FILE,
    (
        argument("rows", nargs="*", type=_row, metavar="row", help=f"of {', '.join(ROWS)}; all if none is named"),
        argument("--cost", action="store_true", help="measure what it costs where it is not switched on"),
    ),
)  # fmt: skip

if __name__ == "__main__":
    COMMAND.main()
