"""Momentum and moments of a tensor, between a torch optimizer's state and what this rank's engine keeps of it."""

from __future__ import annotations

import torch

from dgc_horovod.torch.gradients.exchange import GradientExchange, Parameter


def add_momentum(exchange: GradientExchange, p: Parameter, momentum: torch.Tensor) -> None:
    """Add to what this rank keeps of u of `p`."""
    if exchange.names[p] in exchange.buckets.place:
        engine, i = exchange.buckets.place[exchange.names[p]]
        segment = engine.bucket.segments[i]
        engine.state.add_momentum(i, _kept(momentum, segment.offset, segment.numel).cpu().numpy())


def add_residual(exchange: GradientExchange, p: Parameter, residual: torch.Tensor) -> None:
    """Add to what this rank keeps of v of `p`."""
    if exchange.names[p] in exchange.buckets.place:
        engine, i = exchange.buckets.place[exchange.names[p]]
        segment = engine.bucket.segments[i]
        ours = torch.as_tensor(engine.state.v[segment.place])
        ours.add_(_kept(residual, segment.offset, segment.numel).to(ours.device))


def is_begun(exchange: GradientExchange, p: Parameter) -> bool:
    """Whether what the engine keeps of `p`, if it does, is of directions by the second moment of all ranks."""
    if exchange.names[p] not in exchange.buckets.place:
        return False
    engine, i = exchange.buckets.place[exchange.names[p]]
    return i in engine.state.begun


def load(
    exchange: GradientExchange, p: Parameter, first: torch.Tensor | None = None, second: torch.Tensor | None = None
) -> None:
    """Let what this rank keeps of the moments of `p` be these, of its shape; None leaves one as it is."""
    for number, moment in enumerate((first, second)):
        if moment is not None and exchange.names[p] in exchange.buckets.place:
            engine, i = exchange.buckets.place[exchange.names[p]]
            segment = engine.bucket.segments[i]
            ours = torch.as_tensor(engine.state.adam_moments()[number][segment.place])
            ours.copy_(_kept(moment, segment.offset, segment.numel))


def has_shared(exchange: GradientExchange, p: Parameter) -> bool:
    """Whether the second moment that the engine has of `p`, if it keeps anything of it, is the ranks' common one."""
    if exchange.names[p] not in exchange.buckets.place:
        return True
    engine, i = exchange.buckets.place[exchange.names[p]]
    return i in engine.state.shared


def share_second(exchange: GradientExchange, p: Parameter, second: torch.Tensor) -> None:
    """Let the second moment of `p` be that of all ranks, which have divided it by its ``1-b2**step`` already."""
    load(exchange, p, second=second)
    if exchange.names[p] in exchange.buckets.place:
        engine, i = exchange.buckets.place[exchange.names[p]]
        engine.state.shared.add(i)


def begin(exchange: GradientExchange, p: Parameter, first: torch.Tensor | None, root: torch.Tensor) -> None:
    """Take over the first moment of dense steps; the residual of `p`, so far of gradients, is divided by `root`."""
    load(exchange, p, first=first)
    if exchange.names[p] in exchange.buckets.place:
        engine, i = exchange.buckets.place[exchange.names[p]]
        engine.state.begun.add(i)
        segment = engine.bucket.segments[i]
        torch.as_tensor(engine.state.v[segment.place]).div_(_kept(root, segment.offset, segment.numel))


def _kept(whole: torch.Tensor, offset: int, numel: int) -> torch.Tensor:
    return whole.detach().reshape(-1)[offset:][:numel].float()
