"""One rank of `benchmarks.adapters`: steps of a model's shapes with one framework; rank 0 prints its medians.

horovodrun -np 2 python -m benchmarks.adapters.worker torch
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


def gradients(numels: list[int], rank: int) -> list[list[np.ndarray]]:
    """A few sets of gradients, another one at each step; scales differ over coordinates."""
    rng = np.random.default_rng(rank)
    scale = [np.exp(rng.standard_normal(n, dtype=np.float32)) * np.float32(1e-3) for n in numels]
    return [[s * rng.standard_normal(s.size, dtype=np.float32) for s in scale] for _ in range(SETS)]


def torch_steps(shapes: list[tuple[int, ...]]) -> tuple[Any, dict[str, Step]]:
    """Step functions of PyTorch: SGD alone, and with compression."""
    import horovod.torch as hvd
    import torch

    from dgc_horovod.torch import Compression, DistributedOptimizer

    hvd.init()
    torch.set_num_threads(1)
    sets = [
        [torch.from_numpy(g).view(shape) for g, shape in zip(flat, shapes, strict=True)]
        for flat in gradients([int(np.prod(s)) for s in shapes], hvd.rank())
    ]

    def steps(compression: Any) -> Step:
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        optimizer: Any = torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)
        if compression is not None:
            named = [(str(i), p) for i, p in enumerate(parameters)]
            optimizer = DistributedOptimizer(optimizer, named, compression=compression)

        def step(number: int) -> None:
            optimizer.zero_grad()
            torch.autograd.backward(parameters, [g * 1.0 for g in sets[number % SETS]])
            optimizer.step()

        return step

    return hvd, {"alone": steps(None), "dgc": steps(Compression.dgc(DENSITY))}


def tensorflow_steps(shapes: list[tuple[int, ...]]) -> tuple[Any, dict[str, Step]]:
    """Step functions of TensorFlow and Keras 3."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    import horovod.tensorflow as hvd
    import keras

    from dgc_horovod.tensorflow import Compression, DistributedOptimizer

    hvd.init()
    sets = [
        [tf.constant(g.reshape(shape)) for g, shape in zip(flat, shapes, strict=True)]
        for flat in gradients([int(np.prod(s)) for s in shapes], hvd.rank())
    ]

    def steps(compression: Any) -> Step:
        variables = [keras.Variable(tf.zeros(shape)) for shape in shapes]
        optimizer = keras.optimizers.SGD(RATE, momentum=MOMENTUM)
        if compression is not None:
            optimizer = DistributedOptimizer(optimizer, compression=compression)

        @tf.function(autograph=False)
        def apply(*given: tf.Tensor) -> tf.Tensor:
            optimizer.apply([g * 1.0 for g in given], variables)
            return optimizer.iterations.value + 0

        return lambda number: apply(*sets[number % SETS]).numpy()

    return hvd, {"alone": steps(None), "dgc": steps(Compression.dgc(DENSITY))}


def main() -> None:
    """Time the steps in turns."""
    framework, model = sys.argv[1], sys.argv[2]
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
