"""The data on which rules and kernels are tested, and the backends they are tested on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dgc_horovod.kernels.native.kernels import NativeKernels
from dgc_horovod.kernels.reference import ReferenceKernels
from dgc_horovod.kernels.torch_eager import TorchEagerKernels

BACKENDS: list[Any] = [ReferenceKernels(), TorchEagerKernels("cpu"), NativeKernels()]
# As parameters of a test: what torch does alike is a slow test, but for a few rows.
EACH = [pytest.param(k, id=k.name, marks=[pytest.mark.slow] * (k.name == "torch_eager")) for k in BACKENDS]


def _drawn(draw: Callable[[np.random.Generator, int], Any]) -> Callable[[int, int], np.ndarray]:
    return lambda numel, seed: np.asarray(draw(np.random.default_rng(seed), numel)).astype(np.float32)


def _one_hot(rng: np.random.Generator, numel: int) -> np.ndarray:
    x = np.zeros(numel)
    x[rng.integers(numel)] = -2.5
    return x


DATA: dict[str, Callable[[int, int], np.ndarray]] = {
    "normal": _drawn(lambda rng, n: rng.standard_normal(n)),
    "laplace": _drawn(lambda rng, n: rng.laplace(size=n)),
    "log-normal scaled": _drawn(lambda rng, n: rng.standard_normal(n) * rng.lognormal(0, 2, n)),
    "uniform": _drawn(lambda rng, n: rng.uniform(-1, 1, n)),
    "all equal": _drawn(lambda rng, n: np.full(n, 0.75)),
    "all zero": _drawn(lambda rng, n: np.zeros(n)),
    "one hot": _drawn(_one_hot),
    "denormal": _drawn(lambda rng, n: rng.integers(-1000, 1000, n) * 1e-42),
    "ties": _drawn(lambda rng, n: rng.integers(-3, 4, n)),
}
CONTINUOUS = ("normal", "laplace", "log-normal scaled", "uniform")


def as_array(kernels: Any, x: np.ndarray) -> Any:
    """A copy of `x` as the backend's Array."""
    return kernels.from_host(x.copy())


def as_numpy(kernels: Any, x: Any) -> np.ndarray:
    """The backend's Array as NumPy."""
    return kernels.to_host(x)
