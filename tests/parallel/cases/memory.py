"""Resident memory at its peak, per parameter: what compression adds to the weights and gradients."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn as nn

from dgc_horovod.torch import Compression, DistributedOptimizer

_LAYERS, _WIDTH = 24, 1024
_STATUS = Path("/proc/self/status")


def _kilobytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", _STATUS.read_text())
    assert found
    return int(found[1])


def _return_freed_memory_at_once() -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 17)  # M_MMAP_THRESHOLD: every tensor is a mapping of its own


def _peak(layers: int, wrap: Callable[[nn.Module], Any]) -> float:
    """Bytes a parameter at the peak of three steps of a model of `layers` layers, weights and gradients included."""
    gc.collect()
    before = _kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)))
    optimizer = wrap(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, _WIDTH)).pow(2).sum().backward()
        optimizer.step()
    return (_kilobytes("VmHWM") - before) * 1024 / (layers * _WIDTH**2)


def _ours(compression: Any, **options: float) -> Callable[[nn.Module], Any]:
    return lambda model: DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-4, **options), model.named_parameters(), compression
    )


def extra_bytes() -> dict[str, float]:
    """Bytes a parameter on top of plain SGD without momentum, for each form of state."""
    hvd.init()
    _return_freed_memory_at_once()
    plain = lambda model: torch.optim.SGD(model.parameters(), lr=1e-4)  # noqa: E731
    forms = {
        "momentum": _ours(Compression.dgc(), momentum=0.9),
        "momentum and decay": _ours(Compression.dgc(), momentum=0.9, weight_decay=1e-3),
        "no momentum": _ours(Compression.dgc()),
        "tensor scope": _ours(Compression.dgc(scope="tensor"), momentum=0.9),
        "gaussian, 4 bits": _ours(Compression.dgc(rule="gaussian", values="4bit"), momentum=0.9),
    }
    for wrap in (plain, *forms.values()):
        _peak(1, wrap)  # Horovod's and torch's own buffers are made at the first use
    base = _peak(_LAYERS, plain)
    return {"base": base, **{name: _peak(_LAYERS, wrap) - base for name, wrap in forms.items()}}
