"""One rank of `benchmarks.auto`, in PyTorch."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from benchmarks.auto.models import MODELS, Model
from benchmarks.auto.turns import AUTO, DENSE, DENSITY, NOTHING, measure
from dgc_horovod.planning.trial import Trial
from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer


class TorchTrainer:
    """A model that one method trains.

    Args:
        model: what is trained.
        method: one of `METHODS`.
    """

    def __init__(self, model: Model, method: str) -> None:
        torch.manual_seed(0)
        self._model, self.module = model, model.make()
        self._generator = torch.Generator().manual_seed(hvd.rank())
        sgd = torch.optim.SGD(self.module.parameters(), lr=0.01, momentum=0.9)
        named = list(self.module.named_parameters())
        self.optimizer: Any = sgd
        if method == DENSE:
            self.optimizer = hvd.DistributedOptimizer(sgd, named)
        elif method != NOTHING:
            ours = Compression.auto(density=DENSITY) if method == AUTO else Compression.dgc(density=DENSITY)
            self.optimizer = DistributedOptimizer(sgd, named, compression=ours)

    @property
    def trial(self) -> Trial:
        """That of auto."""
        found: Trial = session(self.optimizer).choice.trial
        return found

    def step(self) -> float:
        """Seconds of a step."""
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        self._model.loss(self.module, self._generator).backward()
        self.optimizer.step()
        return time.perf_counter() - begin


def main() -> None:
    """Measure the model of the command line, and write what this rank has found."""
    name, folder = sys.argv[1:]
    torch.set_num_threads(1)
    hvd.init()
    found = measure(
        lambda method: TorchTrainer(MODELS[name], method),
        lambda number: float(hvd.allreduce(torch.tensor(number), name="mean")),
    )
    Path(folder, f"rank{hvd.rank()}.json").write_text(json.dumps(found))
    hvd.shutdown()


if __name__ == "__main__":
    main()
