"""Elements have owners: what the sharded exchange promises on real ranks."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer, load_checkpoint, save_checkpoint
from tests.helpers.errors import error_of
from tests.helpers.training import UNROUNDED, distance, fingerprint, momentum_sgd, smooth_model, train, weights
from tests.parallel.cases.nodes import _owed

DENSITY = 0.05


def _wrapped(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **settings: Any) -> Any:
    config = Compression.dgc(**{"density": DENSITY, "exchange": "sharded", **settings})
    made = DistributedOptimizer(
        optimizer or momentum_sgd(model), named_parameters=model.named_parameters(), compression=config
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return made


def _rounds(optimizer: Any) -> list[str]:
    engines = [engine for engine in session(optimizer).exchange.engines if not engine.bucket.uncompressed]
    return [f"{collective.name}, {collective.group}" for collective in engines[0].exchange.rounds]


def long_run(steps: int = 1000, **settings: Any) -> dict[str, Any]:
    """Many steps, one of which is not finite on one rank."""
    hvd.init()
    model = smooth_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = _wrapped(model, sgd, **settings)

    def spoil(step: int) -> None:
        if step == steps // 2 and hvd.rank() == hvd.size() - 1:
            hook = model[0].weight.register_hook(lambda grad: (hook.remove(), grad * math.inf)[1])

    losses = train(model, optimizer, steps, before_backward=spoil)
    return {
        "fingerprint": fingerprint(model), "first": losses[0], "last": sum(losses[-20:]) / 20,
        "rounds": _rounds(optimizer), "owed": _owed(optimizer)[0],
    }  # fmt: skip


def short_run() -> dict[str, Any]:
    """Fewer steps."""
    return long_run(100)


def between_nodes() -> dict[str, Any]:
    """Nodes of two, among which elements have owners."""
    return long_run(300, exchange="hierarchical+sharded", node_size=2)


def volume() -> dict[str, float]:
    """Bytes received a step, and those of a packet with all k elements of a worker."""
    hvd.init()
    torch.manual_seed(0)
    model, found = nn.Sequential(nn.Linear(32, 512), nn.Tanh(), nn.Linear(512, 1024), nn.Linear(1024, 1)), {}
    for exchange in ("flat", "sharded"):
        optimizer = _wrapped(model, torch.optim.SGD(model.parameters(), lr=0.001), density=0.01, exchange=exchange)
        before = optimizer.compression_stats()["bytes_received"]
        train(model, optimizer, 5)
        (engine,) = [engine for engine in session(optimizer).exchange.engines if not engine.bucket.uncompressed]
        found[exchange] = (optimizer.compression_stats()["bytes_received"] - before) / 5
        found["packet"] = engine.spec(0.01).wire.nbytes
        small = [other for other in session(optimizer).exchange.engines if other is not engine]
        small_bytes = sum(c.received(hvd.size()) for other in small for c in other.spec(0.01).rounds)
        dense = [p for name, p in model.named_parameters() if name in session(optimizer).exchange.layout.dense]
        found[exchange] -= small_bytes + sum(2 * (hvd.size() - 1) / hvd.size() * 4 * p.numel() for p in dense)
        optimizer = None
    return found


def stock() -> dict[str, float]:
    """Everything sent and nothing masked: as far from stock Horovod as rounding is."""
    hvd.init()
    model = smooth_model()
    train(model, hvd.DistributedOptimizer(momentum_sgd(model), named_parameters=model.named_parameters()), 10)
    dense = weights(model)
    model = smooth_model()
    train(model, _wrapped(model, density=1.0, factor_masking=False, **UNROUNDED), 10)
    found = {"density 1": distance(dense, weights(model))}
    model = smooth_model()
    train(model, _wrapped(model), 10)
    return {**found, "compressed": distance(dense, weights(model))}


def state() -> dict[str, Any]:
    """u, v and what owners owe are saved and loaded bit by bit, and emptied by a flush."""
    hvd.init()
    runs = []
    for interrupted in (False, True):
        model = smooth_model()
        optimizer = _wrapped(model)
        train(model, optimizer, 6)
        if interrupted:
            kept, saved_state = optimizer.residual_state_dict(), optimizer.state_dict()
            other = smooth_model(1)
            other.load_state_dict(model.state_dict())
            model, optimizer = other, _wrapped(other)
            optimizer.load_state_dict(saved_state)
            optimizer.load_residual_state_dict(kept)
        train(model, optimizer, 6)
        runs.append(fingerprint(model))
    before = weights(model)
    remainders = [x["remainder"] for x in optimizer.residual_state_dict()["tensors"].values() if "remainder" in x]
    owed = _owed(optimizer)[0]
    optimizer.flush()
    return {
        "runs": runs, "owed": owed, "remainder": sum(float((x * x).sum()) for x in remainders),
        "left": _owed(optimizer)[0], "moved": distance(weights(model), before), "replica": fingerprint(model),
    }  # fmt: skip


def saved() -> dict[str, Any]:
    """A run, and what it has kept, for ranks of another number or another exchange."""
    hvd.init()
    model = smooth_model()
    optimizer = _wrapped(model, exchange=os.environ["SHARDED_EXCHANGE"])
    folder = Path(os.environ["DGC_TEST_FOLDER"])
    if (folder / "manifest.json").exists():
        load_checkpoint(folder, model, optimizer)
    before = _owed(optimizer)
    train(model, optimizer, 5)
    save_checkpoint(folder, model, optimizer)
    return {
        "before": before, "after": _owed(optimizer), "rounds": _rounds(optimizer), "fingerprint": fingerprint(model)
    }  # fmt: skip


def several_buckets() -> int:
    """Forty steps of a model whose tensors are in six buckets; returns how many steps."""
    hvd.init()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    head = nn.Sequential(nn.Linear(32, 256), model, nn.Linear(256, 1))
    optimizer = _wrapped(head, torch.optim.SGD(head.parameters(), lr=1e-3), density=0.01, bucket_bytes=4 * 256 * 256)
    train(head, optimizer, 40)
    return 40


def missing_between_rounds() -> dict[str, Any]:
    """The last rank takes part in the first round of a step, and stays away from the second."""
    hvd.init()
    model = smooth_model()
    optimizer = _wrapped(model)
    train(model, optimizer, 2)
    if hvd.rank() == hvd.size() - 1:
        (engine,) = [each for each in session(optimizer).exchange.engines if not each.bucket.uncompressed]

        def stay_away(received: Any) -> None:
            time.sleep(8)
            raise RuntimeError("away")

        engine.receive = stay_away
    start = time.monotonic()
    found = {"error": error_of(lambda: train(model, optimizer, 1)), "seconds": time.monotonic() - start}
    time.sleep(2)  # who ends first would end Horovod for the others, whose own time is not up yet
    return found
