"""What each rank of `tests.helpers.torch_ranks` runs: ``python -m tests.helpers.torch_rank_main FOLDER [CASE...]``.

Without cases it serves, as `tests.helpers.rank_main` does.
"""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path

from tests.helpers.rank_main import run_cases, serve, write


def main() -> None:
    """Run the cases, where no Horovod is, and write this rank's JSON."""
    sys.modules["horovod"] = None  # type: ignore[assignment]  # as where it is not installed
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    folder, cases, rank = Path(sys.argv[1]), sys.argv[2:], os.environ["RANK"]
    if cases:
        write(folder / f"0.{rank}.json", run_cases(cases))
    else:
        serve(folder, rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
