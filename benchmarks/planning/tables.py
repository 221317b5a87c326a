"""What the simulation says of the closed form, as a table."""

from __future__ import annotations

import statistics

from benchmarks.report import RESULTS, markdown, read_results

FILE = RESULTS / "planning.json"


def simulation() -> str:
    """Worst deviation of the closed form by method and nodes, over all N, links and densities."""
    rows = read_results(FILE)["figures"]
    sizes = sorted({row["node_size"] for row in rows})
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        line = [method]
        for size in sizes:
            mine = [row for row in rows if (row["method"], row["node_size"]) == (method, size)]
            worst = max(mine, key=lambda row: abs(row["worst"]), default=None)
            line.append(f"{100 * worst['worst']:+.1f}% (N = {worst['workers']:,})" if worst else "")
        lines.append(line)
    points, middle = sum(row["points"] for row in rows), statistics.median(row["median"] for row in rows)
    head = ["farthest off", *(f"nodes of {size}" if size > 1 else "one worker a card" for size in sizes)]
    return f"{markdown(head, lines)}\n\n{points:,} points, median {middle:.1%}."
