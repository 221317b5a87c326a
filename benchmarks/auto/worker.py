"""One rank of `benchmarks.auto`: auto until it has chosen, then every method in turn, some steps of each at a time."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from benchmarks.auto.models import MODELS, Model
from dgc_horovod.torch import Compression, DistributedOptimizer

NOTHING, DENSE, FP16, DGC, AUTO = METHODS = ("no exchange", "dense", "fp16", "dgc", "auto")
DENSITY = 0.01
_TURNS, _TURN_SECONDS, _MOST_STEPS = 8, 4.0, 60


class Trainer:
    """A model that one method trains.

    Args:
        method: one of `METHODS`.
        model: what is trained.
    """

    def __init__(self, method: str, model: Model) -> None:
        torch.manual_seed(0)
        self._model, self.module = model, model.make()
        self._generator = torch.Generator().manual_seed(hvd.rank())
        sgd = torch.optim.SGD(self.module.parameters(), lr=0.01, momentum=0.9)
        named = list(self.module.named_parameters())
        self.optimizer: Any = sgd
        if method in (DENSE, FP16):
            stock = hvd.Compression.fp16 if method == FP16 else hvd.Compression.none
            self.optimizer = hvd.DistributedOptimizer(sgd, named, compression=stock)
        elif method != NOTHING:
            ours = Compression.auto(density=DENSITY) if method == AUTO else Compression.dgc(density=DENSITY)
            self.optimizer = DistributedOptimizer(sgd, named, compression=ours)

    def step(self) -> float:
        """Seconds of a step."""
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        self._model.loss(self.module, self._generator).backward()
        self.optimizer.step()
        return time.perf_counter() - begin


def measure(model: Model) -> dict[str, Any]:
    """Auto's steps until it has chosen, what it found, and the milliseconds of every method's steps."""
    auto = Trainer(AUTO, model)
    trial = auto.optimizer._dgc_choice.trial
    choosing = []
    while not trial.ended:
        choosing.append(auto.step())
    trainers = {AUTO: auto, **{method: Trainer(method, model) for method in METHODS if method != AUTO}}
    longest = float(hvd.allreduce(torch.tensor(statistics.median(choosing)), name="longest"))
    steps = max(1, min(_MOST_STEPS, int(_TURN_SECONDS / longest)))
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    for turn in range(_TURNS + 1):  # the first is not counted: selection has not settled yet
        first = turn % len(METHODS)  # each comes after each of the others
        for method in (*METHODS[first:], *METHODS[:first]):
            hvd.allreduce(torch.zeros(1), name="begin")
            taken = [trainers[method].step() for _ in range(steps)]
            times[method] += taken if turn else []
    return {
        "mode": trial.mode,
        "found": {mode: round(1e3 * seconds, 2) for mode, seconds in trial.seconds.items()},
        "choosing_ms": [round(1e3 * seconds, 2) for seconds in choosing],
        "ms": {method: [round(1e3 * seconds, 2) for seconds in taken] for method, taken in times.items()},
    }


def main() -> None:
    """Measure the model of the command line, and write what this rank has found."""
    name, folder = sys.argv[1:]
    torch.set_num_threads(1)
    hvd.init()
    found = measure(MODELS[name])
    Path(folder, f"rank{hvd.rank()}.json").write_text(json.dumps(found))
    hvd.shutdown()


if __name__ == "__main__":
    main()
