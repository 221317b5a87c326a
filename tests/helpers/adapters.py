"""The adapters, for tests that are the same on each: Horovod, DDP, torch.distributed alone, Keras."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dgc_horovod.compression import Presets

KINDS = {"Horovod": "torch", "DDP": "ddp", "without DDP": "ddp", "Keras": "keras"}  # of ranks


class Compression(Presets):
    """The presets, for whatever adapter."""


@dataclass(frozen=True)
class Adapter:
    """One of them, on a rank; a test's parameter ``adapter``.

    Args:
        name: "Horovod", "DDP", "without DDP" or "Keras".
    """

    name: str

    @property
    def kind(self) -> str:
        """Of the ranks."""
        return KINDS[self.name]

    @property
    def ranks(self) -> Any:
        """What knows the ranks: Horovod, or torch.distributed."""
        return importlib.import_module(
            {"torch": "horovod.torch", "ddp": "torch.distributed", "keras": "horovod.tensorflow"}[self.kind]
        )

    @property
    def rank(self) -> int:
        """This rank's number."""
        return (self.ranks.get_rank if self.kind == "ddp" else self.ranks.rank)()

    @property
    def module(self) -> Any:
        """Where users find it."""
        ours = {"torch": "dgc_horovod.torch", "ddp": "dgc_horovod.torch.ddp", "keras": "dgc_horovod.tensorflow.keras"}
        return importlib.import_module(ours[self.kind])

    def start(self, compression: Any, name: str = "SGD", seed: int = 0, **options: Any) -> Any:
        """A `Run` of a smooth model from `seed`; compression None: of stock Horovod, of DDP alone.

        Args:
            compression: of the presets.
            name: of the optimizer.
            seed: of the first weights.
            options: of the optimizer, as torch names them; ``wrap``: a dict of more arguments of the adapter.
        """
        run = "keras_run.KerasRun" if self.kind == "keras" else "torch_run.TorchRun"
        module, kind = run.split(".")
        return getattr(importlib.import_module(f"tests.helpers.{module}"), kind)(
            self, compression, name, seed, **options
        )

    def made(
        self, compression: Any, make: Callable[[Any], Any] | None = None, inner: Any = None, **options: Any
    ) -> Any:
        """Model and optimizer of PyTorch; compression None: of stock Horovod, or of DDP alone."""
        from tests.helpers import ddp_training

        make = make or ddp_training.sgd
        if self.name == "DDP" or (self.name == "without DDP" and compression is None):
            return ddp_training.made(compression, make, inner, **options)
        if self.name == "without DDP":
            return ddp_training.made_plain(compression, make, inner, **options)
        from tests.helpers import training

        return training.made(compression, make, inner, **options)

    def batches(self, steps: int) -> Iterable[Any]:
        """This rank's, for PyTorch."""
        from tests.helpers.regression import batches

        return batches(steps, self.rank)

    def train(self, model: Any, optimizer: Any, steps: int = 12) -> None:
        """So many steps of PyTorch, from this rank's first batch on."""
        from tests.helpers.ddp_training import step

        for x, y in self.batches(steps):
            step(model, optimizer, x, y)

    def of_all_ranks(self, value: Any) -> list[Any]:
        """What each rank has given."""
        if self.kind != "ddp":
            return list(self.ranks.allgather_object(value))
        found = [None] * self.ranks.get_world_size()
        self.ranks.all_gather_object(found, value)
        return list(found)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.of_all_ranks(0)

    def apart(self, array: Any) -> float:
        """How far the ranks are apart in an array, at most."""
        first, *others = self.of_all_ranks(np.asarray(array, np.float32))
        return max(float(np.abs(other - first).max()) for other in others)

    def mean(self, array: np.ndarray) -> np.ndarray:
        """Over all ranks."""
        return np.mean(self.of_all_ranks(array), axis=0)  # type: ignore[no-any-return]


@functools.cache
def _has_keras() -> bool:
    found = importlib.util.find_spec("horovod")
    places = (found and found.submodule_search_locations) or ()
    return any(list(Path(place, "tensorflow").glob("mpi_lib*.so")) for place in places)


_without_keras = pytest.mark.skipif(not _has_keras(), reason="Horovod is not built for TensorFlow here")


def on_adapters(*names: str, slow: tuple[str, ...] = ()) -> Any:
    """The test's parameter ``adapter``: each of `names`, and in slow tests of `slow` too."""
    marks = {name: [_without_keras] if name == "Keras" else [] for name in KINDS}
    rows = [pytest.param(Adapter(name), id=name, marks=marks[name]) for name in names]
    rows += [pytest.param(Adapter(name), id=name, marks=[*marks[name], pytest.mark.slow]) for name in slow]
    return pytest.mark.parametrize("adapter", rows)
