"""How the arithmetic of SGD is split."""

from __future__ import annotations

import functools
from typing import Any

import torch

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.kernels.contract import Accumulation, MomentumCorrection
from dgc_horovod.notices import refusal
from dgc_horovod.state.residual_state import MOMENTUM, RESIDUAL
from dgc_horovod.torch.gradients import moments
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.updates.base import Group, Left, Parameter, SplitUpdate, States

_momentum_feed = functools.lru_cache(maxsize=16)(MomentumCorrection)  # one for all tensors of a group


class SGDUpdate(SplitUpdate):
    """SGD: the engine's u carries the local gradient, ``momentum_buffer`` b what is the same on every rank.

    ``b = m*b + wd*w;  w -= lr*(b + mean(s))``, with Nesterov ``w -= lr*(wd*w + m*b + mean(s))``. By
    linearity u and b together are the stock buffer, so a stock checkpoint's buffer loads into b exactly.
    """

    def adopt_state(self, p: Parameter, group: Group, states: States, exchange: GradientExchange) -> None:
        """Lets go of the zeros of `prepare` before u takes up memory: without decay b would stay zero."""
        if not self._was_placeholder(p, states, exchange):
            return
        state = states[p]
        buffer = state.get("momentum_buffer")
        if not group["weight_decay"] and buffer is not None and not buffer.any():
            del state["momentum_buffer"]  # not None, which scripts that look for the key would take for a tensor

    @torch.no_grad()
    def end_dense_steps(self, optimizer: torch.optim.Optimizer, exchange: GradientExchange) -> None:
        """b becomes every rank's u, as if that had been there from the start: b would cost passes of its own."""
        share = 1 if exchange.settings.averages else exchange.workers
        for group in optimizer.param_groups:
            sign = -1.0 if group["maximize"] else 1.0  # stock's buffer is of what is descended
            for p in group["params"]:
                buffer = optimizer.state[p].get("momentum_buffer") if p in exchange.sparse else None
                if buffer is not None:
                    moments.add_momentum(exchange, p, buffer * (sign / share))
                    del optimizer.state[p]["momentum_buffer"]

    def accumulation(self, p: Parameter, group: Group, exchange: GradientExchange) -> Accumulation:
        if group["momentum"] and group["dampening"]:
            raise UnsupportedUse(refusal("SGD's dampening", "dampening=0"))
        return _momentum_feed(float(group["momentum"]), bool(group["nesterov"]))

    def fading(self, group: Group) -> float:
        return float(group["momentum"])

    def apply(self, p: Parameter, update: torch.Tensor, group: Group, state: dict[str, Any]) -> None:
        lr = float(group["lr"])
        shared = self._shared_part(p, group, state)
        p.add_(update, alpha=lr if group["maximize"] else -lr)
        if shared is not None:
            p.add_(shared, alpha=-lr)

    def flush_one(self, p: Parameter, left: Left, group: Group, state: dict[str, Any], compressed: bool) -> None:
        """All of v is applied, and u joins the buffer: by linearity nothing is lost, and the buffer is stock's.

        Of an uncompressed tensor v is a gradient, whose momentum is still to come.
        """
        sign = -1.0 if group["maximize"] else 1.0  # stock's buffer is of what is descended
        lr, m, v = float(group["lr"]), float(group["momentum"]), sign * left[RESIDUAL].to(p.dtype)
        later = sign * left[MOMENTUM].to(p.dtype) if compressed and MOMENTUM in left else None if compressed else v
        if m and later is not None:
            buffer = state.get("momentum_buffer")
            state["momentum_buffer"] = later.clone() if buffer is None else buffer.add_(later)
        ahead = 1 + m if group["nesterov"] and not compressed else 1.0
        p.add_(v, alpha=-ahead * lr)

    def _shared_part(self, p: Parameter, group: Group, state: dict[str, Any]) -> torch.Tensor | None:
        """What stock SGD would apply for a zero gradient: decay and its momentum. Advances b."""
        m, decay = float(group["momentum"]), float(group["weight_decay"])
        buffer = state.get("momentum_buffer") if m else None
        if decay and m and buffer is None:
            buffer = state["momentum_buffer"] = torch.zeros_like(p)
        pull = p * decay if decay else None
        if buffer is None:
            return pull
        buffer.mul_(m)
        if pull is not None:
            buffer.add_(pull)
        if not group["nesterov"]:
            return buffer
        ahead = buffer * m
        return ahead if pull is None else ahead.add_(pull)
