"""Strategies, which decide when a session exchanges; `EveryStep` exchanges at every step."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.notices import of_skipped, stop_if_skipped
from dgc_horovod.session import base
from dgc_horovod.torch.gradients.clipping import Clip
from dgc_horovod.torch.gradients.collectives import Parameter, all_finite
from dgc_horovod.torch.gradients.scaling import already_unscaled
from dgc_horovod.torch.optimizer_state import add_residual
from dgc_horovod.torch.session.records import Result
from dgc_horovod.torch.session.session import Session
from dgc_horovod.torch.wrapping import clip_calls, steps


class Strategy(base.Strategy[Session, torch.Tensor]):
    """The steps of one session.

    Args:
        session: session of the strategy.
    """

    # whether gradients are exchanged; if not, ``step`` unscales, and is called for steps that a GradScaler skips too
    takes_gradients = True
    stock = False  # whether the framework's own exchange carries the gradients of the present step

    def built(self) -> None:
        """Adapt to a new exchange of the session."""

    def hand_over(self, p: Parameter) -> Result:
        """Pass the complete gradient of `p` to its exchange, if gradients are exchanged."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait for every exchange of this step, if there is one; ``p.grad`` is then the same on every rank."""

    def step(self) -> bool:
        """Make one step of the script; return whether the optimizer was stepped."""
        raise NotImplementedError

    def clear_gradients(self) -> None:
        """Prepare for the script's clearing of gradients."""

    def end_for_another(self) -> None:
        """Make the weights equal on all ranks, before another optimizer takes the parameters."""

    # -- state

    def ranks_changed(self) -> None:
        """Adapt to a loaded checkpoint of another number of ranks, on every rank."""

    def share_loaded(self, root: int) -> None:
        """Copy the state `outer` that rank `root` has loaded to all ranks."""

    def extend(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the optimizer's own state with the strategy's additions."""
        return state_dict

    def split(self, state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Split the result of `extend` into the optimizer's own state and the additions.

        Raises:
            UnsupportedUse: the additions are of other parameters.
        """
        return state_dict, {}

    def load(self, added: dict[str, torch.Tensor]) -> None:
        """Load the additions that `split` has found, after the optimizer has loaded its own state."""

    # -- clipping

    def sees_clip(self, clip: Clip, known: bool) -> None:
        """Handle a clipping call of the script on gradients of this session.

        Args:
            clip: limit of the call.
            known: whether compression can apply the limit itself.
        """


_UNUSUAL = 10  # more skipped steps in a row than a GradScaler needs to find its scale
_CLEARED = (
    "optimizer.zero_grad() was called after backward() but before step() or synchronize(); the gradients "
    "are being exchanged. Call it after step(), or before backward(). After an exception in between, on "
    "every rank, give the step up first: optimizer.synchronize(); optimizer.zero_grad()"
)


class EveryStep(Strategy):
    """Exchanges each gradient as soon as a backward pass has computed it; ``step`` waits for the updates.

    A step in which any rank's gradient was not finite is applied on no rank.
    """

    _left_alone: Collection[Parameter] = ()  # parameters frozen in the backward pass, whose p.grad got no update

    # -- gradients in

    def hand_over(self, p: Parameter) -> Result:
        """Take the gradient of `p`, and start the exchange that it completes."""
        session, passes = self.session, self.session.passes
        if p.grad is None:  # p was not used in this step; another rank may have used it
            p.grad = torch.zeros_like(p)
        session.carrier.check_ranks(session)
        if passes.synchronized and session.may_apply and not session.offered:
            steps.check_update_left(session, p)
        passes.synchronized = False
        with session.exchange.lock:  # several threads may run the backward pass
            if not session.exchange.under_way:
                self._begin()
        session.groups.note_frozen(p, session.update, session.exchange)
        session.watch.taken(p)
        return session.exchange.take(p)

    def _begin(self) -> None:
        """Begin a step at its first gradient: set how gradients enter the residual, and their weight decay."""
        session, exchange, update = self.session, self.session.exchange, self.session.update
        session.see_scaler()
        groups = {id(group): group for group in map(session.groups.of, exchange.names)}
        exchange.clipping.adds_decay |= any(map(update.decay_before, groups.values()))
        exchange.begin_step(*update.entering(session.groups.of, session.optimizer.state, exchange))

    # -- updates out

    def synchronize(self) -> None:
        """See `Strategy`. Does nothing if no gradient has come since the last call or the last step."""
        session, passes = self.session, self.session.passes
        session.check_not_superseded()
        if not passes.results and self._nothing_new():
            return
        if already_unscaled(session.scaler, session.optimizer):
            raise UnsupportedUse(steps.UNSCALED_TOO_EARLY)
        if session.watch.changed_since_taken():
            session.tell_once("late change", steps.LATE_CHANGE)
        brought, exchange = bool(passes.results), session.exchange
        session.take_updates()
        withheld = session.carrier.withhold(session.parameters.values())
        self._left_alone = set(withheld)
        session.replicas.end(session)
        session.groups.check_nothing_unfrozen(exchange.names)
        session.may_apply = exchange.finish()
        if not session.may_apply:
            if exchange.counts.skipped_in_a_row >= _UNUSUAL:  # a GradScaler does not call step(), which would warn
                session.tell_once(*of_skipped(exchange))
        session.watch.synchronized(exchange.names, brought)
        session.groups.changed, session.offered = True, False
        if session.may_apply:
            self._keep(withheld)

    def _nothing_new(self) -> bool:
        """Return whether ``p.grad`` has updates already, which must not be exchanged again."""
        session = self.session
        if session.passes.synchronized:
            return all(p.grad is not None or not p.requires_grad for p in session.exchange.names)
        return session.watch.unchanged_since_applied()

    def _keep(self, withheld: Mapping[Parameter, torch.Tensor]) -> None:
        """Return updates that are not applied to the residual, the same on each rank, except of frozen parameters.

        Networks that are trained in turn by one optimizer would lose these updates.
        """
        session, exchange = self.session, self.session.exchange
        for p, update in withheld.items():
            if p in exchange.sparse and not session.groups.stays_frozen(p) and all_finite([update]):
                add_residual(exchange, p, update.float() / exchange.loss_scale())

    # -- the step

    def step(self) -> bool:
        """Synchronize, unless that is done or skipped; then step the optimizer."""
        session, passes, exchange = self.session, self.session.passes, self.session.exchange
        session.carrier.before_step(session)
        if not (passes.results or passes.synchronized) and session.watch.unchanged_since_applied():
            raise UnsupportedUse(steps.STEPPED_TWICE)
        if not (passes.skips or session.carrier.exchanges_in_backward):
            if passes.synchronized:
                warnings.warn(steps.SYNCHRONIZED_TWICE, stacklevel=4)
            else:
                self._check_scaler_is_used()
            self.synchronize()
        if not session.may_apply:
            passes.synchronized = False
            clip_calls.end_step(session)
            if exchange.loss_scale() == 1.0:
                stop_if_skipped(exchange)
            session.tell_once(*of_skipped(exchange))
            return False
        session.with_hooks(self._apply)
        session.watch.applied(exchange.names)
        if not exchange.ranks_in_join:  # ranks in join may have another learning rate; join() compares at its end
            session.update.check_weights(session.optimizer, exchange)
            session.replicas.begin(exchange.steps)
        return True

    def _check_scaler_is_used(self) -> None:
        """Raise UnsupportedUse if a GradScaler was passed, but does not call this step."""
        session, scaler = self.session, self.session.scaler
        if session.offered or not isinstance(scaler, torch.amp.GradScaler) or not scaler.is_enabled():
            return
        if already_unscaled(scaler, session.optimizer) or session.exchange.in_join:
            return
        if scaler.get_scale() != 1:  # the last check, as it waits for the device
            raise UnsupportedUse(steps.SCALER_LEFT_OUT)

    def _apply(self) -> None:
        """Apply the updates, after the script's step hooks, which may clip too."""
        session = self.session
        if session.watch.changed_since_synchronized(session.exchange.loss_scale()):  # by code of the script's own
            session.tell_once("changed update", steps.CHANGED_UPDATE)
        self._drop_what_was_taken_away()
        clip_calls.cut_late(session)
        clip_calls.end_step(session)
        session.passes.synchronized = False
        session.update.step(session.optimizer, session.exchange, session.own_step)

    def _drop_what_was_taken_away(self) -> None:
        """Drop residual and momentum of parameters whose update the script has set to None, against a later burst."""
        exchange = self.session.exchange
        for p, name in exchange.sparse.items():
            if p.grad is None and p.requires_grad and p not in self._left_alone:
                exchange.fade(name, 0.0)
                exchange.drop_momentum(name)
                self.session.tell_once("taken away", steps.TAKEN_AWAY.format(name=name))

    def clear_gradients(self) -> None:
        """Raise UnsupportedUse while gradients are exchanged."""
        session, passes = self.session, self.session.passes
        session.carrier.cleared()
        if passes.results:
            raise UnsupportedUse(_CLEARED)
        if passes.synchronized and session.may_apply and not (self.stock or session.offered):
            steps.check_not_stepped_otherwise(session)
            if any(p.grad is not None and bool(p.grad.any()) for p in session.exchange.names):  # else nothing is lost
                session.tell_once("dropped", steps.DROPPED)
        passes.synchronized = False

    def check_between_steps(self) -> None:
        """See `Strategy`."""
        passes = self.session.passes
        if passes.results or (passes.synchronized and self.session.may_apply):
            raise UnsupportedUse(
                "residuals can be saved, loaded and flushed between two steps only: after step(), before backward()"
            )


STRATEGY = EveryStep
