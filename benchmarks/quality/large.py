"""A text model of useful size: a GPT of 5.1 M parameters that reads and writes bytes, on the sources of Python."""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.quality.models import TransformerModel
from benchmarks.quality.tasks import TASKS, Settings, Task, Text

WIDTH, BLOCKS = 320, 4
_PART = 1 << 14  # bytes; one part of every twenty is for the test


class Bytes(Text):
    """The next byte of Python's standard library."""

    settings = Settings(batch=2, steps=1200, lr=0.1, clip_norm=1.0, density=0.01, stage=60, adamw_lr=0.001, ramp=60)
    title, window, classes = "bytes, GPT of 5.1 M", 128, 256
    points = 4  # to look at all of the test text takes as long as forty steps

    def corpus(self) -> tuple[Tensor, Tensor]:
        """Bytes to train on and to test on."""
        return sources()

    def make_model(self) -> nn.Module:
        """Four blocks of width 320."""
        return TransformerModel(self.classes, self.window, WIDTH, BLOCKS)


ALL_TASKS: dict[str, type[Task]] = {**TASKS, "gpt": Bytes}


@functools.cache
def sources() -> tuple[Tensor, Tensor]:
    """Python's own modules (licence: PSF-2.0), without their tests, as bytes; test parts lie all over the text.

    Every machine has them; `digest` tells whether they are the same.
    """
    whole = torch.frombuffer(bytearray(_read()), dtype=torch.uint8)
    parts = whole.split(_PART)
    return torch.cat([p for i, p in enumerate(parts) if i % 20]), torch.cat(parts[::20])


def digest() -> str:
    """What tells two texts apart."""
    return hashlib.sha256(_read()).hexdigest()[:12]


@functools.cache
def _read() -> bytes:
    root = Path(sysconfig.get_path("stdlib"))
    files = (file.relative_to(root) for file in root.rglob("*.py"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    return b"\n".join((root / file).read_bytes() for file in sorted(files) if not left_out & set(file.parts))
