"""``python -m dgc_horovod.report metrics.jsonl -o report.html``: the page of the last run in a metrics file."""

from __future__ import annotations

import argparse
import sys

from dgc_horovod.errors import ConfigError
from dgc_horovod.report import output
from dgc_horovod.report.page import page
from dgc_horovod.report.records import number, read


def main() -> int:
    """Write the page; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dgc_horovod.report", description=__doc__)
    parser.add_argument("metrics", help="the file of --dgc-metrics-file, of JSON lines")
    parser.add_argument("-o", "--output", default="report.html", metavar="PATH", help="default: %(default)s")
    given = parser.parse_args()
    try:
        output.check(given.output, given.metrics)
        runs = read(given.metrics)
        output.write(given.output, page(runs[-1]))
    except (ConfigError, OSError) as error:
        print(f"dgc_horovod.report: {error}", file=sys.stderr)
        return 2
    earlier = f"; {len(runs) - 1} earlier ones in the file are not in it" if len(runs) > 1 else ""
    print(f"{given.output}: {number(runs[-1].last, 'steps'):.0f} steps{earlier}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
