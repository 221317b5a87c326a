"""Messages that a device has not made when the next gradient comes: the same bits, at whatever time they are there."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

from dgc_horovod.testing.torch import session
from tests.helpers.adapters import Adapter, Compression, on_adapters
from tests.helpers.late import SPEEDS, ready
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.regression import adamw, fingerprint, sgd, step

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
FIELDS: dict[str, Any] = {"density": 0.05, "min_numel": 16, "bucket_bytes": 1024}
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (sgd, {}),
    "clipped": (sgd, {"clip_norm": 0.5}),
    "small tensors dense": (sgd, {"dense_values": "fp32"}),
    "AdamW, small tensors dense": (adamw, {"dense_values": "fp16"}),
}
ON_NODES: dict[str, dict[str, Any]] = {
    "nodes": {},
    "clipped": {"clip_norm": 0.5},
    "dense": {"dense_values": "fp32"},
}


def _weights(adapter: Any, make: Any, fields: dict[str, Any]) -> str:
    """The same at each speed."""
    found = []
    for speed in SPEEDS:
        options = {"bucket_cap_mb": 0.002} if adapter.name == "DDP" else {}
        model, optimizer = adapter.made(Compression.dgc(**FIELDS, **fields), make, **options)
        with ready(speed, adapter.rank):
            for number, (x, y) in enumerate(adapter.batches(6)):
                # norms of all ranks are shared, among the other collectives
                clips = partial(clip_grad_norm_, model.parameters(), 0.1) if adapter.name == "DDP" else None
                step(model, optimizer, x, y, between=clips if number > 3 else None)
        found.append(fingerprint(model))
    assert len(set(found)) == 1
    same_on_ranks(found[0])
    return found[0]


@on_adapters("Horovod", "DDP", "without DDP")
def test_the_same_bits_at_each_speed(adapter):
    ends = [_weights(adapter, make, fields) for make, fields in RUNS.values()]
    assert len(set(ends)) == len(ends)


@pytest.mark.slow
@pytest.mark.on_ranks(4, nodes=2)
@pytest.mark.parametrize(
    ("adapter", "name"),
    [
        *((Adapter("without DDP"), name) for name in ON_NODES),
        *((Adapter("Horovod"), name) for name in ("nodes", "clipped")),  # its fusion changes the order of sums of four
    ],
)
def test_on_nodes(adapter, name):
    _weights(adapter, sgd, {"exchange": "hierarchical", **ON_NODES[name]})


@on_adapters("Horovod")
@pytest.mark.parametrize("passes", [1, 2])
def test_what_is_late_is_handed_on_at_the_end_of_the_backward_pass(adapter, passes):
    """Before the script goes on; by number of passes a step."""
    model, optimizer = adapter.made(Compression.dgc(**FIELDS), backward_passes_per_step=passes)
    exchange, in_hook, data = session(optimizer).exchange, [False], iter(adapter.batches(3 * passes))
    next(model.parameters()).register_post_accumulate_grad_hook(lambda p: in_hook.append(exchange.is_compressing))
    with ready("never", adapter.rank):
        for _ in range(3):  # in the first everything is sent after the last gradient
            optimizer.zero_grad()
            for _ in range(passes):
                x, y = next(data)
                F.mse_loss(model(x), y).backward()
            after = exchange.is_compressing
            optimizer.step()
    assert in_hook[-1] and not after
