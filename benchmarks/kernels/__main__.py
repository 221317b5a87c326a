"""Times the kernels and measures the packets; prints tables, writes JSON and ``docs/performance.md``."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from benchmarks.kernels import compress, decode, growth, wire
from benchmarks.report import RESULTS, ROOT, save, write_into_page
from benchmarks.shapes import SHAPES

STUDIES = {"compress": compress, "growth": growth, "decode": decode, "wire": wire}
PAGE = ROOT / "docs" / "performance.md"


def _one_model(model: str) -> list[dict[str, Any]]:
    """The rows of `compress`, those of `model` measured anew."""
    kept = json.loads((RESULTS / "kernels-compress.json").read_text())["figures"]
    new = {model: compress.study(False, [model])}
    return [row for name in SHAPES for row in new.get(name, [r for r in kept if r["model"] == name])]


def main() -> None:
    """Run the studies that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="a small part, printed only: to see that it runs")
    parser.add_argument("--model", choices=SHAPES, help="of compress: this model alone; the others keep their figures")
    args = parser.parse_args()
    if unknown := set(args.studies) - set(STUDIES):
        parser.error(f"unknown study {', '.join(sorted(unknown))}; there are {', '.join(STUDIES)}")
    for name in args.studies or STUDIES:
        start = time.monotonic()
        rows = _one_model(args.model) if args.model and name == "compress" else STUDIES[name].study(args.quick)
        text = STUDIES[name].table(rows)
        print(f"\n{text}\n\n{name}: {time.monotonic() - start:.0f} s", flush=True)
        if args.quick:
            continue
        save(f"kernels-{name}", rows)
        write_into_page(PAGE, name, f"{text}\n\nMade by `python -m benchmarks.kernels {name}`.")
        if name == "growth":
            growth.plot(rows)


if __name__ == "__main__":
    main()
