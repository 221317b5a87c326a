"""The strategy of ``Compression.local``: H steps on each rank alone, then an exchange of the changes of weights.

The change of the weights replaces the gradient (SparseLoCo, arXiv 2508.15706); buckets, selection, codecs, exchanges
and checks are those of `EveryStep`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from dgc_horovod import at_end
from dgc_horovod.config import DGCConfig
from dgc_horovod.errors import UnsupportedUse, shown
from dgc_horovod.notices import WEIGHTS_SET, clips_alone, leave_out, of_skipped, stop_if_skipped
from dgc_horovod.torch.gradients.clipping import Clip
from dgc_horovod.torch.gradients.collectives import Parameter, all_finite, not_finite_of
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.optimizer_state import clean, copied, unscale
from dgc_horovod.torch.session.overrides import Overrides
from dgc_horovod.torch.session.session import Session
from dgc_horovod.torch.session.strategies import Strategy
from dgc_horovod.torch.wrapping import clip_calls

_OUTER = "outer_momentum"  # key in a state_dict


# A copy of the present round on one rank, without the weights: the number of inner steps since the last exchange, and
# the weights of the last exchange, by parameter, which are empty if none has been made
Round = tuple[int, dict[Parameter, torch.Tensor]]


class LocalRounds:
    """The rounds of one rank.

    ``delta = anchor - w;  e = decay*e + delta;  s = select(e);  e = e - decoded(s);  w = anchor - rate * mean(s)``,
    with outer momentum ``b = m*b + mean(s)`` and ``mean(s) + m*b`` in its place (Nesterov).

    Args:
        exchange: exchange of the parameters; `e` is its residual. It is replaced when the ranks change.
        config: compression settings; ``local_steps``, ``outer_rate``, ``outer_momentum`` and ``offload`` are used.

    Attributes:
        steps: H, the inner steps of a round.
        momentum: outer momentum b, by parameter, the same on every rank; empty before the first exchange or without.

    Memory: the anchor, 4 bytes a parameter (its own dtype), and 4 more with outer momentum; during an exchange as much
    as the gradients.
    """

    def __init__(self, exchange: GradientExchange, config: DGCConfig) -> None:
        assert config.local_steps is not None
        self.exchange, self._config, self.steps = exchange, config, config.local_steps
        self.momentum: dict[Parameter, torch.Tensor] = {}
        self._anchor: dict[Parameter, torch.Tensor] = {}
        self._versions: dict[Parameter, int] = {}  # torch's counts of writes, after the last inner step
        self._held: dict[Parameter, torch.Tensor | None] = {}  # gradients, while p.grad has changes of weights
        self._results: dict[Parameter, Callable[[], torch.Tensor]] = {}

    def held(self, x: torch.Tensor) -> torch.Tensor:
        """Copy `x`, of a parameter's shape, to the memory of the rounds: host memory with ``offload``."""
        if not self._config.offload:
            return x.clone()
        return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x)

    @torch.no_grad()
    def begin_step(self) -> bool:
        """Begin an inner step; the first of a round saves the weights, equal on all ranks, as anchor.

        Returns:
            Whether the weights are unchanged since the last step of this round; False if a script has set them.
        """
        if not self._anchor:
            self._anchor = {p: self.held(p.detach()) for p in self.exchange.names}
        return all(p._version == version for p, version in self._versions.items())

    def end_step(self) -> bool:
        """End an inner step, made or skipped; return whether the round is complete."""
        counts = self.exchange.counts
        counts.pending, counts.steps_alone = counts.pending + 1, counts.steps_alone + 1
        self._versions = {p: p._version for p in self._anchor}
        return counts.pending >= self.steps

    @torch.no_grad()
    def restart_of(self, sent: Collection[torch.Tensor], keeps_momentum: bool) -> None:
        """Restart the round for parameters in `sent`, whose values are equal on all ranks now.

        Other parameters continue their round. The outer momentum of restarted parameters is dropped, unless
        `keeps_momentum`.
        """
        places = {(x.data_ptr(), x.numel()) for x in sent}
        for p in [p for p in self._anchor if (p.data_ptr(), p.numel()) in places]:
            self._anchor[p] = self.held(p.detach())
            self._versions[p] = p._version
            if not keeps_momentum:
                self.momentum.pop(p, None)

    def go_on_in(self, exchange: GradientExchange) -> None:
        """Replace the exchange; the present round continues."""
        counts, self.exchange = self.exchange.counts, exchange
        counts.pending, exchange.counts.pending = 0, counts.pending

    @torch.no_grad()
    def send(self) -> bool:
        """Start the exchange of this rank's changes of weights; return the result of `begin_step`."""
        untouched = self.begin_step()  # it saves the weights if no step was made
        self._held = {p: p.grad for p in self._anchor}
        for p, anchor in self._anchor.items():
            p.grad = anchor.to(p.device) - p
            if not p.requires_grad and not p.grad.any():  # frozen: its residual must not move it
                self.exchange.fade(self.exchange.names[p], 0.0)
        self.exchange.begin_step({}, {})  # without weight decay: the inner optimizer has applied it
        for p in reversed(self._anchor):
            self._results[p] = self.exchange.take(p)
        return untouched

    @torch.no_grad()
    def receive(self) -> bool:
        """Wait for the exchange, and update the weights, equal on all ranks; return whether every change was finite.

        If not, every rank restores the weights from before the round, and finite changes stay in `e`.
        """
        for p, result in self._results.items():
            p.grad = result()
        finite = self.exchange.finish()
        self.exchange.counts.steps_alone -= 1  # one step of the round is counted with the exchange
        for p, anchor in self._anchor.items():
            if finite:
                assert p.grad is not None
                # two operations: a fused one rounds differently on other processors, and replicas would differ
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
        """Return the outer momentum of `p`, zeros at first."""
        if p not in self.momentum:
            self.momentum[p] = self.held(torch.zeros_like(p))
        return self.momentum[p]

    @torch.no_grad()
    def forget(self) -> None:
        """Drop the outer momentum; undo an exchange that was interrupted."""
        if self._held:
            for p, anchor in self._anchor.items():
                p.copy_(anchor)
            self._end()
        self.momentum.clear()

    def copied(self) -> Round:
        """Copy the present round, between two steps.

        Memory: 4 bytes a parameter, none right after an exchange.
        """
        return self.exchange.counts.pending, {p: anchor.clone() for p, anchor in self._anchor.items()}

    def go_back(self, to: Round | None = None) -> None:
        """Return to the round `to`, or to the begin of a round, with the present weights.

        An exchange that was interrupted is given up.
        """
        self._end()
        if to is not None:
            count, anchors = to
            self.exchange.counts.pending = count
            self._anchor = {p: anchor.clone() for p, anchor in anchors.items()}

    def _end(self) -> None:
        for p, grad in self._held.items():
            p.grad = grad
        self._held.clear()
        self._results.clear()
        self._anchor.clear()
        self._versions.clear()
        self.exchange.counts.pending = 0


class LocalSteps(Strategy):
    """Local steps; for a round see `LocalRounds`.

    A learning-rate schedule counts inner steps. Accumulated backward passes are one step, and a step that a GradScaler
    skips counts, so a round has the same number of the script's steps on every rank. Buffers of the model (batch norm)
    differ between ranks.
    """

    takes_gradients = False  # GradScaler then always calls step(), and passes scale and verdict as attributes
    rounds: LocalRounds

    def built(self) -> None:
        """See `Strategy`; the present round continues."""
        session = self.session
        if not hasattr(self, "rounds"):
            self.rounds = LocalRounds(session.exchange, session.config)
        self.rounds.go_on_in(session.exchange)
        at_end.watch(session.exchange.collectives.rank, session.config)

    # -- one step

    def step(self) -> bool:
        """Step the user's optimizer on this rank alone; exchange after the H-th step."""
        session = self.session
        if not self.rounds.begin_step():
            session.tell_once("weights set", WEIGHTS_SET)
        is_made = self._may_step(session.optimizer)
        if is_made:
            session.with_hooks(session.own_step)
        clip_calls.end_step(session)  # the script has clipped this rank's gradient itself
        if self.rounds.end_step():
            self.exchange()
        return is_made

    def _may_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Unscale gradients; return whether a GradScaler allows the step, and gradients are finite.

        Weights that are not finite would spoil the model's outputs until the round is undone, and running statistics
        for ever. Cost: a read of every gradient.
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
        """Exchange the changes of weights since the last exchange; every rank must call it, between two steps."""
        session = self.session
        session.groups.check_nothing_unfrozen(session.exchange.names)
        session.carrier.check_ranks(session)
        if not self.rounds.send():
            session.tell_once("weights set", WEIGHTS_SET)
        self.end_exchange()

    def end_exchange(self) -> None:
        """Wait for the exchange that `LocalRounds.send` has started."""
        session, exchange, finite = self.session, self.session.exchange, self.rounds.receive()
        if not exchange.ranks_in_join:  # ranks in join take part in nothing else
            session.replicas.begin(exchange.steps)
            session.replicas.end(session)  # at once: after the next step weights differ
        if not finite:
            clean(session.optimizer.state)
            stop_if_skipped(exchange)
            session.tell_once(*of_skipped(exchange))

    # -- rounds

    @property
    def apart(self) -> bool:
        """See `Strategy`."""
        return self.session.exchange.counts.pending > 0

    def conclude(self) -> None:
        """See `Strategy`."""
        if self.apart:
            self.exchange()

    def before_flush(self) -> None:
        """Exchange the present round."""
        self.conclude()

    def end_for_another(self) -> None:
        """See `Strategy`."""
        if not self.session.carrier.elastic:  # else each rank would start with weights of its own
            self.session.carrier.check_ranks(self.session)
            self.rounds.send()
            self.end_exchange()

    def forget(self) -> None:
        """See `Strategy`."""
        self.rounds.forget()

    def weights_set(self, sent: Sequence[Any]) -> None:
        """See `Strategy`."""
        if self.apart:
            # under Elastic ranks that meet get the weights of rank 0, and next its outer momentum
            tensors = [x for x in sent if isinstance(x, torch.Tensor)]
            self.rounds.restart_of(tensors, keeps_momentum=self.session.carrier.elastic)

    def clear_residuals(self) -> None:
        """Empty `e` and outer momentum, and begin a round with the present weights."""
        self.session.exchange.clear()
        self.rounds.go_back()
        self.rounds.momentum.clear()

    # -- under Horovod Elastic

    def remembered(self) -> Round:
        """See `Strategy`: the anchor and the number of steps in the round."""
        return self.rounds.copied()

    def go_back(self, to: Round) -> None:
        """See `Strategy`; an exchange under way no longer changes the weights."""
        self.rounds.go_back(to)

    def meet(self, share: Callable[[], None]) -> None:
        """See `Strategy`; a round begins with the weights and outer momentum of rank 0.

        Changes of the other ranks since their last exchange are lost; a commit right after an exchange loses nothing.
        `e` and the inner optimizer stay on each rank; a newcomer takes over the inner optimizer of rank 0.
        """
        session, own = self.session, {}
        states = session.optimizer.state
        if self.apart or session.exchange.steps:
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
        for i, momentum in enumerate(self.outer()):
            momentum.copy_(collectives.wait(collectives.broadcast(momentum.clone(), f"{i}.outer", root)))

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
                f"the outer momentum of {others[0]!r} fits no parameter of this optimizer: pass the same "
                "named_parameters as when it was saved"
            )
        return {key: x for key, x in state_dict.items() if key != _OUTER}, outer

    def load(self, added: dict[str, torch.Tensor]) -> None:
        """See `Strategy`; the present round continues."""
        if not self.apart:  # a step that raised an error may have begun a round
            self.rounds.go_back()
        for name, x in added.items():
            p = self.session.parameters[name]
            self.rounds.momentum[p] = self.rounds.held(x.to(p))

    def sees_clip(self, clip: Clip, known: bool) -> None:
        """See `Strategy`; each rank clips its own gradient, to another limit than in dense training: say so."""
        if known:
            told = clips_alone("the script", clip.limit, self.session.exchange.collectives.workers)
            self.session.tell_once("clipping", told)


def of(session: Session) -> LocalSteps:
    """The strategy of `session`, which has local steps."""
    assert isinstance(session.strategy, LocalSteps)
    return session.strategy


class LocalOverrides(Overrides):
    """The methods of an optimizer with local steps."""

    def exchange(self) -> None:
        """Exchange the changes of the weights since the last exchange; every rank must call it, between two steps.

        Afterwards the weights are the same on every rank. ``step`` calls it every ``local_steps`` steps. A call right
        after an exchange sends more of the residual.
        """
        of(self._dgc).exchange()

    def clear_residuals(self) -> None:
        """Empty `e` and outer momentum, and begin a round with the present weights.

        Every rank must call it, between two steps, with equal weights.
        """
        of(self._dgc).clear_residuals()


STRATEGY, OVERRIDES = LocalSteps, LocalOverrides
