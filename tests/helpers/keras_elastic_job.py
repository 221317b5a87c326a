"""The Keras twin of `elastic_job`: ``python -m tests.helpers.keras_elastic_job FOLDER HOW``."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np

from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, elastic
from dgc_horovod.testing.tensorflow import session
from tests.helpers.keras_training import INPUTS, fingerprint, momentum_sgd, smooth_model, target
from tests.helpers.victim import is_the_victim

BATCHES, KILLED_AT, COMMIT_EVERY, TOGETHER_AGAIN_BY = 200, 47, 10, 120
FIELDS: dict[str, Any] = {"density": 0.02, "min_numel": 16, "clip_norm": 2.0, "check_every": 5}


def batch_of(number: int, samples: int = 48) -> tuple[np.ndarray, np.ndarray]:
    """Samples that all ranks together have at a step."""
    x = np.random.default_rng(number).standard_normal((samples, INPUTS)).astype(np.float32)
    return x, target(x)


class Job:
    """One worker's part."""

    def __init__(self, folder: Path, how: str) -> None:
        self.folder, self.how = folder, how
        self.model = smooth_model()
        self.model.compile(self.wrapped(), "mse")
        self.size = sum(int(np.prod(weight.shape)) for weight in self.model.weights if self.is_compressed(weight))
        self.own, self.committed = np.zeros(self.size), np.zeros(self.size)

    def wrapped(self) -> Any:
        """The optimizer."""
        return DistributedOptimizer(momentum_sgd(), compression=Compression.dgc(**FIELDS))

    def is_compressed(self, weight: Any) -> bool:
        """Whether something of it may wait."""
        return weight.shape.rank == 2

    def commit_every(self) -> int:
        """Batches between two commits."""
        return COMMIT_EVERY

    def seen(self) -> dict[str, Any]:
        """What else an account holds. A collective."""
        return {}

    def end(self) -> None:
        """The last batch is done."""

    def run(self) -> None:
        """Train to the end."""
        state = elastic.KerasState(self.model, flush_on_commit="flushed" in self.how, batch=0, sizes=[])
        elastic.run(self.train)(state)
        x, y = batch_of(10**6, 2000)
        found = {
            "fingerprint": fingerprint(self.model), "sizes": state.sizes, "batch": state.batch,
            "loss": float(((self.model(x).numpy() - y) ** 2).mean()),
        }  # fmt: skip
        (self.folder / f"rank{hvd.rank()}.json").write_text(json.dumps(found))

    def train(self, state: Any) -> None:
        """What is run again whenever the ranks change."""
        self._settle(state)
        while state.batch < BATCHES:
            if state.batch == KILLED_AT and "killed" in self.how and is_the_victim(self.folder, hvd.rank(), hvd.size()):
                os.kill(os.getpid(), signal.SIGKILL)
            x, y = (part[hvd.rank() :: hvd.size()] for part in batch_of(state.batch))
            self.model.train_on_batch(x, y)
            state.batch += 1
            state.sizes = [*state.sizes, hvd.size()]
            if state.batch % self.commit_every() == 0:
                if "flushed" in self.how:
                    self.model.optimizer.flush()  # as the commit does, to look at what is left
                self.own, self.committed = self._residual() / hvd.size(), self._owed()
                state.commit()
            if "killed" in self.how and state.batch > TOGETHER_AGAIN_BY and hvd.size() < 3:
                time.sleep(0.3)  # the third one needs time to come back
        self.end()

    def _settle(self, state: Any) -> None:
        """Account for what was owed at the last commit, as `elastic_job` does."""
        now = self._owed()
        survivors = hvd.allreduce(self.own, name="survivors", op=hvd.Sum).numpy()
        before = hvd.broadcast(self.committed, 0, name="before").numpy()
        norm = np.linalg.norm
        account = {
            "batch": state.batch, "ranks": hvd.size(), "owed before": norm(before), "of survivors": norm(survivors),
            "owed now": norm(now), "difference": norm(now - survivors), "lost": norm(before - survivors),
        }  # fmt: skip
        account = {**{name: float(value) for name, value in account.items()}, **self.seen()}
        if hvd.rank() == 0:
            print("account:", json.dumps(account), flush=True)
        self.own, self.committed = self._residual() / hvd.size(), now

    def _residual(self) -> np.ndarray:
        state = session(self.model.optimizer).residuals()
        tensors = state.tensors if state is not None else {}
        parts = [arrays["v"].astype(np.float64) for _, arrays in sorted(tensors.items())]
        return np.concatenate(parts) if parts else np.zeros(self.size)

    def _owed(self) -> np.ndarray:
        owed: np.ndarray = hvd.allreduce(self._residual(), name="owed", op=hvd.Average).numpy()
        return owed


def main(kind: type[Job] = Job) -> None:
    """Be one worker."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    hvd.init()
    kind(Path(sys.argv[1]), sys.argv[2]).run()


if __name__ == "__main__":
    main()
