"""Other optimizers than SGD and AdamW: each by name, from parameters, learning rate and momentum."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn, optim


class Lion(optim.Optimizer):
    """Chen et al. 2023 (2302.06675, algorithm 2): the sign of a mean of gradients; torch has none.

    Args:
        params: parameters.
        lr: learning rate, which is the size of every element's step.
        betas: weight of the mean in the step, and decay of the mean.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            in_step, decay = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(torch.lerp(p.grad, mean, in_step).sign_(), alpha=group["lr"])
                mean.lerp_(p.grad, 1 - decay)


class MuonAndAdamW(optim.Optimizer):
    """torch's Muon for matrices, AdamW for vectors, with one learning rate: Muon's step is scaled to AdamW's size.

    Args:
        params: parameters.
        lr: learning rate of both.
        momentum: Muon's; AdamW's beta1.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float) -> None:
        of: dict[bool, list[Tensor]] = {True: [], False: []}
        for p in params:
            of[p.ndim == 2].append(p)
        settings = {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
        self._both = (optim.Muon(of[True], **settings), optim.AdamW(of[False], lr=lr, betas=(momentum, 0.99)))
        super().__init__([{"params": of[True]}, {"params": of[False]}], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of both, at the learning rate of now."""
        for mine, theirs in zip(self.param_groups, self._both, strict=True):
            theirs.param_groups[0]["lr"] = mine["lr"]
            theirs.step()


def _rmsprop(params: Iterable[nn.Parameter], lr: float, momentum: float) -> optim.Optimizer:
    return optim.RMSprop(params, lr=lr, momentum=momentum)


def _adafactor(params: Iterable[nn.Parameter], lr: float, momentum: float) -> optim.Optimizer:
    if momentum:
        raise ValueError(f"torch's Adafactor has no momentum, got {momentum}; pass 0")
    return optim.Adafactor(params, lr=lr, weight_decay=0.0)


def _lion(params: Iterable[nn.Parameter], lr: float, momentum: float) -> optim.Optimizer:
    return Lion(params, lr, (momentum, 0.99))


OTHERS: dict[str, Callable[[Iterable[nn.Parameter], float, float], optim.Optimizer]] = {
    "lion": _lion,
    "rmsprop": _rmsprop,
    "adafactor": _adafactor,
    "muon": MuonAndAdamW,
}
