"""The methods that make an optimizer compress, put in place of Horovod's by ``optimizer._adopt``."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.optimizer import _DistributedOptimizer

from dgc_horovod import envvars
from dgc_horovod.config import DGCConfig
from dgc_horovod.config_check import check_agreement, unique_tag
from dgc_horovod.errors import NotFinite, UnsupportedUse
from dgc_horovod.kernels.contract import Accumulation
from dgc_horovod.notices import describe
from dgc_horovod.recording import begin_as_environment_says
from dgc_horovod.torch import epochs, settling, state
from dgc_horovod.torch.clipping import calls as clip_calls
from dgc_horovod.torch.elastic import Membership
from dgc_horovod.torch.gradients.dense_path import ReduceSettings
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.gradients.grad_guard import GradientWatch
from dgc_horovod.torch.gradients.node_exchange import NodeGradientExchange
from dgc_horovod.torch.gradients.replica_check import Replicas
from dgc_horovod.torch.gradients.scaling import already_unscaled, scale_of
from dgc_horovod.torch.nodes import transports
from dgc_horovod.torch.transport import WITHOUT_CUDA, HorovodCollectives, needs_host
from dgc_horovod.torch.updates.base import PlainUpdate
from dgc_horovod.torch.wrapping import owners
from dgc_horovod.torch.wrapping.arguments import agreed_fields, boundaries
from dgc_horovod.torch.wrapping.notices import (
    CHANGED_UPDATE,
    LATE_CHANGE,
    SCALER_NOT_PASSED,
    SYNCHRONIZED_TWICE,
    UNSCALED_TOO_EARLY,
    clipping_learned,
)

_log = logging.getLogger("dgc_horovod")
_FROZEN = 6  # steps after which what waits of a frozen parameter is dropped
_FADED = 1e-8  # so much of a momentum is nothing


class CompressedMethods:
    """The methods that replace Horovod's in the class made by ``optimizer._adopt``. Never instantiated itself."""

    _dgc: GradientExchange
    _dgc_update: PlainUpdate
    _dgc_stock = False  # whether stock Horovod exchanges the gradients of the present step
    _dgc_is_undecided = False  # whether that may change

    def _attach(self: Any, config: DGCConfig, update: PlainUpdate, grad_scaler: Any) -> None:
        """Second half of construction: agree with the other ranks, lay out the buckets, hook the gradients."""
        self._dgc_update, self._dgc_scaler = update, grad_scaler
        self._dgc_may_apply, self._dgc_superseded = True, False
        self._dgc_watch = GradientWatch()
        self._dgc_told: set[str] = set()
        self._dgc_loaded = False  # a state, since the last step
        self._dgc_frozen_for: dict[torch.Tensor, int] = {}  # steps in a row, by parameter
        if not self.process_set.included():
            return
        parameters = {self._parameter_names[p]: p for g in self.param_groups for p in g["params"] if p.requires_grad}
        self._dgc_config, self._dgc_parameters = config, parameters
        self._dgc_boundaries = boundaries(self, parameters)
        self._groups = None  # their only use here is as bucket boundaries
        self._dgc_membership = Membership(self.process_set) if envvars.horovod_elastic() else None
        if self._dgc_membership is None:
            check_agreement(HorovodCollectives(self.process_set, "start"), self._dgc_agreed_fields())
        self._dgc_tag = unique_tag("\n".join([f"process set {self.process_set.process_set_id}", *parameters]))
        self._dgc_build()
        update.prepare(self)
        self._dgc_frozen = [p for g in self.param_groups for p in g["params"] if not p.requires_grad]
        self._dgc_group_of = {p: i for i, g in enumerate(self.param_groups) for p in g["params"]}
        self._register_hooks()
        owners.claim(self)
        clip_calls.watch()
        if hvd.rank() == 0:
            begin_as_environment_says(config)
        if self._dgc.collectives.rank == 0:
            describe(self._dgc.buckets, update.notice)
            if any(needs_host(p) for p in parameters.values()):
                _log.warning("dgc_horovod: %s", WITHOUT_CUDA)

    def _dgc_agreed_fields(self: Any) -> dict[str, str]:
        return agreed_fields(self, self._dgc_parameters, self._dgc_boundaries, self._dgc_config)

    def _dgc_build(self: Any) -> None:
        """Everything that depends on which ranks there are; again whenever they change."""
        config, collectives = self._dgc_config, HorovodCollectives(self.process_set, self._dgc_tag)
        settings = ReduceSettings(self.op == hvd.Average, self.gradient_predivide_factor, self.sparse_as_dense)
        parameters, boundaries, scale = self._dgc_parameters, self._dgc_boundaries, scale_of(self._dgc_scaler)
        groups = transports(collectives, config, settings.averages, parameters)
        if len(groups) == 1:
            self._dgc = GradientExchange(parameters, boundaries, config, collectives, settings, scale)
        else:
            self._dgc = NodeGradientExchange(parameters, boundaries, config, groups, settings, scale)
        self._dgc_replicas = Replicas(self._dgc_parameters, config, collectives)
        if config.warmup is not None and config.warmup.needs_epoch:
            epochs.observe(self._dgc.buckets)

    @property
    def _step_supports_amp_scaling(self: Any) -> bool:
        # GradScaler.step asks for this just before it calls step(), so here its use is noticed. Never True: a fused
        # step would unscale the dense path only.
        if self._dgc_scaler is None and self.process_set.included():
            raise UnsupportedUse(SCALER_NOT_PASSED)
        return False

    def _register_hooks(self: Any) -> None:
        # The hook must not keep the optimizer alive: a script may wrap the same model again.
        weak = weakref.ref(self)

        def ready(p: torch.Tensor) -> None:
            optimizer = weak()
            if optimizer is not None:
                optimizer._make_hook(p)()

        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    self._requires_update.add(p)
                    self._grad_accs.append(p.register_post_accumulate_grad_hook(ready))
        weakref.finalize(self, _remove, self._grad_accs)

    def _allreduce_grad_async(self: Any, p: torch.Tensor) -> tuple[Callable[[], torch.Tensor], None]:
        """Called by Horovod's hook or synchronize when the gradient of `p` is to be exchanged."""
        if p.grad is None:  # unused in this step; another rank may have used it
            p.grad = torch.zeros_like(p)
        self._synchronized = False
        if self._dgc_membership is not None:
            self._dgc_membership.check(self)
        if not p.requires_grad:
            self._dgc_fade(p)
        elif self._dgc_frozen_for:
            self._dgc_frozen_for.pop(p, None)
        self._dgc_watch.taken(p)
        return self._dgc.add_gradient(p, self._accumulation_of), None

    def _dgc_fade(self: Any, p: torch.Tensor) -> None:
        """Of a parameter that stays frozen, what waits is dropped: it would go on moving for hundreds of steps.

        Its momentum still pushes it, as with stock Horovod, and of that, too, nothing waits longer than it lasts.
        Networks that take turns in one optimizer are not frozen for that long.
        """
        steps = self._dgc_frozen_for[p] = self._dgc_frozen_for.get(p, 0) + 1
        if steps >= _FROZEN:
            factor = self._dgc_update.fading(self.param_groups[self._dgc_group_of[p]])
            if steps == _FROZEN or factor**steps > _FADED:
                self._dgc.fade(p, 0.0 if steps == _FROZEN else factor)

    def _accumulation_of(self: Any, p: torch.Tensor) -> tuple[Accumulation, float]:
        """How the gradient of the compressed tensor `p` enters the residual, and the decay to add to it before."""
        group, update = self.param_groups[self._dgc_group_of[p]], self._dgc_update
        update.dense = update.learns_second and self._dgc.buckets.learns_second
        update.adopt_state(p, group, self.state, self._dgc)
        return update.accumulation(p, group), update.decay_before(group)

    def synchronize(self: Any) -> None:
        """Wait for every exchange of this step; afterwards ``p.grad`` is the same on every rank.

        Once done, another call before the next backward pass does nothing.
        """
        if not self.process_set.included():
            return _DistributedOptimizer.synchronize(self)
        owners.check(self)
        if not self._handles and self._nothing_new():
            return
        if already_unscaled(self._dgc_scaler, self):
            raise UnsupportedUse(UNSCALED_TOO_EARLY)
        if self._dgc_watch.changed_since_taken():
            self._tell_once("late change", LATE_CHANGE)
        _DistributedOptimizer.synchronize(self)
        self._dgc_replicas.end(self)
        self._check_nothing_unfrozen()
        self._dgc_may_apply = self._dgc.finish()
        if not self._dgc_may_apply and self._dgc_update.dense:
            self._dgc.buckets.drop_residuals()
        self._dgc_watch.synchronized(self._dgc.names)

    def _nothing_new(self: Any) -> bool:
        """Whether what stands in ``p.grad`` is an update already: to exchange it again would compress it twice."""
        if self._synchronized:
            return all(p.grad is not None for p in self._dgc.names)
        if self._dgc_watch.unchanged_since_applied():
            raise UnsupportedUse(
                "step() was called again with no backward pass and no zero_grad() since the last one; p.grad still "
                "holds the update that has been applied. Call backward() first"
            )
        return False

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize unless that is done or skipped, then apply the optimizer.

        A step in which any rank's gradient was not finite is applied on no rank. A closure is evaluated
        first, so that its gradients are the ones exchanged.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.process_set.included():
            super(type(self), self).step()  # type: ignore[misc]
            return loss
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(SYNCHRONIZED_TWICE, stacklevel=2)
            self.synchronize()
        self._synchronized, self._dgc_loaded = False, False
        if not self._dgc_may_apply:
            clip_calls.end_step(self)
            if self._dgc_config.on_nonfinite == "stop" and scale_of(self._dgc_scaler)() == 1.0:
                raise NotFinite(self._dgc.not_finite)
            self._tell_once("not finite", self._dgc.not_finite)
            return loss
        self._check_untouched()
        clip_calls.cut_late(self)
        clip_calls.end_step(self)
        # torch's own wrapper runs the step hooks, once, around everything that the step does
        torch.optim.Optimizer.profile_hook_step(self._apply)(self)
        self._dgc_watch.applied(self._dgc.names)
        if not self._dgc.buckets.ranks_in_join:  # those may have another learning rate; join() compares in the end
            self._dgc_replicas.begin(self._dgc.buckets.steps)
            settling.watch(self)
        return loss

    def _apply(self: Any, _: Any) -> None:
        self._dgc_update.step(self, self._dgc.compressed, self._dgc_own_step)

    def _dgc_own_step(self: Any) -> None:
        own_step: Any = super(type(self), self).step.__func__  # type: ignore[misc]
        if getattr(own_step, "hooked", False):  # torch's wrapper, which would run the hooks a second time
            own_step = own_step.__wrapped__
        own_step(self)

    def _check_nothing_unfrozen(self: Any) -> None:
        """A parameter that was frozen at wrapping is in no bucket: were it trained now, replicas would diverge."""
        late = self._dgc_frozen
        if sum(len(group["params"]) for group in self.param_groups) != len(self._dgc_group_of):
            late = [p for group in self.param_groups for p in group["params"] if p not in self._requires_update]
        for p in late:
            if p.requires_grad:
                raise UnsupportedUse(
                    f"{self._parameter_names[p]!r} did not require a gradient when the optimizer was wrapped and "
                    "does now; wrap the optimizer while it does, and freeze it afterwards"
                )

    def _check_untouched(self: Any) -> None:
        """Notice a script that clips after synchronize(): what it clips is an update, not a gradient."""
        if self._dgc_watch.changed_since_synchronized(scale_of(self._dgc_scaler)()):
            if not self._dgc.undo_clipping():
                self._tell_once("changed update", CHANGED_UPDATE)
            elif self._dgc.clipping.by_hand is not None:
                self._tell_once("clipping", clipping_learned(self._dgc.clipping.by_hand))

    def _dgc_check_between_steps(self: Any) -> None:
        if self._handles or (self._synchronized and self._dgc_may_apply):
            raise UnsupportedUse(
                "residuals can be saved, loaded and flushed between two steps only: after step(), before backward()"
            )

    def _dgc_mode(self: Any) -> str:
        """Which exchange is at work, where there are several; for a checkpoint."""
        return ""

    def _dgc_resume(self: Any, mode: str) -> None:
        """Go on with the exchange that was at work when a state was saved."""

    def _dgc_finish_round(self: Any) -> None:
        """End what spans several steps: nothing does here."""

    def _dgc_is_exchanging(self: Any) -> bool:
        """Whether ``p.grad`` has been handed to the exchange, or holds an update that is not applied yet."""
        return self._synchronized or any(handle is not None for handle, _ in self._handles.values())

    def _tell_once(self: Any, key: str, text: str) -> None:
        if key not in self._dgc_told and self._dgc.collectives.rank == 0:
            self._dgc_told.add(key)
            _log.warning("dgc_horovod: %s", text)

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """As torch's, and an error between backward and step, while gradients are being exchanged."""
        if self._handles:
            raise UnsupportedUse(
                "optimizer.zero_grad() was called after backward() but before step() or synchronize(); the gradients "
                "are being exchanged. Call it after step(), or before backward(). After an exception in between, on "
                "every rank, give the step up first: optimizer.synchronize(); optimizer.zero_grad()"
            )
        self._synchronized = False
        super(type(self), self).zero_grad(set_to_none)  # type: ignore[misc]

    def state_dict(self: Any) -> dict[str, Any]:
        """As torch's. It has the same entries on every rank at any time: Horovod broadcasts them one by one.

        Between steps with momentum correction, momentum and moments of compressed tensors are this rank's own
        (``residual_state_dict``); here they are zero.
        """
        if self.process_set.included():
            self._dgc_update.prepare(self)
        return super(type(self), self).state_dict()  # type: ignore[misc]

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """As torch's; a stock checkpoint's momentum and moments are taken over, and u and v start empty."""
        if self._handles and self._dgc_membership is None:
            raise UnsupportedUse(
                "load_state_dict() between backward() and step(): gradients are being exchanged; call it after step()"
            )
        _DistributedOptimizer.load_state_dict(self, state_dict)
        if self.process_set.included():
            self._dgc_forget()
            self._dgc_loaded = True

    def _dgc_forget(self: Any) -> None:
        """u, v and the step under way: the weights and the optimizer's state are about to be others."""
        self._dgc.abandon()
        self._dgc.buckets.clear()
        self._dgc_update.prepare(self)
        self._dgc_watch = GradientWatch()

    def _dgc_share_loaded(self: Any, root: int) -> None:
        """Share what rank `root` has loaded beside torch's state: nothing here."""

    def residual_state_dict(self: Any) -> dict[str, Any]:
        """What this rank has kept of gradients that the model has not had yet: training state, of this rank alone.

        Returns:
            A dict of numbers and tensors, copies, for ``torch.save``; empty for a rank outside the process set.

        Raises:
            UnsupportedUse: between backward() and step().
        """
        return state.to_dict(state.kept_by(self)) if self.process_set.included() else {}

    def load_residual_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """Go on, bit for bit, from ``residual_state_dict()`` of this rank; after ``load_state_dict``.

        Raises:
            CheckpointError: it is of another rank, another number of ranks or another model.
        """
        if self.process_set.included():
            state.load_residuals(self, state.from_dict(state_dict))

    def flush(self: Any) -> None:
        """Apply everything that the ranks have kept, by one dense exchange: no residual is left on any rank.

        Momentum goes where the optimizer has it, so that ``state_dict()`` is a stock checkpoint of which nothing is
        missing. SGD: ``w -= lr*mean(v)``, ``momentum_buffer += mean(u)``, exact. Adam: the same for v, mean moments;
        what 8-bit coding has left of small tensors stays. Other optimizers, and methods without momentum correction: a
        step of theirs with ``mean(v)`` as gradient. Every rank must call it, between two steps; gradients are cleared.

        Cost: an fp32 allreduce of v and of u.
        """
        if self.process_set.included():
            state.flush(self)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Raises UnsupportedUse: hooks, buckets and collectives belong to this object in this process."""
        raise UnsupportedUse(
            "a wrapped optimizer cannot be copied or pickled; keep optimizer.state_dict(), or copy the model and wrap "
            "a new optimizer over the copy"
        )

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        """Raises UnsupportedUse: the ranks have agreed on the buckets."""
        raise UnsupportedUse(
            "add_param_group after wrapping: the ranks have already agreed on names and buckets; add the group to the "
            "optimizer first, then wrap it"
        )

    def set_epoch(self: Any, epoch: int) -> None:
        """Tell the warm-up which epoch (from 0) it is, where no DistributedSampler does."""
        if self.process_set.included():
            self._dgc.buckets.epoch = epoch

    def compression_stats(self: Any) -> dict[str, Any]:
        """What this rank has exchanged since it was wrapped.

        Returns:
            ``steps``; ``elements`` and ``selected`` of the sparse path; ``bytes_sent`` and ``bytes_received``:
            everything handed to and received from collectives, dense path and headers included;
            ``bytes_inside_node``: what came from workers of the same node, which is in neither of them;
            ``bytes_dense`` and ``bytes_dense_received``: the same for an fp32 ring allreduce of every gradient;
            ``compress_seconds``, ``decode_seconds``; ``exchange_seconds`` waiting for other ranks; ``skipped`` steps;
            figures of health, see `Diagnostics.close`; ``buckets``, see `BucketMeter.stats`. Costs a read of residuals.
        """
        if not self.process_set.included():
            return {}
        return self._dgc.buckets.stats()


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
