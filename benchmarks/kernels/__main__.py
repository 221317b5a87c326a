"""Times the kernels and measures the packets; prints tables, writes JSON and ``docs/benchmarks-kernels.md``."""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.kernels import adam, compress, decode, growth, stages, wire
from benchmarks.report import RESULTS, ROOT, environment, read_results, save, write_into_page
from benchmarks.shapes import SHAPES

STUDIES = {"compress": compress, "stages": stages, "adam": adam, "growth": growth, "decode": decode, "wire": wire}
PAGE = ROOT / "docs" / "benchmarks-kernels.md"


def _measured(name: str, quick: bool, model: str | None) -> tuple[list[dict[str, Any]], str]:
    """The rows of a study, and why they are printed only, "" if they are kept.

    With `model`, those of the other models are the ones that were kept, if this machine has measured them.
    """
    if not (model and name == "compress"):
        return STUDIES[name].study(quick), "a small part" if quick else ""
    rows = compress.study(quick, [model])
    kept = read_results(RESULTS / "kernels-compress.json")
    if quick or kept["environment"] != environment():
        return rows, "a small part" if quick else "what was kept is of another machine or of other versions"
    found = {model: rows}
    return [row for each in SHAPES for row in found.get(each, [r for r in kept["figures"] if r["model"] == each])], ""


def main() -> None:
    """Run the studies that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="a small part, printed only: to see that it runs")
    parser.add_argument(
        "--model", choices=SHAPES, help="of compress: this model alone; the others keep theirs, if of this machine"
    )
    args = parser.parse_args()
    if unknown := set(args.studies) - set(STUDIES):
        parser.error(f"unknown study {', '.join(sorted(unknown))}; there are {', '.join(STUDIES)}")
    for name in args.studies or STUDIES:
        start = time.monotonic()
        rows, why = _measured(name, args.quick, args.model)
        text = STUDIES[name].table(rows)
        print(f"\n{text}\n\n{name}: {time.monotonic() - start:.0f} s{why and f'; printed only: {why}'}", flush=True)
        if why:
            continue
        save(f"kernels-{name}", rows)
        write_into_page(PAGE, name, f"{text}\n\nMade by `python -m benchmarks.kernels {name}`.")
        if name == "growth":
            growth.plot(rows)


if __name__ == "__main__":
    main()
