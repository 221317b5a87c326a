"""A job that torchrun starts again: ``ddp_elastic_job.py FOLDER HOW``; in the first attempt rank 1 fails as `HOW` says.

"dies" ends the process, "raises" raises an error, "never" does neither. Each rank writes the hash of its weights.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from tests.helpers.adapters import Adapter, Compression

STEPS, FAILS_AT = 8, 5


def main() -> None:
    """Train to the end, from the last checkpoint if there is one."""
    folder, how = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    run = Adapter("DDP").start(Compression.dgc(0.02, min_numel=64), momentum=0.9)
    begun = (folder / "checkpoint" / "manifest.json").exists()
    first = run.steps = run.load(folder / "checkpoint")["step"] if begun else 0
    while run.steps < STEPS:
        if rank == 1 and attempt == 0 and run.steps == FAILS_AT and how != "never":
            if how == "dies":
                os._exit(5)
            raise ValueError("rank 1 cannot go on")
        run.train()
        if run.steps % 2 == 0:
            run.save(folder / "checkpoint", step=run.steps)
    (folder / f"{rank}.json").write_text(json.dumps({"weights": run.print, "attempt": attempt, "first": first}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
