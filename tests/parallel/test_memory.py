"""Peak memory per parameter, on real ranks: u and v, b where decay and momentum meet, and little else."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
import torch.nn as nn

from dgc_horovod.torch import Compression, DistributedOptimizer

_LAYERS, _WIDTH = 24, 1024
_M_MMAP_THRESHOLD = -3  # of mallopt
Wrap = Callable[[nn.Module], Any]


def _kilobytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1])


def _peak(layers: int, wrap: Wrap) -> float:
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


def _plain(model: nn.Module, **options: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4, **options)


def _ours(compression: Any, **options: float) -> Wrap:
    return lambda model: DistributedOptimizer(_plain(model, **options), model.named_parameters(), compression)


@pytest.mark.parallel
@pytest.mark.slow
@pytest.mark.on_ranks(2, fresh=True)
def test_extra_memory_is_as_stated():
    """docs/design.md: 8 bytes a parameter (u, v), 4 more with weight decay; and a bucket's."""
    hvd.init()
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 17)  # every tensor is a mapping of its own: freed at once
    forms = {
        "momentum": (8, _ours(Compression.dgc(), momentum=0.9)),
        "momentum and decay": (12, _ours(Compression.dgc(), momentum=0.9, weight_decay=1e-3)),
        "no momentum": (4, _ours(Compression.dgc())),
        "gaussian, 4 bits": (8, _ours(Compression.dgc(rule="gaussian", values="4bit"), momentum=0.9)),
    }
    for wrap in (_plain, *(wrap for _, wrap in forms.values())):
        _peak(1, wrap)  # Horovod's and torch's own buffers are made at the first use
    base = _peak(_LAYERS, _plain)
    extra = {form: _peak(_LAYERS, wrap) - base for form, (_, wrap) in forms.items()}  # all: the ranks go in step
    assert 8 <= base < 9, "weights and gradients"
    for form, (stated, _) in forms.items():
        assert stated - 0.2 < extra[form] < stated + 0.7, f"{form}: {extra[form]:.2f} bytes a parameter"
