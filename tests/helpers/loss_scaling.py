"""Scripts that scale some of their losses, beside the framework's own exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.regression import batches, distance, smooth_model, weights

# A letter a step: A, B: of the first or second model, scaled; a, b: not scaled; 2: one scaled loss of both; 3: a loss
# of each, both scaled before the first is stepped. +: a new model and optimizer in place of the first.
SCRIPTS = {
    "always": "AAAAAA",
    "switched off": "AAAaaaa",
    "off and on": "AAaaAAaa",
    "switched on": "aaAAAA",
    "a new optimizer without": "AAA+aaaa",
    "one of two": "AbAbAbAb",
    "one of two, the other first": "bAbAbA",
    "two": "ABABAB",
    "one loss of two": "2222",
    "scaled ahead": "3333",
}
Wrap = Callable[[nn.Module, bool], tuple[nn.Module, Any]]  # a model, whether by the framework alone


def found_in_scripts(wrap: Wrap, rank: int) -> dict[str, list[float]]:
    """By script: distance of the weights from those of the framework alone, and from those of the beginning."""
    before = torch.cat([weights(smooth_model(2)), weights(smooth_model(1))])
    found = {}
    for name, script in SCRIPTS.items():
        stock, ours = (_trained(script, lambda model, alone=alone: wrap(model, alone), rank) for alone in (True, False))
        found[name] = [distance(stock, ours), distance(before, ours)]
    return found


def _trained(script: str, wrap: Callable[[nn.Module], tuple[nn.Module, Any]], rank: int) -> torch.Tensor:
    models = {"a": smooth_model(0 if "+" in script else 2), "b": smooth_model(1)}
    made = {name: wrap(model) for name, model in models.items()}
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    for letter, (x, y) in zip(script, batches(len(script), rank), strict=True):
        if letter == "+":
            models["a"] = smooth_model(2)
            made["a"] = wrap(models["a"])
            continue
        used = [made[name] for name in ("ab" if letter in "23" else letter.lower())]
        for _, optimizer in used:
            optimizer.zero_grad()
        losses = [F.mse_loss(model(x), y) for model, _ in used]
        if letter == "3":
            for (model, optimizer), loss in zip(used, [scaler.scale(loss) for loss in losses], strict=True):
                loss.backward()
                _step(model, optimizer, scaler)
            scaler.update()
            continue
        loss = sum(losses)
        if letter.islower():
            loss.backward()
            used[0][1].step()
            continue
        scaler.scale(loss).backward()
        for model, optimizer in used:
            _step(model, optimizer, scaler)
        scaler.update()
    return torch.cat([weights(model) for model in models.values()])


def _step(model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler) -> None:
    if isinstance(model, DistributedDataParallel):
        scaler.step(optimizer)
        return
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
