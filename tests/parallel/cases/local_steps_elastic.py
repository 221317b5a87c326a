"""Local steps and Horovod's elastic state on real ranks: commits, restores and meetings, within a round too."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from torch import nn

from dgc_horovod.testing.torch import copied, session
from dgc_horovod.torch import elastic
from dgc_horovod.torch.session.session import session_of
from tests.helpers.errors import error_of
from tests.helpers.training import fingerprint, smooth_model, train, weights
from tests.parallel.cases.local_steps import H, wrapped
from tests.parallel.cases.local_steps_around import _spread

MAKE: dict[str, Any] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
}


def _made(name: str, **fields: Any) -> tuple[nn.Module, Any, Any]:
    """A model, its optimizer, and their state, which is Horovod's own class."""
    model = smooth_model()
    optimizer = wrapped(model, MAKE[name](model), outer_momentum=0.5, outer_rate=0.7, check_every=1, **fields)
    return model, optimizer, hvd.elastic.TorchState(model, optimizer, batch=0)


def _everything(model: nn.Module, optimizer: Any) -> list[Any]:
    """Checksums of weights, of the inner optimizer, and of what the rank has kept; after an exchange."""
    kept = optimizer.residual_state_dict()["tensors"]
    arrays = [x for name in sorted(kept) for part, x in sorted(kept[name].items())]
    state = optimizer.state_dict()
    inner = [float(x.double().sum()) for own in state["state"].values() for x in own.values()]
    return [fingerprint(model), inner, [float(x.double().sum()) for x in arrays], session(optimizer).exchange.steps]


def going_back() -> dict[str, Any]:
    """Commit, train, go back, train the same again: bit for bit, from within a round and right after an exchange."""
    hvd.init()
    found = {}
    for name in MAKE:
        for committed_at in (2 * H + 2, 2 * H):
            model, optimizer, state = _made(name)
            state.sync()
            train(model, optimizer, committed_at)
            state.commit()
            at_commit, runs, rest = fingerprint(model), [], 3 * H - committed_at % H
            for _ in range(3):  # what the second goes on with is not to be what the commit is remembered by
                train(model, optimizer, rest)
                runs.append(_everything(model, optimizer))
                state.restore()
            found[f"{name} {committed_at}"] = [runs[0] == runs[1] == runs[2], fingerprint(model) == at_commit]
    return found


def broken_off() -> dict[str, Any]:
    """An exchange that fails half-way: to go back is to be where the commit was, and the next exchange is sound.

    Its end had put the weights of the last exchange over those of the commit.
    """
    hvd.init()
    model, optimizer, state = _made("AdamW")
    state.sync()
    train(model, optimizer, H + 2)
    state.commit()
    before = fingerprint(model)
    failure = HorovodInternalError("a worker has left")
    with mock.patch.object(session(optimizer).exchange, "finish", side_effect=failure):
        failed = error_of(lambda: train(model, optimizer, 2 * H))
    state.restore()
    counts = session(optimizer).exchange.counts
    same, count = fingerprint(model) == before, counts.pending
    train(model, optimizer, H - 2)
    return {"failed": failed, "same": same, "count": count, "spread": _spread(model), "left": counts.pending}


def meeting() -> dict[str, Any]:
    """Ranks meet within a round: weights of rank 0, and what else is each rank's own stays."""
    hvd.init()
    os.environ["HOROVOD_ELASTIC"] = "1"
    found = {}
    try:
        for name in ("AdamW", "SGD"):
            model, optimizer, state = _made(name)
            state.sync()
            train(model, optimizer, 3 * H + 2)
            apart, first = _spread(model), hvd.broadcast(weights(model), 0)
            kept = _own(optimizer)
            state.sync()
            found[name] = {
                "apart": apart, "spread": _spread(model), "rank 0's": torch.equal(weights(model), first),
                "kept": _own(optimizer) == kept, "differ": len(set(hvd.allgather_object(repr(kept)))),
                "count": session(optimizer).exchange.counts.pending,
                "handed on": sorted({part for arrays in copied(optimizer).tensors.values() for part in arrays}),
            }  # fmt: skip
            train(model, optimizer, 2 * H)
            found[name]["then"] = _spread(model)
        return found
    finally:
        del os.environ["HOROVOD_ELASTIC"]


def _own(optimizer: Any) -> list[float]:
    """Sums of `e` and of the inner optimizer's state of this rank."""
    arrays = session(optimizer).exchange.residuals().tensors.values()
    inner = [x for p in session(optimizer).exchange.names for x in optimizer.state[p].values()]
    return [float(a["v"].sum()) for a in arrays] + [float(x.double().sum()) for x in inner]


def newcomer() -> dict[str, Any]:
    """Rank 1 has made no step yet: it takes over the inner optimizer and the outer momentum of rank 0."""
    hvd.init()
    found = {}
    for name in ("AdamW", "SGD"):
        model, optimizer, state = _made(name)
        rounds = session(optimizer).strategy.rounds
        if hvd.rank() == 0:
            train(model, optimizer, H - 2)  # which needs nobody
            rounds.momentum.update({p: torch.ones_like(p) for p in model.parameters()})
        own = _own(optimizer)
        state.sync()
        alike = [repr(_own(optimizer)), repr([float(x.sum()) for x in rounds.momentum.values()])]
        found[name] = {
            "alike": len(set(hvd.allgather_object(tuple(alike)))), "as before": _own(optimizer) == own,
            "momentum": all(bool((x == 1).all()) for x in rounds.momentum.values()),
        }  # fmt: skip
        train(model, optimizer, H)
        found[name]["then"] = _spread(model)
    return found


def renewed() -> dict[str, Any]:
    """The exchange is made anew within a round, as where a host has left and Horovod calls no sync."""
    hvd.init()
    ends = []
    for anew in (False, True):
        model, optimizer, state = _made("SGD")
        state.sync()
        train(model, optimizer, 2 * H + 2)
        if anew:
            found = session_of(optimizer)
            elastic.renew(found, found.kept.record(own=False))
        train(model, optimizer, 2 * H - 2)
        ends.append(_everything(model, optimizer))
    return {"same": ends[0] == ends[1]}


def flushed() -> dict[str, Any]:
    """A commit that flushes ends the round, also where no exchange was made since the last one."""
    hvd.init()
    model = smooth_model()
    optimizer = wrapped(model)
    state = elastic.TorchState(model, optimizer, flush_on_commit=True)
    state.sync()
    train(model, optimizer, H + 2)
    state.commit()
    left = [bool(a["v"].any()) for a in session(optimizer).exchange.residuals().tensors.values() if a["v"].size > 100]
    spread, before = _spread(model), fingerprint(model)
    state.commit()
    idle = fingerprint(model) == before
    train(model, optimizer, 2)
    state.commit()
    return {"left": any(left), "spread": spread, "idle": idle, "again": _spread(model)}
