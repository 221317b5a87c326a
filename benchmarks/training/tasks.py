"""The two things that are trained: images of digits, and the next token of Python's own sources; a rank that does it.

Both are small enough for one core and yet mostly matrices, so that on 1 Gbps Ethernet the exchange is most of a step.
The settings were chosen on seed 100, before anything was measured, and are the same for all methods, but that a
compressed run's schedule is longer (`Settings.stretch`): its steps are many times shorter.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import math
import re
import sysconfig
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import connections
from benchmarks.quality.tasks import RecurrentModel
from dgc_horovod.torch import Compression, DistributedOptimizer, WarmupSchedule

TEST_IMAGES, TRAIN_COPIES, TEST_COPIES = 500, 16, 4
NOISE = 0.2  # of pixels that range from 0 to 1
TEXT_BYTES, VOCABULARY, WINDOW = 2_000_000, 8000, 16
VALIDATION_WINDOWS = 160  # a multiple of 2 and of 4 hosts
STOCK = ("dense", "fp16")  # Horovod's own
COMPRESSED = ("dgc", "gaussian")
NO_OP = "no-op"  # the same step without any exchange
NO_OP_STEPS = 60  # time only: they need not learn
MOMENTUM = 0.9
EXACT_LOSSES = 20  # so many are kept to the last bit, to be compared with those of another run
HOSTS, FAST, SLOW = (2, 4), "1gbit", "100mbit"
FIRST_STEPS = 20  # of the stock methods on the slow link, where the whole run would take minutes
FIRST = f", first {FIRST_STEPS} steps"  # of the name of such a run


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a task is trained.

    Args:
        batch: samples per rank and step.
        steps: length of the learning-rate schedule.
        stretch: a compressed run's schedule is so many times longer.
        lr: highest learning rate.
        lr_warmup: steps in which it rises linearly; then it falls along a cosine.
        clip_norm: L2 norm at which the averaged gradient is clipped, or None.
        density: of the compressed methods, after their warm-up.
        density_warmup: steps in which the density falls to that from 0.25.
        evaluate_every: steps between evaluations.
        margin: what the target is worse than the dense run's last quality.
    """

    batch: int
    steps: int
    stretch: float
    lr: float
    lr_warmup: int
    clip_norm: float | None
    density: float
    density_warmup: int
    evaluate_every: int
    margin: float


class Task(ABC):
    """A model, its data and how good it is; one rank's share of both parts of the data."""

    settings: ClassVar[Settings]
    unit: ClassVar[str]  # of quality
    higher_is_better: ClassVar[bool]

    def __init__(self, rank: int, size: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.rank, self.size = rank, size
        self.model = self.make_model()
        self.draw = torch.Generator().manual_seed(1000 * seed + rank)

    @abstractmethod
    def make_model(self) -> nn.Module:
        """The model, with random weights."""

    @abstractmethod
    def loss(self) -> Tensor:
        """Mean loss of the next batch, with its graph."""

    @abstractmethod
    def quality(self) -> float:
        """Of the model on this rank's share of the data that is not trained on; the mean over ranks counts."""


class Images(Task):
    """A VGG-like net on scikit-learn's digits, each in several rotated, scaled, moved and noisy copies."""

    settings = Settings(
        batch=16, steps=240, stretch=1.5, lr=0.03, lr_warmup=20, clip_norm=None,
        density=0.005, density_warmup=8, evaluate_every=12, margin=0.5,
    )  # fmt: skip
    unit, higher_is_better = "accuracy, %", True

    def __init__(self, rank: int, size: int, seed: int) -> None:
        super().__init__(rank, size, seed)
        digits = load_digits()
        fixed = torch.Generator().manual_seed(2018)  # the data are the same for every seed
        order = torch.randperm(len(digits.target), generator=fixed)
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[order] / 16
        labels = torch.tensor(digits.target)[order]
        self._images = disturbed(images[TEST_IMAGES:], TRAIN_COPIES, fixed)
        self._labels = labels[TEST_IMAGES:].repeat(TRAIN_COPIES)
        test = disturbed(images[:TEST_IMAGES], TEST_COPIES, fixed)
        self._test_images, self._test_labels = test[rank::size], labels[:TEST_IMAGES].repeat(TEST_COPIES)[rank::size]

    def make_model(self) -> nn.Module:
        """Two convolutions and three linear layers."""
        model = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1200), nn.ReLU(), nn.Linear(1200, 10)),
        )
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.kaiming_uniform_(
                    parameter, nonlinearity="relu"
                )  # as VGG's; torch's own learns nothing for long
        return model

    def loss(self) -> Tensor:
        """Mean cross entropy."""
        chosen = torch.randint(0, len(self._labels), (self.settings.batch,), generator=self.draw)
        return functional.cross_entropy(self.model(self._images[chosen]), self._labels[chosen])

    def quality(self) -> float:
        """Percentage of the test images that the model gets right."""
        with torch.no_grad():
            return float(100 * (self.model(self._test_images).argmax(1) == self._test_labels).double().mean())


def disturbed(images: Tensor, copies: int, draw: torch.Generator) -> Tensor:
    """`copies` of every image, each turned, scaled and moved at random, with noise: it is not learnt at once."""
    count = len(images) * copies
    angle, scale = (torch.empty(count).uniform_(*ends, generator=draw) for ends in ((-0.35, 0.35), (0.85, 1.25)))
    moved = torch.empty(count, 2).uniform_(-0.2, 0.2, generator=draw)
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=1).view(-1, 2, 2)
    affine = torch.cat([turn * scale[:, None, None], moved[:, :, None]], dim=2)
    grid = functional.affine_grid(affine, [count, 1, 8, 8], align_corners=False)
    clean = functional.grid_sample(images.repeat(copies, 1, 1, 1), grid, align_corners=False)
    return clean + NOISE * torch.randn(clean.shape, generator=draw) - images.mean()


class Tokens(Task):
    """An LSTM language model of the tokens of Python's standard library, with a vocabulary of thousands as in PTB."""

    settings = Settings(
        batch=2, steps=240, stretch=2.0, lr=5.0, lr_warmup=20, clip_norm=0.25,
        density=0.005, density_warmup=8, evaluate_every=12, margin=0.03,
    )  # fmt: skip
    unit, higher_is_better = "validation loss, nats", False
    width = 192

    def __init__(self, rank: int, size: int, seed: int) -> None:
        super().__init__(rank, size, seed)
        numbers = token_numbers()
        split = len(numbers) * 95 // 100
        self._train = numbers[:split]
        held_out = numbers[split:]
        places = torch.linspace(0, len(held_out) - WINDOW - 1, VALIDATION_WINDOWS).long()[:, None]
        self._validation = held_out[places + torch.arange(WINDOW + 1)][rank::size]

    def make_model(self) -> nn.Module:
        """Embedding, one LSTM layer, linear output."""
        return RecurrentModel(VOCABULARY, self.width, self.width)

    def loss(self) -> Tensor:
        """Mean cross entropy of every next token in windows from random places of the text."""
        starts = torch.randint(0, len(self._train) - WINDOW, (self.settings.batch, 1), generator=self.draw)
        return self._loss(self._train[starts + torch.arange(WINDOW + 1)])

    def quality(self) -> float:
        """Mean cross entropy over the validation windows, in nats a token."""
        with torch.no_grad():
            return float(self._loss(self._validation))

    def _loss(self, windows: Tensor) -> Tensor:
        return functional.cross_entropy(self.model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def token_numbers() -> Tensor:
    """Python's own sources as numbers of tokens, the most frequent first; 0 is every rare one."""
    source = ""
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source += file.read_text(encoding="utf-8", errors="replace")
        if len(source) >= TEXT_BYTES:
            break
    tokens = re.findall(r"\w+|\n *|[^\w\s]", source[:TEXT_BYTES])
    frequent = collections.Counter(tokens).most_common(VOCABULARY - 1)
    number = {token: place for place, (token, _) in enumerate(frequent, start=1)}
    return torch.tensor([number.get(token, 0) for token in tokens])


def digest(parameters: Iterable[Tensor]) -> str:
    """Hash of the bits of all weights."""
    found = hashlib.sha256()
    for parameter in parameters:
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()[:16]


class Smoke(Tokens):
    """A dozen steps of a narrow model: shows that all of it works, and nothing else."""

    settings = dataclasses.replace(Tokens.settings, steps=12, lr_warmup=2, density_warmup=2, evaluate_every=4)
    width = 64


TASKS: dict[str, type[Task]] = {"image": Images, "lstm": Tokens, "smoke": Smoke}
STUDIED = ("image", "lstm")


def whole_steps(task: type[Task], method: str) -> int:
    """Length of a whole run, and of its learning-rate schedule."""
    if method == NO_OP:
        return min(NO_OP_STEPS, task.settings.steps)
    return round(task.settings.steps * (task.settings.stretch if method in COMPRESSED else 1))


def learning_rate(warmup: int, steps: int) -> Callable[[int], float]:
    """Step -> factor of the highest learning rate: a linear rise, then a cosine to 0."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    return factor


def make_optimizer(task: Task, method: str) -> Any:
    """SGD with momentum, wrapped for the method's exchange; the model's weights are rank 0's."""
    settings = task.settings
    optimizer: Any = torch.optim.SGD(task.model.parameters(), lr=settings.lr, momentum=MOMENTUM)
    hvd.broadcast_parameters(task.model.state_dict(), root_rank=0)
    if method == NO_OP:
        return optimizer
    compression = Compression.fp16 if method == "fp16" else Compression.none
    if method in COMPRESSED:
        compression = Compression.dgc(
            density=settings.density,
            rule="gaussian" if method == "gaussian" else "exact",
            clip_norm=settings.clip_norm,
            warmup=WarmupSchedule(steps=settings.density_warmup),
        )
    return DistributedOptimizer(optimizer, named_parameters=task.model.named_parameters(), compression=compression)


def train_step(task: Task, method: str, optimizer: Any) -> float:
    """One step as a user's script has it; its loss."""
    clip_norm = task.settings.clip_norm
    optimizer.zero_grad()
    loss = task.loss()
    loss.backward()
    if clip_norm is None or method in COMPRESSED:  # these clip on the way
        optimizer.step()
    elif method == NO_OP:
        nn.utils.clip_grad_norm_(task.model.parameters(), clip_norm)
        optimizer.step()
    else:
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(task.model.parameters(), clip_norm)
        with optimizer.skip_synchronize():
            optimizer.step()
    return loss.item()


def train(task: Task, method: str, steps: int) -> dict[str, Any]:
    """The first steps of a run.

    Args:
        task: what to train.
        method: what is exchanged.
        steps: how many steps; the learning-rate schedule has the method's own length all the same.

    Returns:
        ``milliseconds`` of each step and ``losses`` of the first ones on this rank, ``curve`` of [steps, seconds
        without evaluations, quality, loss], ``digest`` of the last weights, whether the ``replicas`` have the same,
        ``batch`` per rank and bytes ``received``, beside those of fp32, on this rank.
    """
    settings, optimizer = task.settings, make_optimizer(task, method)
    factor = learning_rate(settings.lr_warmup, whole_steps(type(task), method))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    times, losses, curve = [], [], []
    for step in range(1, steps + 1):
        start = time.perf_counter()
        losses.append(train_step(task, method, optimizer))
        schedule.step()
        times.append(time.perf_counter() - start)
        if method != NO_OP and (step % settings.evaluate_every == 0 or step == steps):
            quality = hvd.allreduce(torch.tensor(task.quality(), dtype=torch.float64), name="quality").item()
            curve.append([step, round(sum(times), 4), round(quality, 4), round(losses[-1], 4)])
    weights = digest(task.model.parameters())
    return {
        "milliseconds": [round(1e3 * seconds, 2) for seconds in times],
        "losses": losses[:EXACT_LOSSES],
        "curve": curve,
        "digest": weights,
        "replicas": len(set(hvd.allgather_object(weights))) == 1,
        "batch": settings.batch,
        **traffic(task, method, optimizer, steps),
    }


def traffic(task: Task, method: str, optimizer: Any, steps: int) -> dict[str, int]:
    """Bytes that this rank has received from collectives, and those of fp32 gradients."""
    if method in COMPRESSED:
        stats = optimizer.compression_stats()
        return {"received": int(stats["bytes_received"]), "received_fp32": int(stats["bytes_dense_received"])}
    # Stock Horovod keeps no count: every gradient is handed over once a step; a ring passes 2(N-1)/N of it on.
    fp32 = 2 * (task.size - 1) / task.size * 4 * steps * sum(p.numel() for p in task.model.parameters())
    return {"received": int(fp32 * {"dense": 1.0, "fp16": 0.5, NO_OP: 0.0}[method]), "received_fp32": int(fp32)}


def rank(order: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Every run of a launch, by name; each has connections of its own."""
    torch.set_flush_denormal(True)  # a run that diverges would take several times as long
    connections.start()
    found = {}
    for name, steps in order["methods"].items():
        task = TASKS[order["task"]](hvd.rank(), hvd.size(), order["seed"])  # each starts from the same weights and data
        found[name] = train(task, name.removesuffix(FIRST), steps)
        connections.renew()
    hvd.shutdown()
    return found
