"""A strategy says when a session exchanges; most sessions do at every step."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.notices import of_skipped, stop_if_skipped
from dgc_horovod.session import base
from dgc_horovod.torch.clipping import calls as clip_calls
from dgc_horovod.torch.clipping.local import Clip
from dgc_horovod.torch.gradients.collectives import all_finite
from dgc_horovod.torch.gradients.scaling import already_unscaled, scale_of
from dgc_horovod.torch.optimizer_state import add_residual, drop_momentum
from dgc_horovod.torch.session.records import Result
from dgc_horovod.torch.session.session import Session
from dgc_horovod.torch.wrapping import steps
from dgc_horovod.torch.wrapping.steps import (
    CHANGED_UPDATE,
    DROPPED,
    LATE_CHANGE,
    SCALER_LEFT_OUT,
    STEPPED_TWICE,
    SYNCHRONIZED_TWICE,
    TAKEN_AWAY,
    UNSCALED_TOO_EARLY,
)

Parameter = torch.Tensor


class Strategy(base.Strategy[Session, torch.Tensor]):
    """What a step of one session is.

    Args:
        session: session that has it.
    """

    takes_gradients = True  # whether gradients are exchanged
    scales_itself = False  # whether ``step`` is called for a step that a GradScaler skips, and unscales
    stock = False  # whether the framework's own exchange carries the gradients of the present step

    def built(self) -> None:
        """The session has a new exchange, between the ranks that there are."""

    def started(self) -> None:
        """The session is complete."""

    def hand_over(self, p: Parameter) -> Result:
        """Hand the gradient of `p`, which is complete, to its exchange."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait for every exchange of this step; afterwards ``p.grad`` is the same on every rank."""
        raise NotImplementedError

    def step(self) -> bool:
        """One step of the script, whose gradients are there; returns whether the optimizer has made it."""
        raise NotImplementedError

    def clear_gradients(self) -> None:
        """The script is about to clear its gradients."""
        raise NotImplementedError

    def end_for_another(self) -> None:
        """Another optimizer has the parameters from now on: leave them the same on every rank, as they are here."""

    # -- state

    def ranks_changed(self) -> None:
        """A checkpoint of another number of ranks is loaded, on every rank."""

    def share_loaded(self, root: int) -> None:
        """Let all ranks have what rank `root` of them has loaded of `outer`."""

    def extend(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's own state with what this adds to it."""
        return state_dict

    def split(self, state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What `extend` was given, and what it has added.

        Raises:
            UnsupportedUse: that is of other parameters.
        """
        return state_dict, {}

    def load(self, added: dict[str, torch.Tensor]) -> None:
        """Go on from what `split` has found, once the optimizer has loaded the rest."""

    # -- clipping

    def sees_clip(self, clip: Clip, known: bool) -> None:
        """The script has clipped gradients of this session.

        Args:
            clip: what it has asked for.
            known: whether it is one that compression can follow.
        """


_UNUSUAL = 10  # steps in a row that a GradScaler skips to find its scale
_CLEARED = (
    "optimizer.zero_grad() was called after backward() but before step() or synchronize(); the gradients "
    "are being exchanged. Call it after step(), or before backward(). After an exception in between, on "
    "every rank, give the step up first: optimizer.synchronize(); optimizer.zero_grad()"
)


class EveryStep(Strategy):
    """Each gradient is handed over as soon as a backward pass has made it, and its update is waited for before a step.

    A step in which any rank's gradient was not finite is applied on no rank.
    """

    _left_alone: Collection[Parameter] = ()  # frozen in the backward pass: no update was put into p.grad

    # -- gradients in

    def hand_over(self, p: Parameter) -> Result:
        """Start what the gradient of `p` was the last one for."""
        session, passes = self.session, self.session.passes
        if p.grad is None:  # unused in this step; another rank may have used it
            p.grad = torch.zeros_like(p)
        session.carrier.check_ranks(session)
        if passes.synchronized and session.may_apply and not session.offered:
            steps.check_update_left(session, p)
        passes.synchronized = False
        if not session.exchange.under_way:
            with session.exchange.lock:
                self._begin()
        session.groups.note_frozen(p, session.update, session.exchange)
        session.watch.taken(p)
        return session.exchange.take(p)

    def _begin(self) -> None:
        """The first gradient of a step: say how each enters the residual, and the decay that is added to it before."""
        session, exchange, update = self.session, self.session.exchange, self.session.update
        if exchange.under_way:  # by another thread
            return
        groups = {id(group): group for group in map(session.groups.of, exchange.names)}
        exchange.clipping.adds_decay |= any(map(update.decay_before, groups.values()))
        exchange.begin_step(*update.entering(session.groups.of, session.optimizer.state, exchange))

    # -- updates out

    def synchronize(self) -> None:
        """A second call before the next backward pass does nothing, nor does one with nothing new since the step."""
        session, passes = self.session, self.session.passes
        session.check_not_superseded()
        if not passes.results and self._nothing_new():
            return
        if already_unscaled(session.scaler, session.optimizer):
            raise UnsupportedUse(UNSCALED_TOO_EARLY)
        if session.watch.changed_since_taken():
            session.tell_once("late change", LATE_CHANGE)
        brought, exchange = bool(passes.results), session.exchange
        session.take_updates()
        withheld = session.carrier.withhold(session.parameters.values())
        self._left_alone = set(withheld)
        session.replicas.end(session)
        session.groups.check_nothing_unfrozen(exchange.names)
        session.may_apply = exchange.finish()
        if not session.may_apply:
            if session.update.dense:
                exchange.drop_residuals()
            if exchange.counts.skipped_in_a_row >= _UNUSUAL:  # a GradScaler calls no step() that would tell
                session.tell_once(*of_skipped(exchange))
        session.watch.synchronized(exchange.names, brought)
        session.groups.changed, session.offered = True, False
        if session.may_apply:
            self._keep(withheld)

    def _nothing_new(self) -> bool:
        """Whether what stands in ``p.grad`` is an update already: to exchange it again would compress it twice."""
        session = self.session
        if session.passes.synchronized:
            return all(p.grad is not None or not p.requires_grad for p in session.exchange.names)
        return session.watch.unchanged_since_applied()

    def _keep(self, withheld: Mapping[Parameter, torch.Tensor]) -> None:
        """An update that no weight gets goes on waiting, as much of it on each rank; of what stays frozen nothing.

        Networks that take turns in one optimizer would lose it.
        """
        session, exchange = self.session, self.session.exchange
        for p, update in withheld.items():
            if p in exchange.sparse and not session.groups.stays_frozen(p) and all_finite([update]):
                add_residual(exchange, p, update.float() / exchange.loss_scale())

    # -- the step

    def step(self) -> bool:
        """Synchronize unless that is done or skipped, then apply the optimizer."""
        session, passes, exchange = self.session, self.session.passes, self.session.exchange
        session.carrier.before_step(session)
        if not (passes.results or passes.synchronized) and session.watch.unchanged_since_applied():
            raise UnsupportedUse(STEPPED_TWICE)
        if not (passes.skips or session.carrier.exchanges_in_backward):
            if passes.synchronized:
                warnings.warn(SYNCHRONIZED_TWICE, stacklevel=4)
            else:
                self._check_scaler_is_used()
            self.synchronize()
        if not session.may_apply:
            passes.synchronized = False
            clip_calls.end_step(session)
            if scale_of(session.scaler)() == 1.0:
                stop_if_skipped(exchange)
            session.tell_once(*of_skipped(exchange))
            return False
        session.with_hooks(self._apply)
        session.watch.applied(exchange.names)
        if not exchange.ranks_in_join:  # those may have another learning rate; join() compares in the end
            session.update.check_weights(session.optimizer, exchange)
            session.replicas.begin(exchange.steps)
        return True

    def _check_scaler_is_used(self) -> None:
        """A scaler that was passed, and whose scale gradients seem to have, though it does not make this step."""
        session, scaler = self.session, self.session.scaler
        if session.offered or not isinstance(scaler, torch.amp.GradScaler) or not scaler.is_enabled():
            return
        if already_unscaled(scaler, session.optimizer) or session.exchange.in_join:
            return
        if scaler.get_scale() != 1:  # last: it waits for the device
            raise UnsupportedUse(SCALER_LEFT_OUT)

    def _apply(self) -> None:
        """After the hooks before a step, which may clip as well."""
        session = self.session
        self._check_untouched()
        self._drop_what_was_taken_away()
        clip_calls.cut_late(session)
        clip_calls.end_step(session)
        session.passes.synchronized = False
        session.update.step(session.optimizer, session.exchange, session.own_step)

    def _check_untouched(self) -> None:
        """Notice a script that clips after synchronize() by its own hands: that is an update, not a gradient."""
        session = self.session
        if session.watch.changed_since_synchronized(scale_of(session.scaler)()):
            session.tell_once("changed update", CHANGED_UPDATE)

    def _drop_what_was_taken_away(self) -> None:
        """Of a parameter whose update a script has set to None nothing waits: it would come in a burst later on."""
        exchange = self.session.exchange
        for p, name in exchange.sparse.items():
            if p.grad is None and p.requires_grad and p not in self._left_alone:
                exchange.fade(name, 0.0)
                drop_momentum(exchange, p)
                self.session.tell_once("taken away", TAKEN_AWAY.format(name=name))

    def clear_gradients(self) -> None:
        """An error while gradients are being exchanged."""
        session, passes = self.session, self.session.passes
        if passes.results:
            raise UnsupportedUse(_CLEARED)
        if passes.synchronized and session.may_apply and not (self.stock or session.offered):
            steps.check_not_stepped_otherwise(session)
            if any(p.grad is not None and bool(p.grad.any()) for p in session.exchange.names):  # else nothing was in it
                session.tell_once("dropped", DROPPED)
        passes.synchronized = False

    def check_between_steps(self) -> None:
        """See `Strategy`."""
        passes = self.session.passes
        if passes.results or (passes.synchronized and self.session.may_apply):
            raise UnsupportedUse(
                "residuals can be saved, loaded and flushed between two steps only: after step(), before backward()"
            )
