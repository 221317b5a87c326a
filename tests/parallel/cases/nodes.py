"""Four ranks on two nodes of two, by Horovod's own list of hosts: what a hierarchical exchange promises."""

from __future__ import annotations

import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from torch import nn

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer, load_checkpoint, node_process_sets, save_checkpoint
from dgc_horovod.torch.horovod_carrier import HorovodCollectives
from tests.helpers.errors import error_of
from tests.helpers.logs import messages
from tests.helpers.training import UNROUNDED, batches, distance, fingerprint, momentum_sgd, smooth_model, train, weights


def _wrapped(model: nn.Module, compression: Any, optimizer: torch.optim.Optimizer | None = None) -> Any:
    made = DistributedOptimizer(
        optimizer or momentum_sgd(model), named_parameters=model.named_parameters(), compression=compression
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return made


def layout() -> dict[str, Any]:
    """Which exchange it is, and how much each rank keeps."""
    hvd.init()
    model = smooth_model()
    optimizer = _wrapped(model, Compression.dgc(density=0.01, exchange="hierarchical"))
    train(model, optimizer, 3)
    engines = session(optimizer).exchange.engines
    stats = optimizer.compression_stats()
    return {
        "kept": sum(engine.state.v.size for engine in engines if not engine.bucket.uncompressed),
        "momentum": sum(engine.state.u.size for engine in engines if engine.state.u is not None),
        "all": sum(engine.whole.numel for engine in engines if not engine.bucket.uncompressed),
        "inside": stats["bytes_inside_node"],
        "received": stats["bytes_received"],
    }


def budget() -> dict[str, float]:
    """What each rank receives of other nodes at a step, within a budget of a card."""
    hvd.init()
    model = smooth_model()
    config = Compression.dgc(density=0.5, max_bytes_per_step=4000, dense_values="8bit", exchange="hierarchical")
    optimizer = _wrapped(model, config)
    train(model, optimizer, 5)
    return {
        "received": optimizer.compression_stats()["bytes_received"] / 5,
        "density": session(optimizer).exchange.config.density,
    }


def long_run() -> dict[str, Any]:
    """A thousand steps, one of which is not finite on one rank."""
    hvd.init()
    model = smooth_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = _wrapped(model, Compression.dgc(density=0.01, exchange="hierarchical"), sgd)

    def spoil(step: int) -> None:
        if step == 500 and hvd.rank() == 3:
            hook = model[0].weight.register_hook(lambda grad: (hook.remove(), grad * math.inf)[1])

    losses = train(model, optimizer, 1000, before_backward=spoil)
    return {
        "fingerprint": fingerprint(model),
        "first": losses[0],
        "last": sum(losses[-20:]) / 20,
        "skipped": optimizer.compression_stats()["steps"],
    }


def stock() -> dict[str, float]:
    """Everything sent and nothing masked: as far from stock Horovod as rounding is."""
    hvd.init()
    found = {}
    cases = {
        "sgd": momentum_sgd,
        "decay": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
        "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        "plain": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    }
    for name, make in cases.items():
        model = smooth_model()
        train(model, hvd.DistributedOptimizer(make(model), named_parameters=model.named_parameters()), 10)
        dense = weights(model)
        for clip_norm in (None, 1e6):  # so high that it measures and changes nothing
            model, config = smooth_model(), {"clip_norm": clip_norm, "exchange": "hierarchical", **UNROUNDED}
            train(model, _wrapped(model, Compression.dgc(density=1.0, factor_masking=False, **config), make(model)), 10)
            found[name + (", clipped" if clip_norm else "")] = distance(dense, weights(model))
    model = smooth_model()
    train(model, _wrapped(model, Compression.dgc(density=0.01, exchange="hierarchical")), 10)
    found["compressed"] = distance(dense, weights(model))
    return found


def refused() -> dict[str, Any]:
    """What a script that clips by itself is told; a limit that nothing reaches only measures."""
    hvd.init()
    model = smooth_model()
    optimizer = _wrapped(model, Compression.dgc(density=0.01, exchange="hierarchical"))
    x, y = next(iter(batches(1, hvd.rank())))
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.synchronize()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), math.inf))
    return {
        "norm": norm,
        "error": error_of(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
    }


def cut() -> str:
    """What a script is told that cuts tensors to a part after wrapping."""
    hvd.init()
    model = smooth_model()
    optimizer = _wrapped(model, Compression.dgc(density=0.01, exchange="hierarchical"))
    model[4].weight.data, model[4].bias.data = model[4].weight.data[:8].clone(), model[4].bias.data[:8].clone()
    model[6].weight.data = model[6].weight.data[:, :8].clone()
    return error_of(lambda: train(model, optimizer, 1))


def misdeclared() -> dict[str, Any]:
    """Nodes of a number that four ranks do not make, and of what is no number."""
    hvd.init()
    found: dict[str, Any] = {"refused": [error_of(partial(node_process_sets, wrong)) for wrong in (0, "2", True)]}
    for number in (3, 4):
        found[f"sets of {number}"] = [each.ranks for each in node_process_sets(number)]
        with messages() as logged:
            model = smooth_model()
            optimizer = _wrapped(model, Compression.dgc(density=0.01, exchange="hierarchical"))
            train(model, optimizer, 1)
        found[f"nodes of {number}"] = [text for text in logged if "no hierarchical exchange" in text]
    return found


def clipping() -> dict[str, float]:
    """One step of SGD with ``clip_norm``, and the same by hand: each node's mean gradient cut to sqrt(M)*c."""
    hvd.init()
    limit, lr = 0.01, 100.0
    config = Compression.dgc(density=1.0, factor_masking=False, clip_norm=limit, exchange="hierarchical", **UNROUNDED)
    model = smooth_model()
    optimizer = _wrapped(model, config, torch.optim.SGD(model.parameters(), lr=lr))
    optimizer.zero_grad()
    data = [next(iter(batches(1, rank))) for rank in range(hvd.size())]
    by_hand = smooth_model()
    before, sums = weights(by_hand), torch.zeros_like(weights(by_hand))
    norms = []
    for node in range(2):
        total = torch.zeros_like(sums)
        for x, y in data[2 * node : 2 * node + 2]:
            by_hand.zero_grad()
            nn.functional.mse_loss(by_hand(x), y).backward()
            total += torch.cat([p.grad.flatten() for p in by_hand.parameters()]) / 2
        norms.append(float(total.norm()))
        sums += total * min(1.0, math.sqrt(2) * limit / norms[-1]) / 2
    x, y = data[hvd.rank()]
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    return {"distance": distance(lr * sums, before - weights(model)), "least norm": min(norms), "limit": limit}


def state(folder: str = "") -> dict[str, Any]:
    """u and v are emptied by a flush, and saved and loaded bit by bit."""
    hvd.init()
    runs = []
    for interrupted in (False, True):
        model = smooth_model()
        optimizer = _wrapped(model, Compression.dgc(density=0.01, exchange="hierarchical"))
        train(model, optimizer, 6)
        if interrupted:
            kept, saved = optimizer.residual_state_dict(), optimizer.state_dict()
            other = smooth_model(1)
            other.load_state_dict(model.state_dict())
            model = other
            optimizer = _wrapped(model, Compression.dgc(density=0.01, exchange="hierarchical"))
            optimizer.load_state_dict(saved)
            optimizer.load_residual_state_dict(kept)
        train(model, optimizer, 6)
        runs.append(fingerprint(model))
    before = weights(model)
    owed = {name: arrays["v"] for name, arrays in optimizer.residual_state_dict()["tensors"].items()}
    mass = sum(float(v.norm()) for v in owed.values())
    optimizer.flush()
    left = sum(float(x["v"].norm()) for x in optimizer.residual_state_dict()["tensors"].values())
    return {
        "runs": runs, "mass": mass, "left": left, "moved": distance(weights(model), before),
        "replica": fingerprint(model),
    }  # fmt: skip


def saved() -> dict[str, Any]:
    """A run on nodes, and what it has kept, for ranks of another number or without nodes."""
    hvd.init()
    model = smooth_model()
    optimizer = _wrapped(model, Compression.dgc(density=0.01, exchange=os.environ["NODES_EXCHANGE"]))
    folder = Path(os.environ["DGC_TEST_FOLDER"])
    if (folder / "manifest.json").exists():
        load_checkpoint(folder, model, optimizer)
    found = {"before": _owed(optimizer), "node size": session(optimizer).exchange.topology.node_size}
    train(model, optimizer, 5)
    save_checkpoint(folder, model, optimizer)
    return {**found, "after": _owed(optimizer), "fingerprint": fingerprint(model)}


def _owed(optimizer: Any) -> list[float]:
    """The mean over ranks of v, and of u, each with weights that tell its elements apart."""
    found = []
    for part in ("v", "u"):
        own = 0.0
        for engine in session(optimizer).exchange.engines:
            kept = engine.as_one_of_all(part).astype("float64")
            own += float((kept * np.sin(np.arange(kept.size) + 1)).sum())
        found.append(float(hvd.allreduce(torch.tensor(own, dtype=torch.float64), name=f"owed.{part}")))
    return found


def ends_later() -> dict[str, Any]:
    """The script ends with a step, whose last round takes the first node two seconds longer."""
    hvd.init()
    model = smooth_model()
    optimizer = _wrapped(model, Compression.dgc(density=0.01, exchange="hierarchical"))
    train(model, optimizer, 3)
    if session(optimizer).exchange.topology.node == 0:
        quick = HorovodCollectives.allgather

        def slow(self: HorovodCollectives, packet: torch.Tensor, name: str) -> Any:
            time.sleep(2 * (".inside" in self.tag))
            return quick(self, packet, name)

        HorovodCollectives.allgather = slow  # type: ignore[method-assign]
    train(model, optimizer, 1)
    return {"fingerprint": fingerprint(model)}
