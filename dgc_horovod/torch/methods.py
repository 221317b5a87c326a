"""The methods of an optimizer whose gradients are exchanged, whoever carries them; an adapter adds its own."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch

from dgc_horovod.config import DGCConfig
from dgc_horovod.config_check import unique_tag
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.kernels.contract import Accumulation
from dgc_horovod.notices import describe, of_skipped, stop_if_skipped
from dgc_horovod.torch import epochs
from dgc_horovod.torch.clipping import calls as clip_calls
from dgc_horovod.torch.gradients.dense_path import not_finite_of
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.gradients.grad_guard import GradientWatch
from dgc_horovod.torch.gradients.replica_check import Replicas
from dgc_horovod.torch.gradients.scaling import already_unscaled, scale_of
from dgc_horovod.torch.state_methods import StateMethods
from dgc_horovod.torch.updates.base import PlainUpdate, drop_momentum
from dgc_horovod.torch.wrapping import owners, steps
from dgc_horovod.torch.wrapping.notices import (
    ADDED_LATER,
    CHANGED_UPDATE,
    DROPPED,
    LATE_CHANGE,
    LATE_HOOK,
    SCALER_LEFT_OUT,
    SCALER_NOT_PASSED,
    STEPPED_TWICE,
    SYNCHRONIZED_TWICE,
    TAKEN_AWAY,
    UNSCALED_TOO_EARLY,
)

_log = logging.getLogger("dgc_horovod")
FROZEN = 6  # steps after which what waits of a frozen parameter is dropped
_FADED = 1e-8  # so much of a momentum is nothing
# of torch's wrapper around every step; its attributes are also on a function that functools.wraps puts around it
_HOOKED = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__
_UNUSUAL = 10  # steps in a row that a GradScaler skips to find its scale


class ExchangeMethods(StateMethods):
    """The methods that an adapter puts over those of the user's optimizer. Never instantiated itself.

    Those that raise NotImplementedError are the adapter's: how the ranks talk to each other, and when.
    """

    _dgc_stock = False  # whether the framework's own exchange carries the gradients of the present step
    _dgc_is_undecided = False  # whether that may change
    _dgc_returned: Any = None  # by the user's own step, the last time
    _dgc_left_alone: Collection[torch.Tensor] = ()  # frozen in the backward pass: no update was put into p.grad
    _dgc_offered = False  # whether a GradScaler has looked at the updates; it may skip the step
    _dgc_steps = False  # whether `step` is under way, and not another that somebody has taken from the class before

    def _attach(self: Any, config: DGCConfig, update: PlainUpdate, grad_scaler: Any) -> None:
        """Second half of construction: agree with the other ranks, lay out the buckets, hook the gradients."""
        type(self).step = _real(type(self).step)
        for name in ("step", "synchronize", "zero_grad"):  # which run as they are in a step that a script compiles
            setattr(type(self), name, torch.compiler.disable(getattr(type(self), name)))
        type(self).step.hooked = True  # else torch puts its hooks around it, which are around what it does already
        self._dgc_update, self._dgc_scaler = update, grad_scaler
        self._dgc_may_apply, self._dgc_superseded = True, False
        self._dgc_watch = GradientWatch()
        self._dgc_told: set[str] = set()
        self._dgc_loaded = False  # a state, since the last step
        self._dgc_frozen_for: dict[torch.Tensor, int] = {}  # steps in a row, by parameter
        if not self._dgc_takes_part:
            return
        parameters = {self._parameter_names[p]: p for g in self.param_groups for p in g["params"] if p.requires_grad}
        self._dgc_config, self._dgc_parameters = config, parameters
        self._dgc_agree()
        self._dgc_tag = unique_tag("\n".join([self._dgc_group_name(), *parameters]))
        self._dgc_build()
        update.prepare(self)
        self._dgc_frozen = [p for g in self.param_groups for p in g["params"] if not p.requires_grad]
        self._dgc_count = sum(len(group["params"]) for group in self.param_groups)
        # the last known, for one that is in none any more
        self._dgc_group_of = {p: group for group in self.param_groups for p in group["params"]}
        self._dgc_may_be_regrouped = True
        clip_calls.watch()
        if self._dgc.collectives.rank == 0:
            describe(self._dgc.buckets, update.notices)
        for other in owners.in_rounds(self):  # as many on every rank, as they have agreed
            other._dgc_end_for_another()
        self._register_hooks()  # last: after an error no gradient comes here
        owners.claim(self)
        steps.watch_inside(self)

    def _dgc_agree(self: Any) -> None:
        """Compare with the other ranks what is about to be done."""
        raise NotImplementedError

    def _dgc_outer(self: Any) -> dict[str, torch.Tensor]:
        """What is the same on all ranks beside weights and the optimizer's state, by name. Nothing here."""
        return {}

    def _dgc_group_name(self: Any) -> str:
        """Name of the ranks that take part, the same on each of them."""
        raise NotImplementedError

    def _dgc_exchange(self: Any) -> GradientExchange:
        """A new exchange of the optimizer's gradients, between the ranks that there are."""
        raise NotImplementedError

    def _dgc_finish_exchange(self: Any) -> None:
        """Wait for every exchange of this step, and put what came into ``p.grad``."""
        raise NotImplementedError

    def _dgc_build(self: Any) -> None:
        """Everything that depends on which ranks there are; again whenever they change."""
        config = self._dgc_config
        self._dgc = self._dgc_exchange()
        if config.local_steps is None:  # else weights are what is exchanged
            self._dgc.buckets.ending.spoilt = partial(not_finite_of, self._dgc.names)
        self._dgc_replicas = Replicas(self._dgc_parameters, config, self._dgc.collectives)
        if config.warmup is not None and config.warmup.needs_epoch:
            epochs.observe(self._dgc.buckets)

    @property
    def _step_supports_amp_scaling(self: Any) -> bool:
        # GradScaler.step asks for this just before it calls step(), so here its use is noticed. Never True: a fused
        # step would unscale the dense path only.
        if self._dgc_scaler is None and self._dgc_takes_part:
            raise UnsupportedUse(SCALER_NOT_PASSED)
        self._dgc_offered = True
        return False

    def _register_hooks(self: Any) -> None:
        """Call `_dgc_ready` after each backward pass of a parameter, as long as the optimizer is alive."""
        weak = weakref.ref(self)  # a script may wrap the same model again

        def ready(p: torch.Tensor) -> None:
            optimizer = weak()
            if optimizer is not None:
                hooks: Any = p._post_accumulate_grad_hooks
                if len(hooks) > 1 and not hasattr(hooks[next(reversed(hooks))], "belongs_to_dgc"):
                    optimizer._tell_once("late hook", LATE_HOOK)
                optimizer._dgc_ready(p)

        hook: Any = torch.compiler.disable(ready)
        hook.belongs_to_dgc = True
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    self._requires_update.add(p)
                    self._grad_accs.append(p.register_post_accumulate_grad_hook(hook))
        weakref.finalize(self, _remove, self._grad_accs)

    def _dgc_ready(self: Any, p: torch.Tensor) -> None:
        """A backward pass has accumulated into ``p.grad``."""
        raise NotImplementedError

    def _dgc_hand_over(self: Any, p: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Hand the gradient of `p` to the exchange; a function that waits for what belongs into ``p.grad`` then."""
        if p.grad is None:  # unused in this step; another rank may have used it
            p.grad = torch.zeros_like(p)
        if self._synchronized and self._dgc_may_apply and not self._dgc_offered:
            steps.check_update_left(self, p)
        self._synchronized = False
        if self._dgc_membership is not None:
            self._dgc_membership.check(self)
        if not p.requires_grad:
            self._dgc_fade(p)
        elif self._dgc_frozen_for:
            self._dgc_frozen_for.pop(p, None)
        self._dgc_watch.taken(p)
        group = self._dgc_group(p)
        self._dgc.clipping.adds_decay |= self._dgc_update.decay_before(group) != 0
        return self._dgc.add_gradient(p, self._accumulation_of)

    def _dgc_group(self: Any, p: torch.Tensor) -> dict[str, Any]:
        """The parameter group of `p`, which a script may have put into another since the last step."""
        if self._dgc_may_be_regrouped:
            self._dgc_group_of |= {p: group for group in self.param_groups for p in group["params"]}
            self._dgc_may_be_regrouped = False
        return self._dgc_group_of[p]  # type: ignore[no-any-return]

    def _dgc_fade(self: Any, p: torch.Tensor) -> None:
        """Of a parameter that stays frozen, what waits is dropped: it would go on moving for hundreds of steps.

        Its momentum still pushes it, as with stock Horovod, and of that, too, nothing waits longer than it lasts.
        Networks that take turns in one optimizer are not frozen for that long.
        """
        steps = self._dgc_frozen_for[p] = self._dgc_frozen_for.get(p, 0) + 1
        if steps >= FROZEN:
            factor = self._dgc_update.fading(self._dgc_group(p))
            if steps == FROZEN or factor**steps > _FADED:
                self._dgc.fade(p, 0.0 if steps == FROZEN else factor)

    def _accumulation_of(self: Any, p: torch.Tensor) -> tuple[Accumulation, float]:
        """How the gradient of the compressed tensor `p` enters the residual, and the decay to add to it before."""
        group, update = self._dgc_group(p), self._dgc_update
        update.dense = update.dense_is_stock and self._dgc.buckets.as_stock
        update.adopt_state(p, group, self.state, self._dgc)
        return update.accumulation(p, group, self._dgc), update.decay_before(group)

    def synchronize(self: Any) -> None:
        """Wait for every exchange of this step; afterwards ``p.grad`` is the same on every rank.

        Once done, another call before the next backward pass does nothing, nor does one with nothing new since the last
        step.
        """
        if not self._dgc_takes_part:
            self._synchronized = True
            return
        owners.check(self)
        if not self._handles and self._nothing_new():
            return
        if already_unscaled(self._dgc_scaler, self):
            raise UnsupportedUse(UNSCALED_TOO_EARLY)
        if self._dgc_watch.changed_since_taken():
            self._tell_once("late change", LATE_CHANGE)
        brought = bool(self._handles)
        self._dgc_finish_exchange()
        self._dgc_replicas.end(self)
        self._check_nothing_unfrozen()
        self._dgc_may_apply = self._dgc.finish()
        if not self._dgc_may_apply:
            if self._dgc_update.dense:
                self._dgc.buckets.drop_residuals()
            if self._dgc.buckets.counts.skipped_in_a_row >= _UNUSUAL:  # a GradScaler calls no step() that would tell
                self._tell_once(*of_skipped(self._dgc.buckets))
        self._dgc_watch.synchronized(self._dgc.names, brought)
        self._dgc_may_be_regrouped, self._dgc_offered = True, False

    def _nothing_new(self: Any) -> bool:
        """Whether what stands in ``p.grad`` is an update already: to exchange it again would compress it twice."""
        if self._synchronized:
            return all(p.grad is not None or not p.requires_grad for p in self._dgc.names)
        return bool(self._dgc_watch.unchanged_since_applied())

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize unless that is done or skipped, then apply the optimizer.

        A step in which any rank's gradient was not finite is applied on no rank. A closure is evaluated
        first, so that its gradients are the ones exchanged.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._dgc_takes_part:
            returned = super(type(self), self).step()  # type: ignore[misc]
            return returned if closure is None else loss
        if not (self._handles or self._synchronized) and self._dgc_watch.unchanged_since_applied():
            raise UnsupportedUse(STEPPED_TWICE)
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(SYNCHRONIZED_TWICE, stacklevel=2)
            else:
                self._check_scaler_is_used()
            self.synchronize()
        self._dgc_loaded = False
        if not self._dgc_may_apply:
            self._synchronized = False
            clip_calls.end_step(self)
            if scale_of(self._dgc_scaler)() == 1.0:
                stop_if_skipped(self._dgc.buckets)
            self._tell_once(*of_skipped(self._dgc.buckets))
            return loss
        self._dgc_with_hooks(self._apply)
        self._dgc_watch.applied(self._dgc.names)
        if not self._dgc.buckets.ranks_in_join:  # those may have another learning rate; join() compares in the end
            self._dgc_update.check_weights(self, self._dgc)
            self._dgc_replicas.begin(self._dgc.buckets.steps)
        return self._dgc_returned if closure is None else loss

    def _check_scaler_is_used(self: Any) -> None:
        """A scaler that was passed, and whose scale gradients seem to have, though it does not make this step."""
        scaler = self._dgc_scaler
        if self._dgc_offered or not isinstance(scaler, torch.amp.GradScaler) or not scaler.is_enabled():
            return
        if already_unscaled(scaler, self) or self._dgc.buckets.in_join:
            return
        if scaler.get_scale() != 1:  # last: it waits for the device
            raise UnsupportedUse(SCALER_LEFT_OUT)

    def _dgc_with_hooks(self: Any, act: Callable[[Any], None]) -> None:
        """Torch's own wrapper runs the step hooks, once, around everything that the step does."""
        with self._dgc_stepping():
            torch.optim.Optimizer.profile_hook_step(act)(self)

    @contextmanager
    def _dgc_stepping(self: Any) -> Iterator[None]:
        """Inside, the user's own step is ours to call."""
        before, self._dgc_steps = self._dgc_steps, True
        try:
            yield
        finally:
            self._dgc_steps = before

    def _apply(self: Any, _: Any) -> None:
        """After the hooks before a step, which may clip as well."""
        self._check_untouched()
        compressed = self._dgc.compressed
        self._drop_what_was_taken_away(compressed)
        clip_calls.cut_late(self)
        clip_calls.end_step(self)
        self._synchronized = False
        self._dgc_update.step(self, compressed, self._dgc_own_step)

    def _dgc_own_step(self: Any) -> None:
        self._dgc_update.begin(self)
        own_step: Any = super(type(self), self).step.__func__  # type: ignore[misc]
        if getattr(own_step, "__code__", None) is _HOOKED:  # it would run the hooks a second time
            own_step = own_step.__wrapped__
        with self._dgc_stepping():
            self._dgc_returned = own_step(self)

    def _check_nothing_unfrozen(self: Any) -> None:
        """A parameter that was frozen at wrapping is in no bucket: were it trained now, replicas would diverge."""
        late = self._dgc_frozen
        if sum(len(group["params"]) for group in self.param_groups) != self._dgc_count:
            late = [p for group in self.param_groups for p in group["params"] if p not in self._requires_update]
        for p in late:
            if p.requires_grad:
                if p not in self._parameter_names:
                    raise UnsupportedUse(ADDED_LATER.format(shape=tuple(p.shape)))
                raise UnsupportedUse(
                    f"{self._parameter_names[p]!r} did not require a gradient when the optimizer was wrapped and "
                    "does now; wrap the optimizer while it does, and freeze it afterwards"
                )

    def _check_untouched(self: Any) -> None:
        """Notice a script that clips after synchronize() by its own hands: that is an update, not a gradient."""
        if self._dgc_watch.changed_since_synchronized(scale_of(self._dgc_scaler)()):
            self._tell_once("changed update", CHANGED_UPDATE)

    def _drop_what_was_taken_away(self: Any, compressed: list[torch.Tensor]) -> None:
        """Of a parameter whose update a script has set to None nothing waits: it would come in a burst later on."""
        for p in compressed:
            if p.grad is None and p.requires_grad and p not in self._dgc_left_alone:
                self._dgc.fade(p, 0.0)
                drop_momentum(self._dgc, p)
                self._tell_once("taken away", TAKEN_AWAY.format(name=self._dgc.names[p]))

    def _dgc_is_exchanging(self: Any) -> bool:
        """Whether ``p.grad`` has been handed to the exchange, or holds an update that is not applied yet."""
        return self._synchronized or self._dgc_has_launched()

    def _tell_once(self: Any, key: str, text: str) -> None:
        if key not in self._dgc_told and self._dgc.collectives.rank == 0:
            self._dgc_told.add(key)
            _log.warning("dgc_horovod: %s", text)

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        """As torch's, and an error between backward and step, while gradients are being exchanged."""
        if self._handles:
            raise UnsupportedUse(
                "optimizer.zero_grad() was called after backward() but before step() or synchronize(); the gradients "
                "are being exchanged. Call it after step(), or before backward(). After an exception in between, on "
                "every rank, give the step up first: optimizer.synchronize(); optimizer.zero_grad()"
            )
        if self._dgc_takes_part and self._synchronized and self._dgc_may_apply:
            if not (self._dgc_stock or self._dgc_offered):
                steps.check_not_stepped_otherwise(self)
                if any(p.grad is not None and bool(p.grad.any()) for p in self._dgc.names):  # else nothing was in it
                    self._tell_once("dropped", DROPPED)
        self._synchronized = False
        super(type(self), self).zero_grad(*args, **kwargs)  # type: ignore[misc]


def _real(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step`, but for the one by which torch fills an empty state: that is the user's optimizer's own, on this rank."""

    @wraps(step)
    def stepped(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None or not steps.is_trial(self):
            return step(self, closure)
        self._dgc_with_hooks(lambda optimizer: optimizer._dgc_own_step())
        return self._dgc_returned

    return stepped


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
