"""A whole step of each adapter on real ranks of this machine, over a model's shapes, with compression and without."""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.command import Benchmark
from benchmarks.ranks import launch
from benchmarks.report import RESULTS, complete, markdown, read_results, where
from benchmarks.shapes import Gradients, resnet50
from benchmarks.timing import timed

FILE, SECONDS = RESULTS / "adapters.json", 300  # that a launch may take
MODEL, RANKS, ROUNDS = "resnet50", 2, 3  # rounds: launches of each framework
SHAPES = [shape for _, shape in resnet50()]
FRAMEWORKS = ("torch", "tensorflow")
DENSITY, MOMENTUM, RATE = 0.001, 0.9, 1e-3
SETS, RUNS = 4, 15  # sets of gradients, another one at each step; steps that are timed
Step = Callable[[], Any]
# name of a row -> momentum of SGD, and whether it compresses; without, a step of one worker
ROWS = {"step without momentum": (0.0, False), "step": (MOMENTUM, False), "step with dgc": (MOMENTUM, True)}
PLAIN, _, COMPRESSED = ROWS


def torch_rank(_: None) -> dict[str, float]:
    """The rows with PyTorch. A backward pass that does nothing but hand over new gradients is part of each."""
    import horovod.torch as hvd
    import torch

    from benchmarks import connections
    from dgc_horovod.torch import Compression, DistributedOptimizer

    connections.start()
    gradients = Gradients(SHAPES)
    sets = [gradients.of(hvd.rank(), step) for step in range(SETS)]

    def make(momentum: float, compresses: bool) -> Step:
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        optimizer: Any = torch.optim.SGD(parameters, lr=RATE, momentum=momentum)
        if compresses:
            named = [(str(i), p) for i, p in enumerate(parameters)]
            optimizer = DistributedOptimizer(optimizer, named, compression=Compression.dgc(DENSITY))
        given = itertools.cycle(sets)

        def step() -> None:
            optimizer.zero_grad()
            torch.autograd.backward(parameters, [g * 1.0 for g in next(given)])
            optimizer.step()

        return step

    return _medians(make)


def tensorflow_rank(_: None) -> dict[str, float]:
    """The rows with Keras 3, each a tf.function."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    import horovod.tensorflow as hvd
    import keras

    from dgc_horovod.tensorflow import Compression, DistributedOptimizer

    hvd.init()
    gradients = Gradients(SHAPES)
    sets = [[tf.constant(g.numpy()) for g in gradients.of(hvd.rank(), step)] for step in range(SETS)]

    def make(momentum: float, compresses: bool) -> Step:
        variables = [keras.Variable(tf.zeros(shape)) for shape in SHAPES]
        optimizer: Any = keras.optimizers.SGD(RATE, momentum=momentum)
        if compresses:
            optimizer = DistributedOptimizer(optimizer, compression=Compression.dgc(DENSITY))
        given = itertools.cycle(sets)

        @tf.function(autograph=False)
        def apply(*given: tf.Tensor) -> tf.Tensor:
            optimizer.apply([g * 1.0 for g in given], variables)
            return tf.identity(optimizer.iterations.value)

        return lambda: apply(*next(given)).numpy()

    return _medians(make)


def _medians(make: Callable[[float, bool], Step]) -> dict[str, float]:
    return dict(zip(ROWS, timed(*(make(*row) for row in ROWS.values()), runs=RUNS), strict=True))


def cell(framework: str) -> dict[str, Any]:
    """A launch of a framework: milliseconds of each row."""
    return {
        "framework": framework,
        "ms": launch(f"benchmarks.adapters:{framework}_rank", None, RANKS, None, SECONDS)[0],
    }


def measure(options: argparse.Namespace) -> None:
    """Launch the frameworks in turns, so that both meet the same noise."""
    turns = itertools.product(range(ROUNDS), FRAMEWORKS)
    complete(options.file, {f"{MODEL}, {RANKS} ranks, launch {n}, {name}": partial(cell, name) for n, name in turns})


def table(kept: Mapping[str, Any]) -> str:
    """A line a row, and what compression adds to a step of SGD without momentum."""
    of_each = [[found["ms"] for found in where(kept.values(), framework=name)] for name in FRAMEWORKS]
    medians = [{row: statistics.median(ms[row] for ms in found) for row in ROWS} for found in of_each]
    rows = [[row, *(f"{found[row]:.1f}" for found in medians)] for row in ROWS]
    added = [f"{found[COMPRESSED] - found[PLAIN]:.1f}" for found in medians]
    rows.append([f"overhead: {COMPRESSED} − {PLAIN}", *added])
    return (
        f"{markdown(['ms', 'PyTorch', 'TensorFlow, Keras 3'], rows)}\n\n{MODEL}, density {DENSITY:.1%}, {RANKS} ranks "
        f"of one thread on one machine over Gloo, milliseconds; medians of {len(of_each[0])} launches. Made by "
        "`python -m benchmarks.adapters`."
    )


COMMAND = Benchmark("adapters", __doc__ or "", measure, lambda options: table(read_results(options.file)), FILE)

if __name__ == "__main__":
    COMMAND.main()
