"""Rank 1 of two stops after 10 steps and hears nothing more: ``python -m tests.helpers.frozen_job KIND FOLDER``."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any

KIND, FOLDER = sys.argv[1], Path(sys.argv[2])
LAST = 10


def began(rank: int) -> None:
    """Tell who this is, and leave files at the end, as a script's own exit handler and a library in C would."""
    (FOLDER / f"pid.{rank}").write_text(str(os.getpid()))
    atexit.register(lambda: (FOLDER / f"handled.{rank}").touch())
    c = ctypes.CDLL(None)
    c.fopen.restype = ctypes.c_void_p
    file = c.fopen(os.fsencode(FOLDER / f"written.{rank}"), b"w")
    c.fputs(b"in the buffer of a library in C", ctypes.c_void_p(file))


def stepped(rank: int, steps: int) -> None:
    """A step is done."""
    if steps == LAST and rank == 1:
        (FOLDER / "frozen").touch()
        os.kill(os.getpid(), signal.SIGSTOP)


def with_torch(rank: int, model: Any, optimizer: Any) -> None:
    """Train; clean up when nobody answers."""
    import torch

    from dgc_horovod.errors import CollectiveTimeout

    try:
        for steps in range(1, 1000):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            stepped(rank, steps)
    except CollectiveTimeout:
        torch.save(model.state_dict(), FOLDER / f"saved.{rank}")
        raise


def main_torch() -> None:
    """A script of Horovod's that knows nothing of us; it shuts Horovod down itself."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    began(hvd.rank())
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    try:
        with_torch(hvd.rank(), model, hvd.DistributedOptimizer(sgd, model.named_parameters()))
    finally:
        hvd.shutdown()


def main_ddp() -> None:
    """A script of DDP."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from dgc_horovod.torch.ddp import Compression, register

    dist.init_process_group("gloo")
    began(dist.get_rank())
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    register(model, optimizer, Compression.dgc(0.05))
    with_torch(dist.get_rank(), model, optimizer)


def main_keras() -> None:
    """A script of Horovod's for Keras."""
    import horovod.tensorflow.keras as hvd
    import keras
    import numpy as np

    hvd.init()
    began(hvd.rank())
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")

    class Stepped(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            stepped(hvd.rank(), batch + 1)

    data = np.random.randn(8000, 64).astype(np.float32)
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(data, data, batch_size=8, verbose=0, callbacks=[start, Stepped()])


if __name__ == "__main__":
    {"torch": main_torch, "ddp": main_ddp, "keras": main_keras}[KIND]()
