"""A script of a user of Horovod who clips gradients: it knows nothing of compression.

    horovodrun -np 2 python benchmarks/clipping_script.py lstm after --seed 0

Clips after ``synchronize()``, as Horovod's documentation says, or before ``step()``, as most scripts for one worker do.
"""

import sys

import horovod.torch as hvd
import torch
from torch.nn.utils import clip_grad_norm_

from benchmarks.quality.tasks import TASKS

STEPS = 500
# SGD at the learning rate at which the LSTM needs clipping; AdamW, whose steps do not grow with the gradient
CHOICES = {
    "lstm": (0.1, lambda parameters: torch.optim.SGD(parameters, lr=10.0, momentum=0.9)),
    "transformer": (0.25, lambda parameters: torch.optim.AdamW(parameters, lr=3e-3)),
}


def main() -> None:
    """Train on all ranks and report from rank 0."""
    name, idiom, _, seed = sys.argv[1:]
    hvd.init()
    torch.set_num_threads(1)
    task = TASKS[name](int(seed))
    clip, make = CHOICES[name]
    optimizer = hvd.DistributedOptimizer(make(task.model.parameters()), task.model.named_parameters())
    hvd.broadcast_parameters(task.model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    draw = torch.Generator().manual_seed(100 * int(seed) + hvd.rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        task.loss(8, draw).backward()
        if idiom == "before":
            clip_grad_norm_(task.model.parameters(), clip)
            optimizer.step()
        else:
            optimizer.synchronize()
            clip_grad_norm_(task.model.parameters(), clip)
            with optimizer.skip_synchronize():
                optimizer.step()
        schedule.step()
    if hvd.rank() == 0:
        print(f"loss {task.quality().loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
