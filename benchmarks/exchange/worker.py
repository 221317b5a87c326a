"""One rank of `benchmarks.exchange`: every method in turn on one model's shapes; writes its figures to a file.

horovodrun -np 2 python -m benchmarks.exchange.worker '{"model": "resnet50", ...}'
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from benchmarks.exchange.check import checked_step
from benchmarks.exchange.gradients import Gradients
from benchmarks.exchange.methods import Method
from benchmarks.exchange.process_groups import MASTER
from benchmarks.exchange.registry import METHODS
from benchmarks.shapes import SHAPES


@dataclass(frozen=True)
class Order:
    """What the ranks of one launch are to do.

    Args:
        model: whose shapes.
        methods: names of methods, in order.
        density: of those that compress.
        seconds: that the timed steps of a method should take.
        warm_up: steps before them, where a step is short; one where it is long.
        fewest: steps that are timed, where they take longer than `seconds`.
        most: steps that are timed.
        folder: with the gradients; each rank's figures go there too.
        master: address of rank 0, for torch.distributed.
        device: of the network, by which ranks reach each other.
    """

    model: str
    methods: tuple[str, ...]
    density: float
    seconds: float
    warm_up: int
    fewest: int
    most: int
    folder: str
    master: str
    device: str

    @classmethod
    def read(cls, text: str) -> Order:
        """What was given as JSON."""
        words = json.loads(text)
        return cls(**{**words, "methods": tuple(words["methods"])})


class Clock:
    """Steps of one method, timed: each begins on all ranks at once."""

    def __init__(self, method: Method, gradients: Gradients, rank: int) -> None:
        self.method, self.gradients, self.rank, self.number = method, gradients, rank, 0
        self.forget()

    def forget(self) -> None:
        """What has been timed so far does not count."""
        self.milliseconds: list[float] = []
        self.backward: list[float] = []
        self.processor: list[float] = []
        self.phases: dict[str, list[float]] = {name: [] for name in self.method.phases()}

    def run(self, steps: int) -> None:
        """`steps` more."""
        for _ in range(steps):
            self.method.clear()
            loss = self.method.forward(self.gradients.of(self.rank, self.number))
            before = self.method.phases()
            self.method.barrier()
            busy = time.process_time()
            start = time.perf_counter()
            loss.backward()  # type: ignore[no-untyped-call]
            handed_over = time.perf_counter()
            self.method.finish()
            self.milliseconds.append(1e3 * (time.perf_counter() - start))
            self.backward.append(1e3 * (handed_over - start))
            self.processor.append(1e3 * (time.process_time() - busy))
            for name, seconds in self.method.phases().items():
                self.phases[name].append(1e3 * (seconds - before[name]))
            self.number += 1

    def longest(self) -> float:
        """Seconds of the last step, on the slowest rank."""
        return max(self.method.gathered(self.milliseconds[-1])) / 1e3


def measure(name: str, order: Order, gradients: Gradients) -> dict[str, Any]:
    """The figures of one method on this rank."""
    rank, workers = hvd.rank(), hvd.size()
    method = METHODS[name](SHAPES[order.model](), order.density)
    clock = Clock(method, gradients, rank)
    clock.run(1)  # says how long a step takes, although what is set up once is in it
    clock.run(max(1, method.untimed, min(order.warm_up, int(order.seconds / clock.longest()))))
    checked = checked_step(method, gradients, rank, workers, clock.number)
    steps = max(order.fewest, min(order.most, int(order.seconds / clock.longest())))
    clock.forget()
    sent = bytes_out(order.device)
    clock.run(steps)
    sent = bytes_out(order.device) - sent
    method.close()
    return {
        "ms": clock.milliseconds,
        "backward_ms": clock.backward,
        "processor_ms": clock.processor,
        "phases_ms": clock.phases,
        "bytes": sent / steps,
        "checked": checked,
    }


def bytes_out(device: str) -> int:
    """Bytes that have left this host; on the loopback, that have left the machine's ranks together."""
    table = Path("/proc/self/net/dev").read_text()
    found = {line[1]: int(line[2].split()[8]) for line in re.finditer(r"^ *(\w+): *(.*)$", table, re.MULTILINE)}
    return found[device]


def main() -> None:
    """All methods of the order, one after another."""
    order = Order.read(sys.argv[1])
    hvd.init()
    torch.set_num_threads(1)
    os.environ[MASTER] = order.master
    gradients = Gradients(Path(order.folder), [shape for _, shape in SHAPES[order.model]()])
    figures = {}
    for name in order.methods:
        figures[name] = measure(name, order, gradients)
        gc.collect()  # the next one needs the memory
    Path(order.folder, f"rank{hvd.rank()}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
