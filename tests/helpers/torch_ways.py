"""`ways` with PyTorch, on Horovod or under DDP."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.transcripts import hash_of
from tests.helpers.ways import INPUTS, LIMIT, Way

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), 0.05, 0.9),
    "Nesterov": lambda m: torch.optim.SGD(m.parameters(), 0.05, 0.9, nesterov=True, weight_decay=1e-3),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), 3e-3),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), 1e-3),
}


def model_of(way: Way, seed: int = 0) -> nn.Module:
    """A way's model, smooth and small."""
    torch.manual_seed(seed)
    sizes = (INPUTS, way.width, way.width // 2, 1)
    pairs = [(nn.Linear(*pair), nn.Tanh()) for pair in itertools.pairwise(sizes)]
    return nn.Sequential(*list(itertools.chain(*pairs))[:-1])


class TorchTraining:
    """A `Training`.

    Args:
        way: what is followed.
        rank: of this process.
        model, optimizer: as the adapter has wrapped them.
        adapter: module with ``save_checkpoint`` and ``load_checkpoint``; None: nothing is wrapped.
    """

    def __init__(self, way: Way, rank: int, model: nn.Module, optimizer: Any, adapter: Any = None) -> None:
        self._way, self.rank, self.model, self.optimizer, self._adapter = way, rank, model, optimizer, adapter

    def step(self, number: int) -> None:
        """See `Training`."""
        optimizer, passes = self.optimizer, self._way.passes
        optimizer.zero_grad()
        for i in range(passes):
            x, y = map(torch.from_numpy, self._way.batch(self.rank, number * passes + i))
            alone = i + 1 < passes and hasattr(self.model, "no_sync")
            with self.model.no_sync() if alone else nullcontext():  # type: ignore[operator]
                (F.mse_loss(self.model(x), y) / passes).backward()
        if self._way.clip == "before":
            nn.utils.clip_grad_norm_(self.model.parameters(), LIMIT)
        if self._way.clip == "after":
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(self.model.parameters(), LIMIT)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()

    def save(self, place: Path) -> None:
        """See `Training`."""
        self._adapter.save_checkpoint(place, self.model, self.optimizer)

    def load(self, place: Path) -> None:
        """See `Training`."""
        self._adapter.load_checkpoint(place, self.model, self.optimizer)

    def weights(self) -> np.ndarray:
        """See `Training`."""
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).numpy()

    def state(self) -> Iterator[Any]:
        """See `Training`."""
        for _, state in sorted(self.optimizer.state_dict()["state"].items()):
            for _, value in sorted(state.items(), key=str):
                yield math.nan if value is None else value


def plain(rank: int) -> dict[str, Any]:
    """What every optimizer makes of a model on one rank alone: whether a machine computes as another does."""
    way, found = Way(), []
    for make in OPTIMIZERS.values():
        model = model_of(way)
        training = TorchTraining(way, rank, model, make(model))
        for number in range(way.steps):
            training.step(number)
        found.append(("", training.weights()))
    return {"stock": {"weights": hash_of(found)}}
