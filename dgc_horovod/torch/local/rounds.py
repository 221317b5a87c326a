"""H inner steps without exchange, then one of what they have changed in the weights (SparseLoCo, arXiv 2508.15706).

The change takes the place of a gradient: buckets, selection, codecs, exchanges and checks are those of every step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from dgc_horovod.config import DGCConfig
from dgc_horovod.kernels.contract import Accumulation, ErrorFeedback
from dgc_horovod.torch.gradients.exchange import GradientExchange, Parameter

_CHANGE: tuple[Accumulation, float] = ErrorFeedback(), 0.0  # with no weight decay: the inner optimizer has applied it


@dataclass(frozen=True)
class Round:
    """A round under way on one rank, but for the weights that it has come to.

    Args:
        count: number of inner steps since the last exchange, >= 0.
        anchor: weights of the last exchange, by parameter; empty if none has been made.
    """

    count: int
    anchor: dict[Parameter, torch.Tensor]


class LocalRounds:
    """The rounds of one rank.

    ``delta = anchor - w;  e = decay*e + delta;  s = select(e);  e = e - decoded(s);  w = anchor - rate * mean(s)``,
    with outer momentum ``b = m*b + mean(s)`` and ``mean(s) + m*b`` in its place (Nesterov).

    Args:
        exchange: exchange of the parameters; `e` is its residual. Another one takes its place when the ranks change.
        config: compression settings; ``local_steps``, ``local_decay``, ``outer_rate``, ``outer_momentum`` and
            ``offload`` are used.

    Attributes:
        momentum: outer momentum b, by parameter, the same on every rank; empty before the first exchange or without.

    Memory: the anchor, 4 bytes a parameter (its own dtype), and 4 more with outer momentum; as much as the gradients
    again during an exchange.
    """

    def __init__(self, exchange: GradientExchange, config: DGCConfig) -> None:
        assert config.local_steps is not None
        self.exchange, self._config, self._steps = exchange, config, config.local_steps
        self.count = 0
        self.momentum: dict[Parameter, torch.Tensor] = {}
        self._anchor: dict[Parameter, torch.Tensor] = {}
        self._versions: dict[Parameter, int] = {}  # torch's counts of writes, after the last inner step
        self._held: dict[Parameter, torch.Tensor | None] = {}  # gradients, while changes are in their places
        self._results: dict[Parameter, Callable[[], torch.Tensor]] = {}

    @property
    def count(self) -> int:
        """Number of inner steps since the last exchange; the summary of a job is told of them, too."""
        return self.exchange.buckets.counts.pending

    @count.setter
    def count(self, count: int) -> None:
        self.exchange.buckets.counts.pending = count

    def held(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of `x`, of a parameter's shape, where the rounds keep theirs: with ``offload`` in host memory."""
        if not self._config.offload:
            return x.clone()
        return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x)

    @torch.no_grad()
    def begin_step(self) -> bool:
        """An inner step comes; before the first of a round the weights, the same on every rank, are remembered.

        Returns:
            Whether the weights are those that the last step of this round has left: not others, which a script has set.
        """
        if not self._anchor:
            self._anchor = {p: self.held(p.detach()) for p in self.exchange.names}
        return all(p._version == version for p, version in self._versions.items())

    def end_step(self) -> bool:
        """An inner step is made, or skipped; returns whether the round is full."""
        self.count += 1
        self.exchange.buckets.counts.steps_alone += 1
        self._versions = {p: p._version for p in self._anchor}
        return self.count >= self._steps

    @torch.no_grad()
    def restart_of(self, sent: Collection[torch.Tensor]) -> None:
        """All ranks have the same values in `sent`, of which some may be parameters: those begin a round with them.

        The others go on with theirs. There is no outer momentum of what was set.
        """
        places = {(x.data_ptr(), x.numel()) for x in sent}
        for p in [p for p in self._anchor if (p.data_ptr(), p.numel()) in places]:
            self._anchor[p] = self.held(p.detach())
            self._versions[p] = p._version
            self.momentum.pop(p, None)

    def go_on_in(self, exchange: GradientExchange) -> None:
        """From now on `exchange` is that of the parameters; the round under way goes on."""
        count, self.count = self.count, 0
        self.exchange, self.count = exchange, count

    @torch.no_grad()
    def send(self) -> bool:
        """Start the exchange of this rank's changes; returns what `begin_step` does."""
        untouched = self.begin_step()  # which remembers the weights where no step was made
        self.exchange.decay(self._config.local_decay)
        self._held = {p: p.grad for p in self._anchor}
        for p, anchor in self._anchor.items():
            p.grad = anchor.to(p.device) - p
            if not p.requires_grad and not p.grad.any():  # frozen: nothing is to move it any more
                self.exchange.fade(p, 0.0)
        for p in reversed(self._anchor):
            self._results[p] = self.exchange.add_gradient(p, lambda _: _CHANGE)
        return untouched

    @torch.no_grad()
    def receive(self) -> bool:
        """Wait for it, and let the weights be the same on every rank; returns whether every change was finite.

        If one was not, the weights are those before the round, on every rank, and what was finite waits in `e`.
        """
        for p, result in self._results.items():
            p.grad = result()
        finite = self.exchange.finish()
        self.exchange.buckets.counts.steps_alone -= 1  # one of the round's is counted with the exchange itself
        for p, anchor in self._anchor.items():
            if finite:
                assert p.grad is not None
                # two operations: a fused one rounds otherwise on other processors, and replicas would differ
                p.copy_(anchor.sub_(self._step_of(p, p.grad.to(anchor.device)).mul(self._config.outer_rate)))
            else:
                p.copy_(anchor)
        self._end()
        return finite

    def _step_of(self, p: Parameter, mean: torch.Tensor) -> torch.Tensor:
        m = self._config.outer_momentum
        if not m:
            return mean
        return self.outer(p).mul_(m).add_(mean).mul(m).add_(mean)

    def outer(self, p: Parameter) -> torch.Tensor:
        """Outer momentum of `p`, zeros to begin with."""
        if p not in self.momentum:
            self.momentum[p] = self.held(torch.zeros_like(p))
        return self.momentum[p]

    @torch.no_grad()
    def forget(self) -> None:
        """There is no momentum any more; an exchange that was broken off is undone."""
        if self._held:
            for p, anchor in self._anchor.items():
                p.copy_(anchor)
            self._end()
        self.momentum.clear()

    def copied(self) -> Round:
        """A copy of the round under way, between two steps.

        Memory: 4 bytes a parameter, none right after an exchange.
        """
        return Round(self.count, {p: anchor.clone() for p, anchor in self._anchor.items()})

    def go_back(self, to: Round | None = None) -> None:
        """Be in the round `to`, or before the first step of one, with the weights that there are.

        An exchange that was broken off is given up.
        """
        self._end()
        if to is not None:
            self.count, self._anchor = to.count, {p: anchor.clone() for p, anchor in to.anchor.items()}

    def _end(self) -> None:
        for p, grad in self._held.items():
            p.grad = grad
        self._held.clear()
        self._results.clear()
        self._anchor.clear()
        self._versions.clear()
        self.count = 0
