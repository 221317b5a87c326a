"""One rank of `benchmarks.adapters`: steps over a model's shapes with one framework; rank 0 prints its medians.

horovodrun -np 2 python -m benchmarks.adapters.worker tensorflow resnet50
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.shapes import SHAPES

DENSITY, MOMENTUM, RATE = 0.001, 0.9, 1e-3
SETS, WARM_UP, RUNS = 4, 4, 15
Step = Callable[[int], Any]
Shape = tuple[int, ...]
# name of a row -> momentum of SGD, and fields of the compression; None: a step of one worker
ROWS: dict[str, tuple[float, dict[str, Any] | None]] = {
    "step without momentum": (0.0, None),
    "step": (MOMENTUM, None),
    "step with dgc": (MOMENTUM, {}),
}


def gradients(shapes: list[Shape], rank: int) -> list[list[np.ndarray]]:
    """A few sets of gradients, another one at each step; scales differ over coordinates."""
    rng = np.random.default_rng(rank)
    scales = [np.exp(rng.standard_normal(shape, dtype=np.float32)) * np.float32(1e-3) for shape in shapes]
    return [[scale * rng.standard_normal(scale.shape, dtype=np.float32) for scale in scales] for _ in range(SETS)]


def torch_steps(shapes: list[Shape]) -> tuple[Any, dict[str, Step]]:
    """The rows with PyTorch. A backward pass that does nothing but hand over new gradients is part of each."""
    import horovod.torch as hvd
    import torch

    from dgc_horovod.torch import Compression, DistributedOptimizer

    hvd.init()
    torch.set_num_threads(1)
    sets = [[torch.from_numpy(g) for g in one] for one in gradients(shapes, hvd.rank())]

    def make(momentum: float, fields: dict[str, Any] | None) -> Step:
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        optimizer: Any = torch.optim.SGD(parameters, lr=RATE, momentum=momentum)
        if fields is not None:
            named = [(str(i), p) for i, p in enumerate(parameters)]
            optimizer = DistributedOptimizer(optimizer, named, compression=Compression.dgc(DENSITY, **fields))

        def step(number: int) -> None:
            optimizer.zero_grad()
            torch.autograd.backward(parameters, [g * 1.0 for g in sets[number % SETS]])
            optimizer.step()

        return step

    return hvd, {name: make(*row) for name, row in ROWS.items()}


def tensorflow_steps(shapes: list[Shape]) -> tuple[Any, dict[str, Step]]:
    """The rows with Keras 3, each a tf.function."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    import horovod.tensorflow as hvd
    import keras

    from dgc_horovod.tensorflow import Compression, DistributedOptimizer

    hvd.init()
    sets = [[tf.constant(g) for g in one] for one in gradients(shapes, hvd.rank())]

    def make(momentum: float, fields: dict[str, Any] | None) -> Step:
        variables = [keras.Variable(tf.zeros(shape)) for shape in shapes]
        optimizer: Any = keras.optimizers.SGD(RATE, momentum=momentum)
        if fields is not None:
            optimizer = DistributedOptimizer(optimizer, compression=Compression.dgc(DENSITY, **fields))

        @tf.function(autograph=False)
        def apply(*given: tf.Tensor) -> tf.Tensor:
            optimizer.apply([g * 1.0 for g in given], variables)
            return tf.identity(optimizer.iterations.value)

        return lambda number: apply(*sets[number % SETS]).numpy()

    return hvd, {name: make(*row) for name, row in ROWS.items()}


def main() -> None:
    """Time the rows in turns."""
    framework, model = sys.argv[1:]
    make = {"torch": torch_steps, "tensorflow": tensorflow_steps}[framework]
    hvd, steps = make([shape for _, shape in SHAPES[model]()])
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(WARM_UP + RUNS):
        for name, step in steps.items():
            start = time.perf_counter()
            step(number)
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    if hvd.rank() == 0:
        print("RESULT", json.dumps({name: 1e3 * statistics.median(s) for name, s in seconds.items()}), flush=True)


if __name__ == "__main__":
    main()
