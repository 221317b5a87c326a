"""The strategy of ``Compression.local``: H steps on each rank alone, then an exchange of what they have changed.

The change of the weights takes the place of a gradient (SparseLoCo, arXiv 2508.15706): buckets, selection, codecs,
exchanges and checks are those of every step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dgc_horovod import at_end
from dgc_horovod.config import DGCConfig
from dgc_horovod.config_check import shared_from
from dgc_horovod.errors import UnsupportedUse, shown
from dgc_horovod.notices import WEIGHTS_SET, clips_alone, leave_out, of_skipped, stop_if_skipped
from dgc_horovod.torch.clipping import calls as clip_calls
from dgc_horovod.torch.clipping.local import Clip
from dgc_horovod.torch.gradients.collectives import all_finite, not_finite_of
from dgc_horovod.torch.gradients.exchange import GradientExchange, Parameter
from dgc_horovod.torch.optimizer_state import clean, copied, unscale
from dgc_horovod.torch.session.records import Result
from dgc_horovod.torch.session.strategies import Strategy

_OUTER = "outer_momentum"  # in a state


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
        return self.exchange.counts.pending

    @count.setter
    def count(self, count: int) -> None:
        self.exchange.counts.pending = count

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
        self.exchange.counts.steps_alone += 1
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
                self.exchange.fade(self.exchange.names[p], 0.0)
        self.exchange.begin_step({}, {})  # with no weight decay: the inner optimizer has applied it
        for p in reversed(self._anchor):
            self._results[p] = self.exchange.take(p)
        return untouched

    @torch.no_grad()
    def receive(self) -> bool:
        """Wait for it, and let the weights be the same on every rank; returns whether every change was finite.

        If one was not, the weights are those before the round, on every rank, and what was finite waits in `e`.
        """
        for p, result in self._results.items():
            p.grad = result()
        finite = self.exchange.finish()
        self.exchange.counts.steps_alone -= 1  # one of the round's is counted with the exchange itself
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


class LocalSteps(Strategy):
    """See `LocalRounds` for what a round is.

    A learning-rate schedule counts inner steps, accumulated backward passes are one of them, and a step that a
    GradScaler skips counts: so every rank's round is full after as many steps of the script. Buffers of the model
    (batch norm) are each rank's own.
    """

    takes_gradients = False
    scales_itself = True  # GradScaler then calls step() whether it skips or not, and leaves scale and verdict there
    rounds: LocalRounds

    def built(self) -> None:
        """See `Strategy`; the round under way goes on."""
        session = self.session
        if not hasattr(self, "rounds"):
            self.rounds = LocalRounds(session.exchange, session.config)
        self.rounds.go_on_in(session.exchange)
        at_end.watch(session.exchange.collectives.rank, session.config)

    def hand_over(self, p: torch.Tensor) -> Result:
        """No gradient is exchanged."""
        raise AssertionError("a gradient was handed over between local steps")

    def synchronize(self) -> None:
        """Nothing: each rank's gradients are its own."""

    def clear_gradients(self) -> None:
        """Nothing: see `synchronize`."""

    # -- one step

    def step(self) -> bool:
        """A step of the user's optimizer on this rank alone; after the H-th, the exchange."""
        session = self.session
        session.check_not_superseded()
        if not self.rounds.begin_step():
            session.tell_once("weights set", WEIGHTS_SET)
        is_made = self._may_step(session.optimizer)
        if is_made:
            session.with_hooks(session.own_step)
        clip_calls.end_step(session)  # it was the gradient's own
        if self.rounds.end_step():
            self.exchange()
        return is_made

    def _may_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a GradScaler lets the step be, and gradients are finite; they are unscaled then.

        Weights that are not finite would spoil what the model computes until the round is undone, and a running
        statistic for ever. Costs a read of every gradient.
        """
        allowed = unscale(optimizer)
        if allowed is None and self.session.config.on_nonfinite == "skip":
            grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if not all_finite(grad._values() if grad.is_sparse else grad for grad in grads):
                exchange = self.session.exchange
                leave_out(exchange.counts, exchange.collectives.rank, not_finite_of(exchange.names))
                return False
        return allowed is not False

    def exchange(self) -> None:
        """Exchange what the weights have changed by since the last time; every rank must call it, between two steps."""
        session = self.session
        session.groups.check_nothing_unfrozen(session.exchange.names)
        session.carrier.check_ranks(session)
        if not self.rounds.send():
            session.tell_once("weights set", WEIGHTS_SET)
        self.end_exchange()

    def end_exchange(self) -> None:
        """Wait for the exchange that `LocalRounds.send` has begun."""
        session, exchange, finite = self.session, self.session.exchange, self.rounds.receive()
        if not exchange.ranks_in_join:  # which exchange nothing else
            session.replicas.begin(exchange.steps)
            session.replicas.end(session)  # now, as the next step makes them differ
        if not finite:
            clean(session.optimizer.state)
            stop_if_skipped(exchange)
            session.tell_once(*of_skipped(exchange))

    # -- rounds

    @property
    def apart(self) -> bool:
        """See `Strategy`."""
        return self.rounds.count > 0

    def conclude(self) -> None:
        """See `Strategy`."""
        if self.apart:
            self.exchange()

    def before_flush(self) -> None:
        """The round under way is exchanged first."""
        self.conclude()

    def end_for_another(self) -> None:
        """See `Strategy`."""
        if not self.session.carrier.elastic:  # each rank would begin anew with weights of its own
            self.session.carrier.check_ranks(self.session)
            self.rounds.send()
            self.end_exchange()

    def forget(self) -> None:
        """See `Strategy`."""
        self.rounds.forget()

    def weights_set(self, sent: Sequence[Any]) -> None:
        """See `Strategy`."""
        if self.apart:
            self.rounds.restart_of([x for x in sent if isinstance(x, torch.Tensor)])

    def clear_residuals(self) -> None:
        """Empty `e` and outer momentum, and begin a round with the weights that a script has set."""
        self.session.exchange.clear()
        self.rounds.go_back()
        self.rounds.momentum.clear()

    # -- under Horovod Elastic

    def remembered(self) -> Round:
        """See `Strategy`: the anchor and the place in the round, within which this rank's weights are its own."""
        return self.rounds.copied()

    def go_back(self, to: Round) -> None:
        """See `Strategy`; an exchange under way does not touch the weights any more."""
        self.rounds.go_back(to)

    def meet(self, share: Callable[[], None]) -> None:
        """See `Strategy`; a round begins with the weights of rank 0, whose outer momentum is shared as well.

        What the others have changed since their last exchange is lost, so that a commit right after an exchange is the
        one that loses nothing. `e` and the inner optimizer stay with each rank; a newcomer takes over that of rank 0.
        """
        session, own = self.session, {}
        states = session.optimizer.state
        if self.rounds.count or session.exchange.steps:
            own = {p: copied(states[p]) for p in session.exchange.names if p in states}
        self.rounds.go_back()
        session.loaded = True  # so that the outer momentum is shared
        share()
        for p, entries in own.items():
            states[p].update(entries)

    # -- outer momentum

    def outer(self) -> list[torch.Tensor]:
        """See `Strategy`."""
        return [self.rounds.outer(p) for p in self.session.exchange.names] if self.session.config.outer_momentum else []

    def share_loaded(self, root: int) -> None:
        """See `Strategy`."""
        collectives = self.session.exchange.collectives
        if shared_from(collectives, b"some" if self.rounds.momentum else b"none", "outer.there", root) == b"none":
            self.rounds.momentum.clear()
            return
        for name, p in self.session.parameters.items():
            momentum = self.rounds.outer(p)
            momentum.copy_(collectives.wait(collectives.broadcast(momentum.clone(), f"outer.{name}", root)))

    def extend(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """See `Strategy`."""
        if self.session.config.outer_momentum:
            names = self.session.exchange.names
            state_dict[_OUTER] = {names[p]: x for p, x in self.rounds.momentum.items()}
        return state_dict

    def split(self, state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """See `Strategy`."""
        outer: Any = state_dict.get(_OUTER, {}) if self.session.config.outer_momentum else {}
        if not isinstance(outer, dict) or not all(isinstance(x, torch.Tensor) for x in outer.values()):
            raise UnsupportedUse(f"{_OUTER} in the optimizer's state must be tensors by name, got {shown(outer)}")
        of_name = self.session.parameters
        others = [name for name, x in outer.items() if name not in of_name or x.shape != of_name[name].shape]
        if others:
            raise UnsupportedUse(
                f"the outer momentum of {others[0]!r} is of no parameter here: pass the same named_parameters as when "
                "it was saved"
            )
        return {key: x for key, x in state_dict.items() if key != _OUTER}, outer

    def load(self, added: dict[str, torch.Tensor]) -> None:
        """See `Strategy`; the round under way goes on."""
        if not self.apart:  # a step that has raised an error may have begun a round
            self.rounds.go_back()
        for name, x in added.items():
            p = self.session.parameters[name]
            self.rounds.momentum[p] = self.rounds.held(x.to(p))

    def sees_clip(self, clip: Clip, known: bool) -> None:
        """It is each rank's own affair here, but not at the limit of dense training."""
        if known:
            told = clips_alone("the script", clip.limit, self.session.exchange.collectives.workers)
            self.session.tell_once("clipping", told)
