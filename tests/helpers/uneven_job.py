"""A training script as users of Horovod write it, with one rank that is slow and one gradient that is not finite."""

from __future__ import annotations

import argparse
import time

import horovod.torch as hvd
import torch
from torch.nn import functional

SLOW_RANK, NAN_RANK = 2, 1


def main() -> None:
    """Train a small model to imitate a random one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds that the slow rank pauses at each step")
    parser.add_argument("--nan-at", type=int, default=20, help="step, from 0, at which a gradient is not finite")
    given = parser.parse_args()
    hvd.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    teacher = torch.nn.Linear(64, 10)
    layers = [torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    draw = torch.Generator().manual_seed(hvd.rank())
    for step in range(given.steps):
        if hvd.rank() == SLOW_RANK:
            time.sleep(given.pause)
        inputs = torch.randn(32, 64, generator=draw)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), teacher(inputs).argmax(1))
        if hvd.rank() == NAN_RANK and step == given.nan_at:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
