"""An optimizer that goes back to the state of its beginning, and clips where nothing is compressed."""

from __future__ import annotations

import copy
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from dgc_horovod.planning.trial import COMPRESSED
from dgc_horovod.testing.torch import session, take
from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.training import distance, fingerprint, smooth_model, train, weights
from tests.parallel.cases.auto import OPTIMIZERS, made, stock


def adam_from_its_beginning() -> dict[str, Any]:
    """A state that has made no step: what was known of Adam's second moment went with the weights."""
    hvd.init()
    model = smooth_model()
    optimizer = DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.003),
        named_parameters=model.named_parameters(),
        compression=Compression.dgc(0.05, min_numel=16),
    )
    begin, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 26)
    model.load_state_dict(begin)
    optimizer.load_state_dict(state)
    known, losses = session(optimizer).exchange.second.known, train(model, optimizer, 60)
    return {"known": known, "is": fingerprint(model), "learns": sum(losses[-5:]) < sum(losses[:5])}


def auto_from_its_beginning() -> dict[str, Any]:
    """AdamW under ``auto``, compressed: a state that has made no step goes on compressed."""
    model, optimizer = made(OPTIMIZERS["AdamW"])
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 4)
    take(optimizer, COMPRESSED)
    train(model, optimizer, 4)
    optimizer.load_state_dict(state)
    mode = session(optimizer).choice.trial.mode
    train(model, optimizer, 4)
    return {"compressed": mode == COMPRESSED, "is": fingerprint(model)}


def _damped(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.1)


def limit_without_compression() -> dict[str, Any]:
    """``auto`` that cannot compress an optimizer clips the averages all the same."""
    model, optimizer = made(_damped, mode=None, clip_norm=0.5)
    train(model, optimizer, 24)
    return {
        "compresses": hasattr(optimizer, "compression_stats"),
        "distance": distance(weights(model), weights(stock(_damped, clip=0.5))),
        "unclipped": distance(weights(model), weights(stock(_damped))),
    }
