"""Messages that are late, over Horovod: see `tests.helpers.late`."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch.nn.functional as F

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.late import SPEEDS, adamw, ready
from tests.helpers.training import batches, fingerprint, momentum_sgd, smooth_model, train

FIELDS: dict[str, Any] = {"density": 0.05, "min_numel": 16, "bucket_bytes": 1024}


RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (momentum_sgd, {}),
    "clipped": (momentum_sgd, {"clip_norm": 0.5}),
    "small tensors dense": (momentum_sgd, {"dense_values": "fp32"}),
    "AdamW, small tensors dense": (adamw, {"dense_values": "fp16"}),
}
ON_NODES: dict[str, tuple[Any, dict[str, Any]]] = {  # without sums of four ranks, whose order Horovod's fusion changes
    "nodes": (momentum_sgd, {"exchange": "hierarchical"}),
    "nodes, clipped": (momentum_sgd, {"exchange": "hierarchical", "clip_norm": 0.5}),
}


def same_weights() -> dict[str, dict[str, str]]:
    """Weights after some steps, by run and speed."""
    return _trained(RUNS)


def on_nodes() -> dict[str, dict[str, str]]:
    """As `same_weights`, on nodes of several workers."""
    return _trained(ON_NODES)


def _trained(runs: dict[str, tuple[Any, dict[str, Any]]]) -> dict[str, dict[str, str]]:
    hvd.init()
    found: dict[str, dict[str, str]] = {name: {} for name in runs}
    for name, (make, fields) in runs.items():
        for speed in SPEEDS:
            model = smooth_model()
            optimizer = DistributedOptimizer(make(model), model.named_parameters(), Compression.dgc(**FIELDS, **fields))
            with ready(speed, hvd.rank()):
                train(model, optimizer, 6)
            found[name][speed] = fingerprint(model)
    return found


def after_backward() -> dict[str, list[bool]]:
    """Whether messages were under way in the last hook, and after the backward pass; by number of passes a step."""
    hvd.init()
    return {str(passes): _seen(passes) for passes in (1, 2)}


def _seen(passes: int) -> list[bool]:
    model = smooth_model()
    optimizer = DistributedOptimizer(
        momentum_sgd(model), model.named_parameters(), Compression.dgc(**FIELDS), backward_passes_per_step=passes
    )
    exchange, in_hook, data = session(optimizer).exchange, [False], iter(batches(3 * passes, hvd.rank()))
    next(model.parameters()).register_post_accumulate_grad_hook(lambda p: in_hook.append(exchange.is_compressing))
    with ready("never", hvd.rank()):
        for _ in range(3):  # in the first everything is sent after the last gradient
            optimizer.zero_grad()
            for _ in range(passes):
                x, y = next(data)
                F.mse_loss(model(x), y).backward()
            after = exchange.is_compressing
            optimizer.step()
    return [in_hook[-1], after]
