"""Momentum of a tensor, between a torch optimizer's state and what this rank's engine keeps of it."""

from __future__ import annotations

import torch

from dgc_horovod.torch.gradients.exchange import GradientExchange, Parameter


def add_momentum(exchange: GradientExchange, p: Parameter, momentum: torch.Tensor) -> None:
    """Add to what this rank keeps of u of `p`."""
    if exchange.names[p] in exchange.place:
        engine, i = exchange.place[exchange.names[p]]
        segment = engine.bucket.segments[i]
        engine.state.add_momentum(i, _kept(momentum, segment.offset, segment.numel).cpu().numpy())


def add_residual(exchange: GradientExchange, p: Parameter, residual: torch.Tensor) -> None:
    """Add to what this rank keeps of v of `p`."""
    if exchange.names[p] in exchange.place:
        engine, i = exchange.place[exchange.names[p]]
        segment = engine.bucket.segments[i]
        ours = torch.as_tensor(engine.state.v[segment.place])
        ours.add_(_kept(residual, segment.offset, segment.numel).to(ours.device))


def _kept(whole: torch.Tensor, offset: int, numel: int) -> torch.Tensor:
    return whole.detach().reshape(-1)[offset:][:numel].float()
