"""Which split of its arithmetic fits a user's optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from dgc_horovod.config import DGCConfig
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.notices import no_momentum, of_other, refusal
from dgc_horovod.torch.updates.adam import AdamUpdate
from dgc_horovod.torch.updates.base import Group, PlainUpdate
from dgc_horovod.torch.updates.sgd import SGDUpdate


def choose_update(optimizer: torch.optim.Optimizer, config: DGCConfig) -> PlainUpdate:
    """The split that fits `optimizer`; plain error feedback where momentum correction has no form.

    Raises:
        UnsupportedUse: an option of the optimizer that the split would get wrong.
    """
    kind, notices = kind_of(optimizer), []
    if kind != "sgd" and config.momentum_dtype != "fp32":
        notices.append(no_momentum(type(optimizer)))
    if kind == "other":
        notices += of_other(type(optimizer), config.momentum_correction)
    update = _split_of(optimizer, kind, config)
    update.notices += notices
    return update


def _split_of(optimizer: torch.optim.Optimizer, kind: str, config: DGCConfig) -> PlainUpdate:
    if not config.momentum_correction or kind == "other":
        return PlainUpdate(kind)
    if kind == "sgd":
        _refuse(optimizer, lambda g: g["momentum"] and g["dampening"], "SGD's dampening", "dampening=0")
        return SGDUpdate(kind)
    update = AdamUpdate(isinstance(optimizer, torch.optim.AdamW))
    _refuse(optimizer, lambda g: g["amsgrad"], "Adam's amsgrad", "amsgrad=False")
    _refuse(
        optimizer,
        lambda g: g["maximize"] and g["weight_decay"] and not update._decoupled(g),
        "Adam's maximize together with coupled weight decay",
        "AdamW",
    )
    return update


def _refuse(optimizer: torch.optim.Optimizer, bad: Callable[[Group], Any], what: str, instead: str) -> None:
    if any(bad(group) for group in optimizer.param_groups):
        raise UnsupportedUse(refusal(what, instead))


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Whose arithmetic `optimizer`, not yet wrapped, has: a subclass that overrides step() is "other"."""
    for stock, kind in ((torch.optim.SGD, "sgd"), (torch.optim.AdamW, "adam"), (torch.optim.Adam, "adam")):
        if isinstance(optimizer, stock) and inspect.unwrap(type(optimizer).step) is inspect.unwrap(stock.step):
            return kind
    return "other"
