"""The strategy of ``Compression.local``: H steps on each rank alone, then an exchange of what they have changed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dgc_horovod import at_end
from dgc_horovod.config_check import shared_from
from dgc_horovod.errors import UnsupportedUse, shown
from dgc_horovod.notices import MID_ROUND, WEIGHTS_SET, clips_alone, of_skipped, step_not_made, stop_if_skipped
from dgc_horovod.torch.clipping import calls as clip_calls
from dgc_horovod.torch.gradients.dense_path import all_finite, not_finite_of
from dgc_horovod.torch.local.rounds import LocalRounds
from dgc_horovod.torch.session.every_step import evaluated
from dgc_horovod.torch.session.passes import Result
from dgc_horovod.torch.session.strategy import Closure, Strategy
from dgc_horovod.torch.wrapping import owners

if TYPE_CHECKING:
    from dgc_horovod.torch.clipping.local import Clip

_OUTER = "outer_momentum"  # in a state
_log = logging.getLogger("dgc_horovod")


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
        at_end.watch(session.exchange.collectives.rank)

    def hand_over(self, p: torch.Tensor) -> Result:
        """No gradient is exchanged."""
        raise AssertionError("a gradient was handed over between local steps")

    def synchronize(self) -> None:
        """Nothing: each rank's gradients are its own."""

    def clear_gradients(self) -> None:
        """Nothing: see `synchronize`."""

    # -- one step

    def step(self, closure: Closure | None) -> Any:
        """A step of the user's optimizer on this rank alone; after the H-th, the exchange."""
        loss, session = evaluated(closure), self.session
        owners.check(session)
        if not self.rounds.begin_step():
            session.tell_once("weights set", WEIGHTS_SET)
        if self._may_step(session.optimizer):
            session.with_hooks(session.own_step)
        else:
            session.returned = None
        session.loaded = False
        clip_calls.end_step(session)  # it was the gradient's own
        if self.rounds.end_step():
            self.exchange()
        return session.returned if closure is None else loss

    def _may_step(self, optimizer: Any) -> bool:
        """Whether a GradScaler lets the step be, and gradients are finite; they are unscaled then.

        Weights that are not finite would spoil what the model computes until the round is undone, and a running
        statistic for ever. Costs a read of every gradient.
        """
        found, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
        if found is not None and float(found):
            return False
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if scale is not None:
            for grad in grads:
                grad.div_(scale.to(grad.device))
        if found is not None:
            optimizer.grad_scale = optimizer.found_inf = None  # for an optimizer that would unscale by itself
        elif self.session.config.on_nonfinite == "skip":
            if not all_finite(grad._values() if grad.is_sparse else grad for grad in grads):
                self._leave_out()
                return False
        return True

    def _leave_out(self) -> None:
        exchange = self.session.exchange
        exchange.buckets.counts.left_out += 1
        spoilt, count = not_finite_of(exchange.names), exchange.buckets.counts.left_out
        if text := step_not_made(exchange.collectives.rank, count, spoilt):
            _log.warning("dgc_horovod: %s", text)

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
        session, finite = self.session, self.rounds.receive()
        buckets = session.exchange.buckets
        if not buckets.ranks_in_join:  # which exchange nothing else
            session.replicas.begin(buckets.steps)
            session.replicas.end(session)  # now, as the next step makes them differ
        if not finite:
            clean(session.optimizer.state)
            stop_if_skipped(buckets)
            session.tell_once(*of_skipped(buckets))

    # -- rounds

    @property
    def in_round(self) -> bool:  # type: ignore[override]
        """See `Strategy`."""
        return self.rounds.count > 0

    def check_between_steps(self) -> None:
        """See `Strategy`."""
        if self.rounds.count:
            raise UnsupportedUse(MID_ROUND)

    def finish_round(self) -> None:
        """See `Strategy`."""
        if self.rounds.count:
            self.exchange()

    def before_flush(self) -> None:
        """The round under way is exchanged first."""
        self.finish_round()

    def end_for_another(self) -> None:
        """See `Strategy`."""
        if not self.session.carrier.elastic:  # each rank would begin anew with weights of its own
            self.session.carrier.check_ranks(self.session)
            self.rounds.send()
            self.end_exchange()

    def forget(self) -> None:
        """See `Strategy`."""
        self.rounds.forget()

    def weights_set(self, sent: Sequence[torch.Tensor]) -> None:
        """See `Strategy`."""
        self.rounds.restart_of(sent)

    def clear_residuals(self) -> None:
        """Empty `e` and outer momentum, and begin a round with the weights that a script has set."""
        self.session.exchange.buckets.clear()
        self.session.exchange.dense_residuals.clear()
        self.rounds.go_back()
        self.rounds.momentum.clear()

    # -- outer momentum

    def outer(self) -> dict[str, torch.Tensor]:
        """See `Strategy`."""
        names = self.session.exchange.names if self.session.config.outer_momentum else {}
        return {name: self.rounds.outer(p) for p, name in names.items()}

    def share_loaded(self, root: int) -> None:
        """See `Strategy`."""
        collectives = self.session.exchange.collectives
        if shared_from(collectives, b"some" if self.rounds.momentum else b"none", "outer.there", root) == b"none":
            self.rounds.momentum.clear()
            return
        for p, name in self.session.exchange.names.items():
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
        of_name = {name: p for p, name in self.session.exchange.names.items()}
        others = [name for name, x in outer.items() if name not in of_name or x.shape != of_name[name].shape]
        if others:
            raise UnsupportedUse(
                f"the outer momentum of {others[0]!r} is of no parameter here: pass the same named_parameters as when "
                "it was saved"
            )
        return {key: x for key, x in state_dict.items() if key != _OUTER}, outer

    def load(self, added: dict[str, torch.Tensor]) -> None:
        """See `Strategy`; the round under way goes on."""
        of_name = {name: p for p, name in self.session.exchange.names.items()}
        if not self.rounds.count:  # a step that has raised an error may have begun one
            self.rounds.go_back()
        for name, x in added.items():
            self.rounds.momentum[of_name[name]] = self.rounds.held(x.to(of_name[name]))

    def sees_clip(self, clip: Clip, known: bool) -> None:
        """It is each rank's own affair here, but not at the limit of dense training."""
        if known:
            workers = self.session.exchange.collectives.workers
            self.session.tell_once("clipping", clips_alone("the script", clip.limit, workers))


def clean(states: Any) -> None:
    """Empty what is not finite of an inner optimizer's state: it would spoil the weights again.

    Of a parameter all of it: Adam's first moment is no good without the second, nor are its steps, by which empty
    moments would count as full ones.
    """
    for state in states.values():
        own = [x for x in state.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if not all(bool(torch.isfinite(x).all()) for x in own):
            for x in own:
                x.zero_()
            if isinstance(state.get("step"), int):
                state["step"] = 0
