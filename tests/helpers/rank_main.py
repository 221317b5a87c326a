"""What each rank of `tests.helpers.ranks.run_ranks` runs: ``python -m tests.helpers.rank_main FOLDER CASE...``"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import traceback
from pathlib import Path


def main() -> int:
    """Run the cases and write this rank's JSON; a case that raises ends the run with its traceback."""
    folder, cases = Path(sys.argv[1]), sys.argv[2:]
    faulthandler.dump_traceback_later(float(os.environ.get("CASE_TIMEOUT", "200")), exit=True)
    if not all(case.startswith("keras_") for case in cases):
        import torch

        torch.set_num_threads(1)
    results = {}
    for case in cases:
        module, function = case.split(".")
        try:
            results[case] = getattr(importlib.import_module(f"tests.parallel.cases.{module}"), function)()
        except Exception:
            print(traceback.format_exc(), flush=True)
            return 1
    rank = os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
    partial = folder / f"{rank}.partial"
    partial.write_text(json.dumps(results))
    partial.rename(folder / f"{rank}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
