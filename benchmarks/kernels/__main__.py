"""Times the kernels and measures the packets; prints tables, writes JSON and ``docs/performance.md``."""

from __future__ import annotations

import argparse
import time

from benchmarks.kernels import compress, decode, growth, wire
from benchmarks.report import ROOT, save, write_into_page

STUDIES = {"compress": compress, "growth": growth, "decode": decode, "wire": wire}
PAGE = ROOT / "docs" / "performance.md"


def main() -> None:
    """Run the studies that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="a small part, printed only: to see that it runs")
    args = parser.parse_args()
    if unknown := set(args.studies) - set(STUDIES):
        parser.error(f"unknown study {', '.join(sorted(unknown))}; there are {', '.join(STUDIES)}")
    for name in args.studies or STUDIES:
        start = time.monotonic()
        rows = STUDIES[name].study(args.quick)
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
