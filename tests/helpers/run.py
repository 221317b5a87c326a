"""A model in training on a rank, by whatever adapter: what tests do with it and ask of it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Container
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dgc_horovod import WarmupSchedule
from tests.helpers.adapters import Adapter, Compression

# Compression fields with which nothing is rounded: what the framework's own exchange is compared with.
UNROUNDED = {"values": "fp32", "dense_values": "fp32"}
BATCH, INPUTS = 16, 32
Array = TypeVar("Array")
EVERYTHING = {"factor_masking": False, "min_numel": 1, **UNROUNDED}  # at density 1 nothing is lost
# Learning rates, where a test names none.
RATES = {"SGD": 0.05, "AdamW": 0.003, "RMSprop": 0.001, "Adam": 0.003, "Adagrad": 0.01, "Dividing": 0.05}
ALONE = "alone"  # in the place of a compression: the optimizer as it is, which no other rank meets

# Of runs that stop in the middle and go on from what was saved.
STEPS, HALF = 24, 12
SMALL: dict[str, Any] = {"density": 0.02, "min_numel": 16, "bucket_bytes": 12_000}
COMPRESSIONS = {
    "dgc, warm-up": Compression.dgc(**SMALL, warmup=WarmupSchedule(steps=15)),
    "clipped": Compression.dgc(**SMALL, clip_norm=0.5),
    "gaussian, momentum correction": Compression.dgc(**SMALL, rule="gaussian"),
    "sampled, 4bit": Compression.dgc(**SMALL, rule="sampled", values="4bit"),
    "topk": Compression.topk(**SMALL),
}


def target(x: Array) -> Array:
    """What is to be learnt of `x`, an array of NumPy or a tensor of torch."""
    return x[:, :4].sum(1, keepdims=True) + 0.5 * x[:, 4:5] ** 2  # type: ignore[index,no-any-return]


def everything(**fields: Any) -> Any:
    """The compression that loses nothing."""
    return Compression.dgc(1.0, **{**EVERYTHING, **fields})


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """``|a - b| / |a|``."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


class Run(ABC):
    """A smooth model of 11,393 parameters, its optimizer, and this rank's data.

    Args:
        adapter: of this rank.
    """

    model: Any
    optimizer: Any

    def __init__(self, adapter: Adapter) -> None:
        self.adapter, self.steps = adapter, 0
        self.rates: Callable[[int], float] | None = None  # learning rate by step
        self.spoilt: Container[int] = ()  # steps at which this rank's data are not finite

    def train(self, steps: int = 1) -> list[float]:
        """So many more steps; returns the losses."""
        return [self.step() for _ in range(steps)]

    def step(self) -> float:
        """One more step; returns the loss."""
        if self.rates is not None:
            self.rate = self.rates(self.steps)
        return self.on(*self.batch())

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """This rank's data of the next step."""
        draw = np.random.default_rng([self.adapter.rank, self.steps])
        x = draw.standard_normal((BATCH, INPUTS)).astype(np.float32)
        y = target(x)
        if self.steps in self.spoilt:
            x = x * np.float32(np.nan)
        self.steps += 1
        return x, y

    @abstractmethod
    def on(self, x: np.ndarray, y: np.ndarray) -> float:
        """One step on this batch; returns the loss."""

    @abstractmethod
    def loss(self, x: np.ndarray, y: np.ndarray) -> float:
        """On this batch, without a step."""

    @abstractmethod
    def gradients(self, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
        """This rank's own, on this batch."""

    @abstractmethod
    def apply(self, gradients: list[np.ndarray]) -> None:
        """One step with these as this rank's gradients."""

    @property
    @abstractmethod
    def rate(self) -> float:
        """The learning rate."""

    @rate.setter
    @abstractmethod
    def rate(self, rate: float) -> None: ...

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Of the tensors in records, in the order of `arrays`."""

    @property
    def told(self) -> list[str]:
        """Of the tensors in messages."""
        return self.names

    @property
    @abstractmethod
    def arrays(self) -> list[np.ndarray]:
        """Copies of the weights, by tensor."""

    @abstractmethod
    def assign(self, arrays: list[np.ndarray]) -> None:
        """Set the weights."""

    @property
    def weights(self) -> np.ndarray:
        """All weights as one vector."""
        return np.concatenate([array.ravel() for array in self.arrays])

    @weights.setter
    def weights(self, vector: np.ndarray) -> None:
        arrays = self.arrays
        parts = np.split(vector, np.cumsum([array.size for array in arrays])[:-1])
        self.assign([part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)])

    @property
    def print(self) -> str:
        """Hash of the exact bits of all weights."""
        return hashlib.sha256(self.weights.tobytes()).hexdigest()

    @property
    def apart(self) -> float:
        """How far the ranks' weights are apart, at most."""
        return self.adapter.apart(self.weights)

    def spoil(self, element: float = float("nan")) -> None:
        """Set the first weight."""
        self.weights = np.concatenate([[element], self.weights[1:]]).astype(np.float32)

    def move(self, tensor: int, by: float) -> None:
        """Change one weight of a matrix."""
        arrays = self.arrays
        arrays[tensor][3, 4] += by
        self.assign(arrays)

    def kept(self) -> dict[str, dict[str, np.ndarray]]:
        """The record of this rank, by tensor and part."""
        tensors = self.optimizer.residual_state_dict()["tensors"]
        return {name: {part: np.array(x) for part, x in parts.items()} for name, parts in sorted(tensors.items())}

    @property
    def kept_bits(self) -> dict[str, dict[str, bytes]]:
        """The same, bit by bit."""
        return {name: {part: x.tobytes() for part, x in parts.items()} for name, parts in self.kept().items()}

    def left(self) -> float:
        """Sum of the sizes of all that it has."""
        return sum(float(np.abs(x).sum()) for parts in self.kept().values() for x in parts.values())

    @property
    @abstractmethod
    def inner(self) -> list[float]:
        """Sums of the inner optimizer's state of this rank."""

    @abstractmethod
    def slots(self) -> list[np.ndarray]:
        """Momentum, or Adam's second moment, that the framework's own optimizer goes on with."""

    def save(self, folder: Path, **extra: Any) -> None:
        """A checkpoint of all ranks."""
        self.adapter.module.save_checkpoint(folder, self.model, self.optimizer, **extra)

    def load(self, folder: Path, **how: Any) -> Any:
        """Load one; returns what was saved beside it."""
        return self.adapter.module.load_checkpoint(folder, self.model, self.optimizer, **how)

    @property
    @abstractmethod
    def counted(self) -> int:
        """The steps, or exchanges, that a checkpoint knows of."""

    @property
    @abstractmethod
    def session(self) -> Any:
        """The parts of the optimizer."""

    @property
    @abstractmethod
    def choice(self) -> Any:
        """Of ``auto``."""

    @property
    @abstractmethod
    def exchange(self) -> Any:
        """Its engines, counters and config."""

    @property
    def compressed(self) -> list[Any]:
        """The engines of what is compressed."""
        return [engine for engine in self.exchange.engines if not engine.bucket.uncompressed]

    def owed(self) -> list[float]:
        """The mean over ranks of v, and of u, whoever keeps them, each with weights that tell its elements apart."""
        found = []
        for part in ("v", "u"):
            every = [engine.as_one_of_all(part).astype(np.float64) for engine in self.exchange.engines]
            own = sum(float((kept * np.sin(np.arange(kept.size) + 1)).sum()) for kept in every)
            found.append(float(np.mean(self.adapter.of_all_ranks(own))))
        return found

    @property
    def exchanged(self) -> int:
        """Number of exchanges."""
        return self.exchange.steps  # type: ignore[no-any-return]

    @abstractmethod
    def take(self, mode: str) -> None:
        """Let ``auto`` go on with `mode`."""

    @property
    @abstractmethod
    def of_round(self) -> int:
        """How many local steps of the round are made."""

    @abstractmethod
    def left_of_round(self, length: int) -> int:
        """How many are to be made until all ranks exchange."""

    @property
    @abstractmethod
    def copied(self) -> dict[str, dict[str, np.ndarray]]:
        """The record of this rank without the inner optimizer's state, within a round too; Keras: once it is built."""

    @property
    def residual(self) -> list[float]:
        """Sums of `e` of this rank, within a round too."""
        return [float(parts["v"].sum(dtype=np.float64)) for _, parts in sorted(self.copied.items())]

    @property
    @abstractmethod
    def outer(self) -> list[np.ndarray]:
        """The outer momentum."""

    @abstractmethod
    def push_outer(self, element: float) -> None:
        """Set the outer momentum to a constant."""

    @abstractmethod
    def state(self, **options: Any) -> Any:
        """The state of an elastic job."""

    @abstractmethod
    def renew(self, state: Any) -> None:
        """Make the exchange anew, as where a host has left and Horovod calls no sync."""

    @abstractmethod
    def failing(self, error: Exception) -> AbstractContextManager[Any]:
        """Inside, an exchange ends with this error."""
