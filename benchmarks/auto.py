"""``--compression auto`` beside what a user would choose by hand: emulated hosts, four links, real computing.

Three models in PyTorch, two in Keras. Needs root on Linux.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.command import Benchmark
from benchmarks.exchange.tables import NAMES
from benchmarks.netlab import lab
from benchmarks.quality.tasks import GPT_BLOCKS, GPT_WIDTH, Bytes, TransformerModel
from benchmarks.ranks import launch
from benchmarks.report import RESULTS, complete, markdown, read_results, slowest
from benchmarks.timing import wall_clock
from dgc_horovod.session.auto import Choice

FILE, TIMEOUT_SECONDS = RESULTS / "auto.json.xz", 1800
HOSTS, RATES = 2, ("100mbit", "1gbit", "10gbit", "none")
NOTHING, DENSE, DGC, AUTO = METHODS = ("no exchange", "dense", "dgc", "auto")
DENSITY, CLASSES = 0.01, 100
TURNS, TURN_SECONDS, MOST_STEPS = 8, 4.0, 60
RUN = 2000  # steps of the run that choosing is a part of; shorter ones stay dense
BY_HAND = (DENSE, DGC)
Cell = Mapping[str, Any]


class _Bottleneck(nn.Module):
    """Three convolutions beside a shortcut (He et al., arXiv 1512.03385)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.main = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.main(x) + self.shortcut(x))


def resnet() -> nn.Module:
    """The blocks of ResNet-50, 23.7 M parameters, for images of 32 x 32 pixels."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    inputs = 64
    for i, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            layers.append(_Bottleneck(inputs, 64 << i, 2 if block == 0 else 1))
            inputs = 4 * (64 << i)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def perceptron() -> nn.Module:
    """Three layers, 0.4 M parameters."""
    layers = (nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 200), nn.ReLU(), nn.Linear(200, CLASSES))
    return nn.Sequential(nn.Flatten(), *layers)


def _images(*shape: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    return lambda draw: (torch.randn(shape, generator=draw), torch.randint(CLASSES, shape[:1], generator=draw))


def _text(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randint(Bytes.classes, (2, Bytes.window + 1), generator=draw)
    return x[:, :-1], x[:, 1:].reshape(-1)


# name -> function that makes a model, and one that draws a batch
TORCH: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], tuple[Tensor, Tensor]]]] = {
    "ResNet-50, 23.7 M": (resnet, _images(8, 3, 32, 32)),
    "MLP, 0.4 M": (perceptron, _images(64, 1, 28, 28)),
    "Transformer, 5.1 M": (lambda: TransformerModel(Bytes.classes, Bytes.window, GPT_WIDTH, GPT_BLOCKS), _text),
}
# name -> shape of a batch
KERAS = {"Keras MLP, 0.4 M": (64, 784), "Keras ResNet-50, 23.8 M": (8, 32, 32, 3)}


# of a model that one method trains, functions that do a step, and that give the choice of auto
Trainer = tuple[Callable[[], Any], Callable[[], Choice]]


def torch_rank(name: str) -> dict[str, Any]:
    """A model of `TORCH` on this rank."""
    import horovod.torch as hvd

    from benchmarks import connections
    from dgc_horovod.testing.torch import session
    from dgc_horovod.torch import Compression, DistributedOptimizer

    def make(method: str) -> Trainer:
        torch.manual_seed(0)
        (create, draw), generator = TORCH[name], torch.Generator().manual_seed(hvd.rank())
        model = create()
        sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        named, optimizer = list(model.named_parameters()), sgd
        if method == DENSE:
            optimizer = hvd.DistributedOptimizer(sgd, named)
        elif method != NOTHING:
            ours = Compression.auto(density=DENSITY) if method == AUTO else Compression.dgc(density=DENSITY)
            optimizer = DistributedOptimizer(sgd, named, compression=ours)

        def step() -> None:
            optimizer.zero_grad()
            x, y = draw(generator)
            scores = model(x)
            functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), y).backward()
            optimizer.step()

        return step, lambda: session(optimizer).strategy.choice

    connections.start()
    return in_turns(make, lambda number: float(hvd.allreduce(torch.tensor(number), name="mean")))


def keras_rank(name: str) -> dict[str, Any]:
    """A model of `KERAS` on this rank: each step is one call of a tf.function.

    "dense" is our optimizer without compression, as Horovod's own exchanges nothing under Keras 3.
    """
    import horovod.tensorflow as hvd
    import keras
    import numpy as np
    import tensorflow as tf

    from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer
    from dgc_horovod.testing.tensorflow import session

    def create() -> Any:
        if "ResNet" in name:
            return keras.applications.ResNet50(weights=None, input_shape=KERAS[name][1:], classes=CLASSES)
        layers = [keras.layers.Dense(width, activation="relu") for width in (400, 200)]
        return keras.Sequential([keras.layers.Input(KERAS[name][1:]), *layers, keras.layers.Dense(CLASSES)])

    def make(method: str) -> Trainer:
        keras.utils.set_random_seed(0)
        model, optimizer = create(), keras.optimizers.SGD(0.01, momentum=0.9)
        if method != NOTHING:
            ours = {AUTO: Compression.auto(density=DENSITY), DGC: Compression.dgc(density=DENSITY)}
            optimizer = DistributedOptimizer(optimizer, compression=ours.get(method, Compression.none))
        optimizer.build(model.trainable_variables)
        generator = np.random.default_rng(hvd.rank())
        x = tf.constant(generator.standard_normal(KERAS[name]), tf.float32)
        y = tf.constant(generator.integers(CLASSES, size=KERAS[name][0]))
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits="ResNet" not in name)

        @tf.function(autograph=False)
        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        step()  # traced
        return lambda: step().numpy(), lambda: session(optimizer).choice

    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    return in_turns(make, lambda number: float(hvd.allreduce(tf.constant(number), name="mean", op=hvd.Average)))


def in_turns(make: Callable[[str], Trainer], mean: Callable[[float], float]) -> dict[str, Any]:
    """Auto until it has chosen, then every method in turn, some steps of each at a time.

    Args:
        make: function that makes the trainer of a method.
        mean: function that gives the mean of a number over the ranks, when all of them have come.
    """
    auto, choice_of = make(AUTO)
    choosing = [wall_clock(auto)]
    while not choice_of().ended:
        choosing.append(wall_clock(auto))
    trainers = {AUTO: auto, **{method: make(method)[0] for method in METHODS if method != AUTO}}
    longest = mean(statistics.median(choosing))
    steps = max(1, min(MOST_STEPS, int(1e3 * TURN_SECONDS / longest)))
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    for turn in range(TURNS + 1):  # the first is not counted: selection has not settled yet
        first = turn % len(METHODS)  # each comes after each of the others
        for method in (*METHODS[first:], *METHODS[:first]):
            mean(0.0)
            taken = [wall_clock(trainers[method]) for _ in range(steps)]
            times[method] += taken if turn else []
    return {
        "mode": choice_of().mode,
        "found": {mode: round(1e3 * seconds, 2) for mode, seconds in choice_of().seconds.items()},
        "choosing_ms": [round(ms, 2) for ms in choosing],
        "ms": {method: [round(ms, 2) for ms in taken] for method, taken in times.items()},
    }


def cell(model: str, rate: str) -> dict[str, Any]:
    """What the ranks of a model have found over a link."""
    with lab(HOSTS, rate) as hosts:
        rank = f"benchmarks.auto:{'keras' if model in KERAS else 'torch'}_rank"
        return {"model": model, "rate": rate, "ranks": launch(rank, model, HOSTS, hosts, TIMEOUT_SECONDS)}


def measure(options: argparse.Namespace) -> None:
    """Every model over every link that is not kept yet."""
    places = itertools.product((*TORCH, *KERAS), RATES)
    complete(options.file, {f"{model}, {rate}": partial(cell, model, rate) for model, rate in places})


def _slower(cell: Cell, method: str) -> list[float]:
    return slowest(rank["ms"][method] for rank in cell["ranks"])


def medians(cell: Cell) -> dict[str, float]:
    """Milliseconds of a step by method: the median over all steps, of the slower rank of each."""
    return {method: statistics.median(_slower(cell, method)) for method in METHODS}


def _in_order(kept: Mapping[str, Cell]) -> list[Cell]:
    cells = itertools.product(("MLP, 0.4 M", "Transformer, 5.1 M", "ResNet-50, 23.7 M", *KERAS), RATES)
    return [kept[key] for key in map(", ".join, cells) if key in kept]


def table(kept: Mapping[str, Cell]) -> str:
    """A line a cell: pairs are steps of auto and of the best by hand in the same turn."""
    lines = []
    for cell in _in_order(kept):
        found = medians(cell)
        best = min(BY_HAND, key=found.__getitem__)
        pairs = [one / other for one, other in zip(_slower(cell, AUTO), _slower(cell, best), strict=True)]
        deciles = statistics.quantiles(pairs, n=10)
        # the steps of its choice as they were, the others at their median
        choosing = slowest(rank["choosing_ms"] for rank in cell["ranks"])
        whole = (sum(choosing) + (RUN - len(choosing)) * found[AUTO]) / (RUN * found[DENSE])
        lines.append([
            f"{cell['model']}, {NAMES[cell['rate']]}", *(f"{ms:,.1f}" for ms in found.values()),
            str(cell["ranks"][0]["mode"]), f"{statistics.median(pairs):.2f}× {best}",
            f"{deciles[0]:.2f}–{deciles[-1]:.2f}", f"{whole:.2f}×",
        ])  # fmt: skip
    head = ["auto chooses", "auto / best by hand", "80% of pairs", f"{RUN} steps of auto / dense"]
    return markdown(["ms a step", *METHODS, *head], lines)


COMMAND = Benchmark("auto", __doc__ or "", measure, lambda options: table(read_results(options.file)), FILE)

if __name__ == "__main__":
    COMMAND.main()
