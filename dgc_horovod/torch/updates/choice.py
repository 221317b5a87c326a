"""Which split of its arithmetic fits a user's optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from dgc_horovod.config import FROZEN, DGCConfig
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.notices import refusal, tell_no_momentum, tell_no_second_moment, tell_plain
from dgc_horovod.torch.updates.adam import AdamUpdate, FrozenAdamUpdate
from dgc_horovod.torch.updates.base import Group, PlainUpdate
from dgc_horovod.torch.updates.sgd import SGDUpdate


def choose_update(optimizer: torch.optim.Optimizer, config: DGCConfig) -> PlainUpdate:
    """The split that fits `optimizer`; plain error feedback where momentum correction has no form.

    Raises:
        UnsupportedUse: an option of the optimizer that the split would get wrong.
    """
    kind = kind_of(optimizer)
    if kind != "adam" and (config.second_moment == FROZEN or config.until_settled is not None):
        tell_no_second_moment(type(optimizer).__name__)
    if kind != "sgd" and config.momentum_dtype != "fp32":
        tell_no_momentum(type(optimizer).__name__)
    if not config.momentum_correction:
        return PlainUpdate(kind)
    if kind == "sgd":
        _refuse(optimizer, lambda g: g["momentum"] and g["dampening"], "SGD's dampening", "dampening=0")
        return SGDUpdate(kind)
    if kind == "adam":
        form = FrozenAdamUpdate if config.freezes_second_moment else AdamUpdate
        update = form(isinstance(optimizer, torch.optim.AdamW))
        _refuse(optimizer, lambda g: g["amsgrad"], "Adam's amsgrad", "amsgrad=False")
        _refuse(
            optimizer,
            lambda g: g["maximize"] and g["weight_decay"] and not update._decoupled(g),
            "Adam's maximize together with coupled weight decay",
            "AdamW",
        )
        return update
    tell_plain(type(optimizer).__name__)
    return PlainUpdate(kind)


def _refuse(optimizer: torch.optim.Optimizer, bad: Callable[[Group], Any], what: str, instead: str) -> None:
    if any(bad(group) for group in optimizer.param_groups):
        raise UnsupportedUse(refusal(what, instead))


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Whose arithmetic `optimizer`, not yet wrapped, has: a subclass that overrides step() is "other"."""
    for stock, kind in ((torch.optim.SGD, "sgd"), (torch.optim.AdamW, "adam"), (torch.optim.Adam, "adam")):
        if isinstance(optimizer, stock) and inspect.unwrap(type(optimizer).step) is inspect.unwrap(stock.step):
            return kind
    return "other"
