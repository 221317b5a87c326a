"""Gradients of a model's shapes for many ranks of one machine: the large arrays are in files, which all of them map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

_SLACK = 2**20  # where in the noise a step's gradient begins
_PART = 2**24


def write(folder: Path, numels: Sequence[int], seed: int = 0) -> None:
    """Make the files that `Gradients` reads: noise, and the scale of every element.

    Scales differ over coordinates and over tensors, so what accumulates is far from iid.

    Args:
        folder: where to put them.
        numels: of the tensors.
    """
    rng, total = np.random.default_rng(seed), sum(numels)
    noise, scale = (_file(folder, name, size, "w+") for name, size in (("noise", total + _SLACK), ("scale", total)))
    for start in range(0, noise.size, _PART):
        noise[start : start + _PART] = rng.standard_normal(min(_PART, noise.size - start), dtype=np.float32)
    end = 0
    for numel, tensor_scale in zip(numels, 1e-3 * np.exp(rng.standard_normal(len(numels))), strict=True):
        start, end = end, end + numel
        np.exp(rng.standard_normal(numel, dtype=np.float32), out=scale[start:end])
        scale[start:end] *= np.float32(tensor_scale)
    noise.flush()
    scale.flush()


def _file(folder: Path, name: str, size: int, mode: str) -> np.ndarray:
    return np.memmap(folder / f"{name}.f32", np.float32, mode, shape=(size,))  # type: ignore[call-overload, no-any-return]


class Gradients:
    """What any rank's gradients are at any step, in memory of their own as a backward pass leaves them.

    Args:
        folder: where `write` has put the files.
        shapes: of the tensors.
    """

    def __init__(self, folder: Path, shapes: Sequence[tuple[int, ...]]) -> None:
        self.shapes = shapes
        numels = [math.prod(shape) for shape in shapes]
        ends = np.cumsum(numels).tolist()
        self._places = [slice(end - numel, end) for end, numel in zip(ends, numels, strict=True)]
        self._noise = _file(folder, "noise", sum(numels) + _SLACK, "r")
        self._scale = _file(folder, "scale", sum(numels), "r")

    def of(self, rank: int, step: int) -> list[torch.Tensor]:
        """The gradients of `rank` at `step`, in the order of the shapes."""
        return [self.one(i, rank, step) for i in range(len(self.shapes))]

    def one(self, i: int, rank: int, step: int) -> torch.Tensor:
        """Tensor `i` alone."""
        offset = int(np.random.default_rng([rank, step]).integers(_SLACK))
        place, gradient = self._places[i], torch.empty(self.shapes[i])
        noise = self._noise[offset + place.start : offset + place.stop]
        np.multiply(noise, self._scale[place], out=gradient.view(-1).numpy())
        return gradient
