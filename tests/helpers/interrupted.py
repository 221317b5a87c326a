"""Runs on real ranks of Horovod that stop in the middle and go on from what was saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
from torch import nn

from dgc_horovod.testing.torch import kept_by
from tests.helpers.regression import step as step_on
from tests.helpers.run import STEPS
from tests.helpers.training import batches, made, smooth_model

__all__ = ["handed_over", "kept_as_text", "made", "train_between"]


def train_between(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    """The steps from `first` to before `last` of a run."""
    for step, (x, y) in enumerate(list(batches(last, hvd.rank()))[first:], first):
        for group in optimizer.param_groups if "betas" in optimizer.defaults else ():
            group["lr"] = 0.003 * min(1.0, (step + 1) / STEPS)  # a warm-up, in which residuals fade
        step_on(model, optimizer, x, y)


def kept_as_text(optimizer: Any) -> str:
    """All bits that a rank has kept."""
    return str({n: {part: x.tobytes() for part, x in a.items()} for n, a in kept_by(optimizer).tensors.items()})


def handed_over(model: nn.Module, optimizer: Any, wrap: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
    """Another model and its optimizer, made by `wrap`, with all that these have: as after a restart."""
    other = smooth_model(1)
    other.load_state_dict(model.state_dict())
    successor = wrap(other)
    successor.load_state_dict(optimizer.state_dict())
    successor.load_residual_state_dict(optimizer.residual_state_dict())
    return other, successor
