"""Runs of PyTorch DDP whose every bit is compared with what it was."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dgc_horovod.torch.ddp as adapter
from dgc_horovod.torch.ddp import Compression, register
from tests.helpers import ways as tables
from tests.helpers.torch_ways import OPTIMIZERS, TorchTraining, model_of, plain


def _made(way: tables.Way, seed: int) -> TorchTraining:
    model = DistributedDataParallel(model_of(way, seed), bucket_cap_mb=0.005)
    optimizer = register(model, OPTIMIZERS[way.optimizer](model), way.compression(Compression))
    return TorchTraining(way, dist.get_rank(), model, optimizer, adapter)


def ways() -> dict[str, Any]:
    """What scripts do."""
    return {**plain(dist.get_rank()), **tables.follow_all(tables.DDP, _made)}


def on_nodes() -> dict[str, Any]:
    """Some of it on nodes."""
    return {**plain(dist.get_rank()), **tables.follow_all(tables.DDP, _made, "nodes")}


def fixtures() -> dict[str, Any]:
    """Checkpoints of another day."""
    return {**plain(dist.get_rank()), **tables.read_fixtures(tables.DDP, _made, dist.get_world_size())}


def write() -> dict[str, Any]:
    """Write them."""
    return tables.write_fixtures(tables.DDP, _made)
