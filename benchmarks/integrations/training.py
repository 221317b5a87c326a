"""What the jobs share: how a run is asked for, what comes of it, tiny models and data without downloads."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

if TYPE_CHECKING:  # what is unedited imports nothing of it
    from dgc_horovod.config import DGCConfig

RANKS, EPOCHS = 2, 2
VOCABULARY, LENGTH, CLASSES = 128, 32, 10
_HELD = 64  # examples that are not trained on


@dataclass(frozen=True)
class Run:
    """One training of a job.

    Args:
        folder: for checkpoints.
        compression: what the lines in the script are given; None: the script has no such lines.
        usual: False for comparisons at density 1: nothing is clipped, as each rank would clip its own gradient, nor
            rounded to bf16 by autocast, which makes much of the last bit.
        saves: whether a checkpoint is written at half of the steps.
        resumes: whether it goes on from there.
    """

    folder: Path
    compression: DGCConfig | None = None
    usual: bool = True
    saves: bool = False
    resumes: bool = False


class Trained(NamedTuple):
    """What came of a run on this rank.

    Args:
        weights: all of them, one vector.
        loss: on data that were held out, in nats.
        stats: of compression; {} where there was none, or it is not ours to ask.
    """

    weights: np.ndarray[Any, np.dtype[np.float32]]
    loss: float
    stats: dict[str, Any]

    @property
    def digest(self) -> str:
        """Of the weights' bits."""
        return hashlib.blake2b(self.weights.tobytes(), digest_size=8).hexdigest()


def ended(model: nn.Module, optimizer: Any, loss: float) -> Trained:
    """Result of a run of torch."""
    while not hasattr(optimizer, "compression_stats") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer  # accelerate's and Fabric's are around it
    stats = optimizer.compression_stats() if hasattr(optimizer, "compression_stats") else {}
    weights = torch.cat([p.detach().float().flatten() for p in model.parameters()]).numpy()
    return Trained(weights, loss, {name: stats[name] for name in ("steps", "bytes_sent", "bytes_dense") if stats})


def train_digits(run: Run, rank: int, model: nn.Module, optimizer: Any, save: Callable[[], None]) -> None:
    """Train as a plain loop does, on this rank's digits; call `save` at half of the epochs where the run saves."""
    images, labels = (part[rank::RANKS].split(16) for part in digits()[0].tensors)
    for epoch in range(EPOCHS // 2 if run.resumes else 0, EPOCHS):
        for x, y in zip(images[:-1], labels[:-1], strict=True):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        if run.saves and epoch + 1 == EPOCHS // 2:
            save()


def texts(count: int) -> torch.Tensor:
    """Rows of bytes of the standard library's sources; the last ones are held out by `text_loss`."""
    library = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join(Path(library, name).read_bytes() for name in ("argparse.py", "inspect.py", "typing.py"))
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).long().clamp(max=VOCABULARY - 1)
    return rows[: count * LENGTH].view(count, LENGTH)


def _held_texts() -> torch.Tensor:
    return texts(4000)[-_HELD:]


def text_loss(model: Any) -> float:
    """Loss of a model of transformers on held-out rows, in nats a byte."""
    model.eval()
    with torch.no_grad():
        return float(model(input_ids=(rows := _held_texts()), labels=rows).loss)


def byte_loss(model: nn.Module, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Loss of `SmallGPT` on rows; on held-out ones where none are given."""
    rows = _held_texts() if rows is None else rows
    return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def digits() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's digits for training, and those held out."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images, labels = torch.tensor(found.images, dtype=torch.float32) / 16 - 0.3, torch.tensor(found.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order].flatten(1), labels[order]
    return TensorDataset(images[200:], labels[200:]), TensorDataset(images[:200], labels[:200])


def digit_loss(model: nn.Module) -> float:
    """Loss on held-out digits, in nats."""
    images, labels = digits()[1].tensors
    with torch.no_grad():
        return float(cross_entropy(model(images), labels))


def small_net() -> nn.Sequential:
    """Two layers for the digits: 19,210 parameters."""
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, CLASSES))


class SmallGPT(nn.Module):
    """Embedding, one causal block, head: 29,312 parameters."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits of the byte after each."""
        long = rows.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(long)
        hidden: torch.Tensor = self.token(rows) + self.place(torch.arange(long))
        logits: torch.Tensor = self.head(self.block(hidden, mask, is_causal=True))
        return logits


def rank() -> int:
    """Index of this rank, whatever has started it."""
    return int(os.environ.get("RANK") or os.environ.get("HOROVOD_RANK") or 0)
