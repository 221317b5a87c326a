"""An elastic training job in which one worker is killed: what horovodrun starts in tests/parallel/test_elastic.py.

``python -m tests.helpers.elastic_job FOLDER HOW`` with HOW one of "undisturbed", "killed", "killed, flushed".
Every rank writes FOLDER/rankN.json at the end; rank 0 prints an account of what was owed when the ranks changed.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from dgc_horovod.testing.torch import copied
from dgc_horovod.torch import Compression, DistributedOptimizer
from dgc_horovod.torch.elastic import TorchState
from tests.helpers.training import INPUTS, fingerprint, smooth_model, target
from tests.helpers.victim import is_the_victim

BATCHES, KILLED_AT, COMMIT_EVERY, TOGETHER_AGAIN_BY = 300, 87, 10, 200
FLUSH_EVERY = 50  # a flush is a burst: every ten steps it would be what decides the quality
FIELDS: dict[str, Any] = {"density": 0.02, "min_numel": 16, "clip_norm": 2.0, "check_every": 5}


def owed(optimizer: Any) -> np.ndarray:
    """What all ranks owe the model, ``(1/N) * sum of v``, tensor after tensor. A collective."""
    own = torch.from_numpy(_residual(optimizer))
    return hvd.allreduce(own, name="owed", op=hvd.Average).numpy()


def _residual(optimizer: Any) -> np.ndarray:
    return np.concatenate([arrays["v"].astype(np.float64) for arrays in copied(optimizer).tensors.values()])


def batch_of(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of a batch of 48, whatever the number of ranks."""
    draw = torch.Generator().manual_seed(number)
    x = torch.randn(48, INPUTS, generator=draw)[hvd.rank() :: hvd.size()]
    return x, target(x)


class Job:
    """One worker's part."""

    def __init__(self, folder: Path, how: str) -> None:
        self.folder, self.how = folder, how
        self.model = smooth_model()
        self.optimizer = self.wrapped()
        self.committed: np.ndarray | None = None
        self.own = np.zeros(0)
        self.accounts: list[dict[str, Any]] = []

    def wrapped(self) -> Any:
        """The optimizer."""
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        return DistributedOptimizer(sgd, self.model.named_parameters(), Compression.dgc(**FIELDS))

    def commit_every(self) -> int:
        """Batches between two commits."""
        return FLUSH_EVERY if "flushed" in self.how else COMMIT_EVERY

    def seen(self) -> dict[str, Any]:
        """What else an account holds. A collective."""
        return {}

    def run(self) -> None:
        """Train to the end."""
        state = TorchState(self.model, self.optimizer, flush_on_commit="flushed" in self.how, batch=0, sizes=[])
        hvd.elastic.run(self.train)(state)
        found = {
            "fingerprint": fingerprint(self.model), "loss": self._loss(), "sizes": state.sizes, "batch": state.batch,
            "steps": self.optimizer.compression_stats()["steps"], "accounts": self.accounts,
        }  # fmt: skip
        (self.folder / f"rank{hvd.rank()}.json").write_text(json.dumps(found))

    def train(self, state: Any) -> None:
        """What is run again whenever the ranks change."""
        self._settle(state)
        while state.batch < BATCHES:
            x, y = batch_of(state.batch)
            self.optimizer.zero_grad()
            torch.nn.functional.mse_loss(self.model(x), y).backward()
            self.before_step(state.batch)
            self.optimizer.step()
            state.batch += 1
            state.sizes = [*state.sizes, hvd.size()]
            if state.batch % self.commit_every() == 0:
                self._commit(state)
            if "killed" in self.how and state.batch > TOGETHER_AGAIN_BY and hvd.size() < 3:
                time.sleep(0.2)  # the third one needs time to come back

    def before_step(self, batch: int) -> None:
        """The gradients are on their way."""
        if batch == KILLED_AT:
            self.may_die()

    def may_die(self) -> None:
        """Be killed, if it is this worker's turn."""
        if "killed" in self.how and is_the_victim(self.folder, hvd.rank(), hvd.size()):
            os.kill(os.getpid(), signal.SIGKILL)

    def _commit(self, state: Any) -> None:
        if "flushed" in self.how:
            self.optimizer.flush()  # as the commit does, to look at what is left
        self.own, self.committed = _residual(self.optimizer) / hvd.size(), owed(self.optimizer)
        state.commit()

    def _settle(self, state: Any) -> None:
        """Account for what was owed at the last commit: by those that are still here, and by those that are not."""
        now = owed(self.optimizer)
        size = now.size
        own = self.own if self.own.size else np.zeros(size)
        survivors = hvd.allreduce(torch.from_numpy(own), name="survivors", op=hvd.Sum).numpy()
        before = self.committed if self.committed is not None else np.zeros(size)
        before = hvd.broadcast(torch.from_numpy(before), 0, name="before").numpy()
        account: dict[str, Any] = {
            "batch": state.batch, "ranks": hvd.size(), "owed before": _norm(before),
            "of survivors": _norm(survivors), "owed now": _norm(now), "difference": _norm(now - survivors),
            "lost": _norm(before - survivors), **self.seen(),
        }  # fmt: skip
        self.accounts.append(account)
        if hvd.rank() == 0:
            print("account:", json.dumps(account), flush=True)
        self.own, self.committed = _residual(self.optimizer) / hvd.size(), now

    def _loss(self) -> float:
        draw = torch.Generator().manual_seed(10**6)
        x = torch.randn(2000, INPUTS, generator=draw)
        with torch.no_grad():
            return torch.nn.functional.mse_loss(self.model(x), target(x)).item()


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x))


def main(job: type[Job]) -> None:
    """Be one worker."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    hvd.init()
    job(Path(sys.argv[1]), sys.argv[2]).run()


if __name__ == "__main__":
    main(Job)
