"""A job that torchrun starts again: ``ddp_elastic_job.py FOLDER HOW``; in the first attempt rank 1 fails as `HOW` says.

"dies" ends the process, "raises" raises an error, "never" does neither. Each rank writes the hash of its weights.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.torch.ddp import Compression, load_checkpoint, register, save_checkpoint
from tests.helpers.regression import batches, fingerprint, smooth_model

STEPS, FAILS_AT = 8, 5


def main() -> None:
    """Train to the end, from the last checkpoint if there is one."""
    folder, how = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model = DistributedDataParallel(smooth_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    register(model, optimizer, Compression.dgc(0.02, min_numel=64))
    begun = (folder / "checkpoint" / "manifest.json").exists()
    first = load_checkpoint(folder / "checkpoint", model, optimizer)["step"] if begun else 0
    for step, (x, y) in enumerate(batches(STEPS, rank)):
        if step < first:
            continue
        if rank == 1 and attempt == 0 and step == FAILS_AT and how != "never":
            if how == "dies":
                os._exit(5)
            raise ValueError("rank 1 cannot go on")
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if step % 2:
            save_checkpoint(folder / "checkpoint", model, optimizer, step=step + 1)
    found = {"weights": fingerprint(model), "attempt": attempt, "first": first}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
