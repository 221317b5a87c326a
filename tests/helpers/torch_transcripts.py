"""Runs of PyTorch whose every bit is compared with what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import dgc_horovod.torch as adapter
from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers import ways as tables
from tests.helpers.torch_ways import OPTIMIZERS, TorchTraining, model_of, plain
from tests.helpers.training import momentum_sgd, smooth_model, train, weights
from tests.helpers.transcripts import Transcript, made, runs

_OTHERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "nesterov, decay": lambda m: torch.optim.SGD(m.parameters(), 0.05, 0.9, nesterov=True, weight_decay=1e-3),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), 3e-3),
    "adam": lambda m: torch.optim.Adam(m.parameters(), 3e-3, weight_decay=1e-3),
}


def all_runs() -> dict[str, dict[str, str]]:
    """Each run's hashes on this rank; "stock" tells whether this machine computes as the one that has recorded them."""
    found = {"stock": _stock()}
    for name, run in runs(hvd.size()).items():
        found[name] = _hashes(momentum_sgd, made(Compression, run))
    for name, make in _OTHERS.items():
        for compression in ("dgc, warm-up", "topk"):
            found[f"{name}, {compression}"] = _hashes(make, made(Compression, runs(hvd.size())[compression]))
    found["two passes"] = _hashes(momentum_sgd, made(Compression, runs(hvd.size())["dgc"]), passes=2)
    return found


def _stock() -> dict[str, str]:
    model = smooth_model()
    train(model, momentum_sgd(model), 20)
    return Transcript().hashes(weights(model).numpy(), {"tensors": {}})


def _hashes(make: Callable[[nn.Module], torch.optim.Optimizer], compression: object, passes: int = 1) -> dict[str, str]:
    model = smooth_model()
    optimizer = DistributedOptimizer(
        make(model), model.named_parameters(), compression, backward_passes_per_step=passes
    )
    with Transcript() as transcript:
        train(model, optimizer, 20, passes)
    return transcript.hashes(weights(model).numpy(), optimizer.residual_state_dict())


def _made(way: tables.Way, seed: int) -> TorchTraining:
    model = model_of(way, seed)
    optimizer = DistributedOptimizer(
        OPTIMIZERS[way.optimizer](model), model.named_parameters(), way.compression(Compression), way.passes
    )
    return TorchTraining(way, hvd.rank(), model, optimizer, adapter)


def ways() -> dict[str, Any]:
    """What scripts do."""
    return {**plain(hvd.rank()), **tables.follow_all(tables.TORCH, _made, join=hvd.join)}


def on_nodes() -> dict[str, Any]:
    """Some of it on nodes."""
    return {**plain(hvd.rank()), **tables.follow_all(tables.TORCH, _made, "nodes")}


def fixtures() -> dict[str, Any]:
    """Checkpoints of another day."""
    return {**plain(hvd.rank()), **tables.read_fixtures(tables.TORCH, _made, hvd.size())}


def write() -> dict[str, Any]:
    """Write them."""
    return tables.write_fixtures(tables.TORCH, _made)


def write_on_nodes() -> dict[str, Any]:
    """Write those of nodes."""
    return tables.write_fixtures(tables.TORCH, _made, on_nodes=True)
