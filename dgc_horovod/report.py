"""``python -m dgc_horovod.report metrics.jsonl -o report.html``: the page of the last run in a metrics file."""

import sys

from dgc_horovod import tools

if __name__ == "__main__":
    sys.exit(tools.load("report.command").main())
