"""Steps that reach an optimizer in other ways than by its own ``step``."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.torch.wrapping.notices import STEPPED_INSIDE


def watch_inside(outer: Any) -> None:
    """From now on an optimizer inside `outer`, as a wrapper has one, may step within the ``step`` of `outer` alone.

    Wrappers with other methods (SAM's ``second_step``) would leave out everything that our ``step`` does.
    """
    own = {p for group in outer.param_groups for p in group["params"]}
    for name, inner in vars(outer).items():
        if isinstance(inner, torch.optim.Optimizer) and inner is not outer:
            if not own.isdisjoint(p for group in inner.param_groups for p in group["params"]):
                inner.register_step_pre_hook(partial(_only_within, weakref.ref(outer), name))


def _only_within(reference: Any, name: str, inner: torch.optim.Optimizer, *_: Any) -> None:
    outer = reference()
    if outer is not None and not (outer._dgc_superseded or outer._dgc_steps):
        raise UnsupportedUse(STEPPED_INSIDE.format(outer=type(outer).__name__, inner=type(inner).__name__, name=name))


def other_methods(optimizer: torch.optim.Optimizer) -> list[str]:
    """Methods that the user's class has and torch's optimizers have not, one of which may step."""
    own, known = type(optimizer).__mro__[1], {*dir(torch.optim.Optimizer), "train", "eval"}  # weights of two kinds
    names = [name for name in dir(own) if not name.startswith("_") and name not in known]
    return [f"{name}()" for name in names if callable(getattr(own, name))]
