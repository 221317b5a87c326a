"""A whole step of each adapter on real ranks of this machine, over a model's shapes, with compression and without."""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.command import Benchmark, argument
from benchmarks.ranks import launch
from benchmarks.report import RESULTS, complete, markdown, read_results, where
from benchmarks.shapes import SHAPES
from benchmarks.timing import timed

FILE, TIMEOUT_SECONDS = RESULTS / "adapters.json", 300
FRAMEWORKS = ("torch", "tensorflow")
DENSITY, MOMENTUM, RATE = 0.001, 0.9, 1e-3
SETS, RUNS = 4, 15
Step = Callable[[], Any]
# name of a row -> momentum of SGD, and whether it compresses; without, a step of one worker
ROWS = {"step without momentum": (0.0, False), "step": (MOMENTUM, False), "step with dgc": (MOMENTUM, True)}
PLAIN, _, COMPRESSED = ROWS


def gradients(shapes: list[tuple[int, ...]], rank: int) -> list[list[np.ndarray]]:
    """A few sets of gradients, another one at each step; scales differ over coordinates."""
    rng = np.random.default_rng(rank)
    scales = [np.exp(rng.standard_normal(shape, dtype=np.float32)) * np.float32(1e-3) for shape in shapes]
    return [[scale * rng.standard_normal(scale.shape, dtype=np.float32) for scale in scales] for _ in range(SETS)]


def torch_rank(model: str) -> dict[str, float]:
    """The rows with PyTorch. A backward pass that does nothing but hand over new gradients is part of each."""
    import horovod.torch as hvd
    import torch

    from benchmarks import connections
    from dgc_horovod.torch import Compression, DistributedOptimizer

    connections.start()
    shapes = [shape for _, shape in SHAPES[model]()]
    sets = [[torch.from_numpy(g) for g in one] for one in gradients(shapes, hvd.rank())]

    def make(momentum: float, compresses: bool) -> Step:
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
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


def tensorflow_rank(model: str) -> dict[str, float]:
    """The rows with Keras 3, each a tf.function."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    import horovod.tensorflow as hvd
    import keras

    from dgc_horovod.tensorflow import Compression, DistributedOptimizer

    hvd.init()
    shapes = [shape for _, shape in SHAPES[model]()]
    sets = [[tf.constant(g) for g in one] for one in gradients(shapes, hvd.rank())]

    def make(momentum: float, compresses: bool) -> Step:
        variables = [keras.Variable(tf.zeros(shape)) for shape in shapes]
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


def cell(framework: str, options: argparse.Namespace) -> dict[str, Any]:
    """A launch of a framework: milliseconds of each row."""
    rank = f"benchmarks.adapters:{framework}_rank"
    found = launch(rank, options.model, options.ranks, None, TIMEOUT_SECONDS)[0]
    return {"model": options.model, "ranks": options.ranks, "framework": framework, "ms": found}


def measure(options: argparse.Namespace) -> None:
    """Launch the frameworks in turns, so that both meet the same noise."""
    turns = itertools.product(range(options.rounds), FRAMEWORKS)
    what = f"{options.model}, {options.ranks} ranks"
    complete(options.file, {f"{what}, launch {n}, {name}": partial(cell, name, options) for n, name in turns})


def table(kept: Mapping[str, Any]) -> str:
    """For each model and number of ranks a line a row, and what compression adds to a step of SGD without momentum."""
    places = dict.fromkeys((found["model"], found["ranks"]) for found in kept.values())
    return "\n\n".join(_table(where(kept.values(), model=model, ranks=ranks)) for model, ranks in places)


def _table(launches: Sequence[Mapping[str, Any]]) -> str:
    of_each = [[found["ms"] for found in where(launches, framework=name)] for name in FRAMEWORKS]
    medians = [{row: statistics.median(ms[row] for ms in found) for row in ROWS} for found in of_each]
    rows = [[row, *(f"{found[row]:.1f}" for found in medians)] for row in ROWS]
    added = [f"{found[COMPRESSED] - found[PLAIN]:.1f}" for found in medians]
    rows.append([f"overhead: {COMPRESSED} − {PLAIN}", *added])
    return (
        f"{markdown(['ms', 'PyTorch', 'TensorFlow, Keras 3'], rows)}\n\n{launches[0]['model']}, density {DENSITY:.1%}, "
        f"{launches[0]['ranks']} ranks of one thread on one machine over Gloo, milliseconds; medians of "
        f"{len(of_each[0])} launches. Made by `python -m benchmarks.adapters`."
    )


COMMAND = Benchmark(
    "adapters", __doc__ or "", measure, lambda options: table(read_results(options.file)), FILE,
    (
        argument("--model", choices=SHAPES, default="resnet50", help="whose shapes"),
        argument("--ranks", type=int, default=2, metavar="N", help="on this machine"),
        argument("--rounds", type=int, default=3, metavar="R", help="launches of each framework"),
    ),
)  # fmt: skip

if __name__ == "__main__":
    COMMAND.main()
