"""What each rank of `tests.helpers.torch_ranks` runs: ``python -m tests.helpers.torch_rank_main FOLDER CASE...``."""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path

from tests.helpers.rank_main import run_cases, write


def main() -> None:
    """Run the cases, where no Horovod is, and write this rank's JSON."""
    sys.modules["horovod"] = None  # type: ignore[assignment]  # as where it is not installed
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    write(Path(sys.argv[1]) / f"{os.environ['RANK']}.json", run_cases(sys.argv[2:]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
