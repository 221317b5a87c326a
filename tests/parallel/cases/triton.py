"""The adapter over Triton's kernels, whose Arrays are torch's as on a GPU, beside the native ones."""

from __future__ import annotations

import os
from typing import Any

import horovod.torch as hvd
import torch

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.training import fingerprint, momentum_sgd, smooth_model, train

STEPS = 8


def _adamw(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.003)


RUNS: dict[str, tuple[Any, Any]] = {
    "dgc": (Compression.dgc(0.05, min_numel=16), momentum_sgd),
    "clipped, per tensor, 4bit": (
        Compression.dgc(0.05, min_numel=16, clip_norm=0.5, scope="tensor", values="4bit"), momentum_sgd),
    "gaussian": (Compression.gaussian(0.05, min_numel=16), momentum_sgd),
    "AdamW": (Compression.dgc(0.05, min_numel=16), _adamw),
}  # fmt: skip


def same_as_native() -> dict[str, Any]:
    """Weights after some steps, by run and backend."""
    hvd.init()
    found: dict[str, Any] = {name: {} for name in RUNS}
    for name, (compression, make) in RUNS.items():
        for backend in ("native", "triton"):
            os.environ["DGC_BACKEND"] = backend
            model = smooth_model()
            optimizer = DistributedOptimizer(make(model), model.named_parameters(), compression)
            train(model, optimizer, STEPS)
            found[name][backend] = fingerprint(model)
            used = {engine.kernels.name for engine in session(optimizer).exchange.engines}
            assert used == {backend}, used
    return found
