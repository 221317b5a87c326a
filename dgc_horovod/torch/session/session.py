"""The owner of an optimizer's steps: its exchange, carrier, strategy and state."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dgc_horovod.config import DGCConfig
from dgc_horovod.config_check import unique_tag
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.exchange.contract import INSIDE
from dgc_horovod.notices import describe
from dgc_horovod.session import base
from dgc_horovod.state.parts import StateRegister
from dgc_horovod.torch.gradients.collectives import Parameter, not_finite_of
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.gradients.node_exchange import NodeGradientExchange
from dgc_horovod.torch.gradients.replica_check import Replicas
from dgc_horovod.torch.gradients.scaling import SeenScaler, scale_of
from dgc_horovod.torch.session.carrier import Carrier
from dgc_horovod.torch.session.records import GradientWatch, ParameterGroups, Passes
from dgc_horovod.torch.updates import OwnState, Update
from dgc_horovod.torch.wrapping import steps
from dgc_horovod.torch.wrapping.steps import LOADED_TWICE, RESIDUALS_NOT_SAVED, SCALER_NOT_PASSED, SUPERSEDED

if TYPE_CHECKING:
    from dgc_horovod.torch.session.strategies import Strategy

Scaler = torch.amp.GradScaler | SeenScaler | None
Closure = Callable[[], Any]
# the code of torch's wrapper around every step; functools.wraps copies its attributes, but not its code
_HOOKED = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__


class Kind(NamedTuple):
    """The parts of a session.

    Args:
        config: compression settings, adapted to the strategy.
        strategy: class of the strategy.
        update: the split of the optimizer's arithmetic.
        overrides: class of the methods that the user's optimizer gets.
    """

    config: DGCConfig
    strategy: type[Strategy]
    update: Update
    overrides: type


class Session(base.Session[torch.optim.Optimizer]):
    """One optimizer whose gradients, or changes of weights, are exchanged.

    Args:
        optimizer: the user's optimizer, which already has the derived class; it owns the session.
        carrier: the ranks, and the delivery of gradients.
        kind: config, strategy and arithmetic.
        scaler: GradScaler of the script, or a SeenScaler; None: no loss scale.

    Attributes:
        exchange: exchange of the gradients; replaced when the ranks change.
        kept: state of this rank; replaced when the ranks change.
        may_apply: whether the update in ``p.grad`` may be applied: no gradient of the step was not finite.
        offered: whether a GradScaler has inspected the updates; it may skip the step.
        stepping: whether our ``step`` is under way.
        loaded: whether a state has been loaded since the last step.
        saves_residuals: whether residuals are saved or loaded in another way than by ``state_dict()``.
        superseded: whether another optimizer has wrapped the parameters.
    """

    exchange: GradientExchange
    strategy: Strategy
    kept: StateRegister

    def __init__(self, optimizer: torch.optim.Optimizer, carrier: Carrier, kind: Kind, scaler: Scaler) -> None:
        super().__init__(optimizer)
        self.carrier, self.config, self.update, self.scaler = carrier, kind.config, kind.update, scaler
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self.parameters = {carrier.names[p]: p for p in trained}
        self.passes = Passes(self.parameters.values(), carrier.passes_per_step)
        self.groups = ParameterGroups(optimizer, carrier.names)
        self.watch = GradientWatch()
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.may_apply, self.superseded, self.offered = True, False, False
        self.stepping, self.loaded, self.saves_residuals = False, False, False
        self._asked_at = -1  # step of the exchange whose backward pass will hand on messages at its end
        self.returned: Any = None  # result of the last call of the user's own step
        self.strategy = kind.strategy(self)
        self.boundaries = carrier.boundaries(self.parameters)
        carrier.agree(self)
        self.tag = unique_tag("\n".join([carrier.group_name, *self.parameters]))
        self.build()

    def start(self) -> None:
        """Take over the gradients; the optimizer must have this session already."""
        self.update.prepare(self.optimizer, self.exchange)
        self.groups.changed = True
        if self.speaks:
            describe(self.exchange, self.update.notices)
        for other in self.still_apart():  # the number is equal on all ranks: they have compared it
            other.strategy.end_for_another()
        self.carrier.deliver(self)  # only here: after an error above no gradient may be delivered
        self._claim()
        steps.watch_inside(self.optimizer)
        self.carrier.started(self)

    def build(self) -> None:
        """Make all parts that depend on the ranks; called again when the ranks change."""
        transports, scale = self.carrier.transports(self), scale_of(self.scaler)
        settings = self.carrier.settings
        kind = NodeGradientExchange if INSIDE in transports else GradientExchange
        self.exchange = kind(self.parameters, self.boundaries, self.config, transports, settings, scale)
        if self.strategy.takes_gradients:  # else changes of weights are exchanged
            self.exchange.ending.spoilt = partial(not_finite_of, self.exchange.names)
        self.replicas = Replicas(self.parameters, self.config, self.exchange.collectives)
        own = OwnState(self.update.arithmetic.own, self.optimizer, self.exchange.names)
        parts = [own, self.exchange.clipping, self.strategy]
        self.kept = StateRegister(self.exchange, self.update.arithmetic.holds, parts)
        self.strategy.built()

    @property
    def alive(self) -> bool:
        """Whether the optimizer exists and still has its parameters."""
        return super().alive and not self.superseded

    def _claim(self) -> None:
        """Take the parameters from earlier sessions, which get no more gradients.

        Their optimizers may still be alive: a script that wraps its model again drops the old optimizer after it has
        the new one.
        """
        parameters = set(self.parameters.values())
        for other in all_alive():
            if not parameters.isdisjoint(other.parameters.values()):
                other.superseded = True
                _remove(other.hooks)
        self.enter()

    def check_not_superseded(self) -> None:
        """Raise UnsupportedUse if a later session has taken parameters of this one."""
        if self.superseded:
            raise UnsupportedUse(SUPERSEDED)

    def still_apart(self) -> list[Session]:
        """Return earlier sessions with parameters of this one, whose weights may differ between ranks."""
        if any(other.strategy.apart for other in all_alive()):
            gc.collect()  # collect garbage sessions, which may be gone already on other ranks
        parameters = {p for group in self.optimizer.param_groups for p in group["params"]}
        found = [other for other in all_alive() if other is not self and other.strategy.apart]
        return [other for other in found if not parameters.isdisjoint(other.parameters.values())]

    @property
    def speaks(self) -> bool:
        """Whether this rank prints messages that concern all ranks."""
        return self.exchange.collectives.rank == 0

    @property
    def is_exchanging(self) -> bool:
        """Whether gradients have been passed to the exchange, or ``p.grad`` has an update that is not applied yet."""
        return self.passes.synchronized or self.passes.launched

    # -- the step

    def hook_gradients(self) -> None:
        """Register hooks that pass gradients to the strategy during backward, as long as this session lives."""
        weak = weakref.ref(self)  # a script may wrap the model again

        def ready(p: Parameter) -> None:
            session = weak()
            if session is None:
                return
            if session.passes.comes(p):
                try:
                    session.passes.results[p] = session.strategy.hand_over(p)
                except BaseException:
                    session.passes.gives_back(p)
                    raise
                session.hand_on_after_backward()

        hook: Any = torch.compiler.disable(ready)
        self.hooks += [p.register_post_accumulate_grad_hook(hook) for p in self.parameters.values()]
        weakref.finalize(self, _remove, self.hooks)

    def see_scaler(self) -> None:
        """Find out the scaler of the step, at its first gradient, if the script has passed none."""
        if isinstance(self.scaler, SeenScaler):
            self.scaler.begin_step(not self.passes.none_yet)

    def hand_on_after_backward(self) -> None:
        """Hand on, at the end of this backward pass, the messages that a device has not finished by then.

        At ``step`` it could be late: a script may do other things before, with the network unused.
        """
        exchange = self.exchange
        if exchange.is_compressing and self._asked_at != exchange.steps:
            self._asked_at = exchange.steps
            with suppress(RuntimeError):  # in a compiled backward pass; then `step` hands on
                after_backward(self._hand_on_rest)

    def _hand_on_rest(self) -> None:
        self._asked_at = -1  # the same step may have another backward pass
        with self.exchange.lock:
            self.exchange.hand_on(waits=True)

    def take_updates(self) -> None:
        """Exchange missing gradients, wait for all, and write the updates to ``p.grad``."""
        results, taken = self.passes.results, set[int]()
        for p in self.passes.missing:  # in one order on every rank
            results[p] = self.strategy.hand_over(p)
        for p, result in results.items():
            assert result is not None
            self.carrier.put(p, result(), taken)
        self.passes.close()
        self.passes.synchronized = True

    def own_step(self) -> None:
        """Call the user's own step, without torch's hooks."""
        optimizer = self.optimizer
        self.update.begin(optimizer)
        own_step = self.own("step").__func__
        if getattr(own_step, "__code__", None) is _HOOKED:  # the wrapper would run the hooks a second time
            own_step = own_step.__wrapped__
        with self.as_step():
            self.returned = own_step(optimizer)

    def own(self, name: str) -> Any:
        """Return a method of the user's optimizer from its own class."""
        return getattr(super(type(self.optimizer), self.optimizer), name)

    def with_hooks(self, act: Callable[[], None]) -> None:
        """Call `act` inside torch's step wrapper, which runs the step hooks once."""
        with self.as_step():
            torch.optim.Optimizer.profile_hook_step(lambda optimizer: act())(self.optimizer)

    @contextmanager
    def as_step(self) -> Iterator[None]:
        """Set `stepping` inside."""
        before, self.stepping = self.stepping, True
        try:
            yield
        finally:
            self.stepping = before

    def step(self, closure: Closure | None = None) -> Any:
        """Make one step, see `Strategy`. A closure is called first, so that its gradients are exchanged."""
        if closure is None and steps.is_trial(self):  # torch fills an empty state, on this rank only
            self.with_hooks(self.own_step)
            return self.returned
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.check_not_superseded()
        is_made = self.strategy.step()
        self.loaded = False
        return loss if closure is not None or not is_made else self.returned

    def offer_to_scaler(self) -> bool:
        """Return whether ``step`` unscales gradients itself; GradScaler.step asks just before it calls ``step``.

        A fused step would unscale only the dense path.
        """
        if not self.strategy.takes_gradients:
            return True
        if self.scaler is None:
            raise UnsupportedUse(SCALER_NOT_PASSED)
        self.offered = True
        return False

    # -- state

    def check_between_steps(self) -> None:
        """Adapt to the present ranks; raise UnsupportedUse within something that no record holds."""
        self.carrier.follow(self)
        self.strategy.check_between_steps()

    def state_dict(self, *args: object, **kwargs: object) -> dict[str, Any]:
        """Return the optimizer's own state_dict with the strategy's additions."""
        told = self.saves_residuals or self.carrier.elastic or RESIDUALS_NOT_SAVED in self.told or not self.speaks
        if not told and self._keeps_any():
            self.tell_once(RESIDUALS_NOT_SAVED, RESIDUALS_NOT_SAVED)
        self.update.prepare(self.optimizer, self.exchange)
        return self.strategy.extend(self.own("state_dict")(*args, **kwargs))

    def _keeps_any(self) -> bool:
        return any(x.any() for kept in self.exchange.state_arrays().values() for x in kept.values())

    def load_state_dict(self, state_dict: dict[str, Any], *args: object, **kwargs: object) -> None:
        """As the optimizer's own; stock momentum and moments are taken over, and u and v become zero."""
        if self.passes.launched and not self.carrier.elastic:
            raise UnsupportedUse(
                "load_state_dict() between backward() and step(): gradients are being exchanged; call it after step()"
            )
        own, added = self.strategy.split(state_dict)
        if self.loaded and self.carrier.exchanges_in_backward and self._keeps_any():
            self.tell_once("loaded twice", LOADED_TWICE)
        self.passes.synchronized = False
        self.passes.close()
        self.own("load_state_dict")(own, *args, **kwargs)
        self.forget()
        self.loaded = self.groups.changed = True
        self.strategy.load(added)

    def forget(self) -> None:
        """Discard u, v and the present step, before the weights and the optimizer's state are replaced."""
        self.exchange.abandon()
        self.exchange.clear()
        self.update.prepare(self.optimizer, self.exchange)
        self.watch = GradientWatch()
        self.strategy.forget()


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of this backward pass."""
    eager = torch.compiler.disable(callback)
    torch.autograd.Variable._execution_engine.queue_callback(eager)  # type: ignore[attr-defined]


def all_alive() -> list[Session]:
    """Return the sessions that still have their parameters, compressing or not, in the order of wrapping."""
    return [session for session in base.sessions() if isinstance(session, Session)]


def live() -> list[Session]:
    """Return the sessions of `all_alive` that compress at present."""
    return [session for session in all_alive() if not session.strategy.stock]


def session_of(optimizer: object) -> Session | None:
    """Return the session of an optimizer, or None."""
    found = getattr(optimizer, "_dgc", None)
    return found if isinstance(found, Session) else None


def _remove(hooks: list[torch.utils.hooks.RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
