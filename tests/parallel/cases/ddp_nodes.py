"""DDP on four ranks of two nodes, each with a torchrun of its own: what a hierarchical exchange promises."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.testing.torch import session
from dgc_horovod.torch.ddp import Compression, DistributedOptimizer, load_checkpoint, register, save_checkpoint
from tests.helpers.regression import UNROUNDED, batches, distance, fingerprint, smooth_model, weights


def _sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3)


def _made(**fields: Any) -> tuple[DistributedDataParallel, Any]:
    model = DistributedDataParallel(smooth_model())
    compression = Compression.dgc(**{"density": 0.01, "exchange": "hierarchical", **fields})
    return model, register(model, _sgd(model), compression)


def _train(model: Any, optimizer: Any, steps: int, spoilt: int = -1) -> list[float]:
    losses = []
    for step, (x, y) in enumerate(batches(steps, dist.get_rank())):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        (loss * float("inf") if step == spoilt and dist.get_rank() == 3 else loss).backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def layout() -> dict[str, Any]:
    """Which exchange it is, and how much each rank keeps."""
    model, optimizer = _made()
    _train(model, optimizer, 3)
    engines = [engine for engine in session(optimizer).exchange.engines if not engine.bucket.uncompressed]
    plain = smooth_model()
    summed = DistributedOptimizer(
        _sgd(plain), plain.named_parameters(), Compression.dgc(0.01, exchange="hierarchical"), average=False
    )
    return {
        "summed": session(summed).exchange.topology.node_size,
        "kept": sum(engine.state.v.size for engine in engines),
        "all": sum(engine.whole.numel for engine in engines),
        "inside": optimizer.compression_stats()["bytes_inside_node"],
    }


def long_run() -> dict[str, Any]:
    """Hundreds of steps, one of which is not finite on one rank; owners between the nodes as well."""
    found = {}
    for exchange in ("hierarchical", "hierarchical+sharded"):
        model, optimizer = _made(exchange=exchange, bucket_bytes=20_000, check_every=50)
        losses = _train(model, optimizer, 300, spoilt=100)
        skipped = session(optimizer).exchange.counts.steps
        found[exchange] = [fingerprint(model), losses[0], sum(losses[-20:]) / 20, skipped]
    return found


def stock() -> dict[str, float]:
    """Everything sent and nothing masked: as far from DDP alone as rounding is."""
    dense = DistributedDataParallel(smooth_model())
    _train(dense, _sgd(dense), 10)
    found = {}
    cases = {"all": {}, "a limit": {"clip_norm": 1e6}, "compressed": {"density": 0.01}}
    for name, fields in cases.items():
        model, optimizer = _made(**{"density": 1.0, "factor_masking": False, **UNROUNDED, **fields})
        _train(model, optimizer, 10)
        found[name] = distance(weights(dense), weights(model))
    return found


def saved() -> dict[str, Any]:
    """A run, its checkpoint, and the rest of it from there; a flush leaves nothing."""
    ends, folder = [], Path(os.environ["DGC_TEST_FOLDER"])
    for resumes in (False, True):
        model, optimizer = _made()
        if resumes:
            load_checkpoint(folder, model, optimizer)
        else:
            _train(model, optimizer, 6)
            save_checkpoint(folder, model, optimizer)
        _train(model, optimizer, 6)
        ends.append(fingerprint(model))
    optimizer.flush()
    left = sum(float(abs(x["v"]).sum()) for x in optimizer.residual_state_dict()["tensors"].values())
    return {"same": ends[0] == ends[1], "left": left, "flushed": fingerprint(model)}


def loaded() -> dict[str, Any]:
    """What nodes have saved, by ranks of another number without nodes."""
    model, optimizer = _made(exchange="flat")
    load_checkpoint(os.environ["DGC_TEST_FOLDER"], model, optimizer)
    _train(model, optimizer, 2)
    return {"weights": fingerprint(model)}


def falls_back() -> dict[str, Any]:
    """Ranks that are all on one node."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dgc_horovod").addHandler(handler)
    try:
        _, optimizer = _made()
    finally:
        logging.getLogger("dgc_horovod").removeHandler(handler)
    about_nodes = [text for text in said if "hierarchical" in text]
    return {"node size": session(optimizer).exchange.topology.node_size, "said": about_nodes}
