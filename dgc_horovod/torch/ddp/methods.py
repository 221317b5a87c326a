"""The methods of an optimizer whose gradients torch.distributed carries: of plain models, and of DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from dgc_horovod.config_check import check_agreement
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.torch.ddp.densities import SameDensity
from dgc_horovod.torch.ddp.hook import after_ddp, as_it_is, install
from dgc_horovod.torch.ddp.nodes import transports
from dgc_horovod.torch.ddp.transport import Group, ProcessGroupCollectives
from dgc_horovod.torch.gradients import moments
from dgc_horovod.torch.gradients.dense_path import ReduceSettings, all_finite
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.gradients.node_exchange import exchange_of
from dgc_horovod.torch.gradients.scaling import scale_of
from dgc_horovod.torch.methods import FROZEN, ExchangeMethods
from dgc_horovod.torch.wrapping import owners, steps
from dgc_horovod.torch.wrapping.arguments import agreed_fields

TOO_MANY_PASSES = (
    "a parameter got a gradient more than backward_passes_per_step={passes} times before step(); pass the number of "
    "backward passes that are summed"
)
ACCUMULATED = (
    "backward() was called again before step(): the second gradient was added to an update, which has been through the "
    "exchange. Put all backward passes of a step but the last inside `with model.no_sync():`. To give an update up, "
    "call optimizer.zero_grad() before the next backward(); after this error make a new DistributedDataParallel and "
    "register it with a new optimizer"
)
NOT_EXCHANGED = (
    "step() without gradients that have been exchanged: since the last step there was no forward and backward pass "
    "outside of model.no_sync(), or it went to model.module, or left out a parameter (find_unused_parameters=True of "
    "DistributedDataParallel allows that), or optimizer.zero_grad() came after it, or the model has been put into "
    "another DistributedDataParallel since: register that with a new optimizer"
)
UNUSED = (
    "step() without gradients that have been exchanged: the last backward pass has brought no gradient for {names}, "
    "and DistributedDataParallel waits for one of every parameter. Where a parameter, or an output of the model, takes "
    "no part in the loss, or is frozen after DistributedDataParallel was made, pass find_unused_parameters=True to it. "
    "To a loss that is made of gradients alone (torch.autograd.grad), which leaves out the last bias, add "
    "0 * output.sum()"
)
LOADED_TWICE = (
    "a second load_state_dict() without a step after the first has emptied what load_checkpoint() had brought of u and "
    "v. accelerator.prepare(optimizer) does so: call load_checkpoint() after it"
)
ANOTHERS_STEP = (
    "this step() was taken from the optimizer before register() or DistributedOptimizer(), and knows nothing of the "
    "exchange. Take it afterwards. accelerate takes it under fp16: pass register() what accelerator.prepare() has "
    "returned (trainer.optimizer), and not what is inside"
)
_NAMED = 5  # parameters in a message


class ProcessGroupMethods(ExchangeMethods):
    """In the class of an optimizer of ``DistributedOptimizer``. Never instantiated itself."""

    _dgc_takes_part = True
    _dgc_process_group: Group
    _dgc_settings: ReduceSettings
    _dgc_same_density: SameDensity | None = None  # where the ranks' densities may differ

    def _dgc_agree(self: Any) -> None:
        devices: dict[torch.device, int] = {}
        parameters = self._dgc_parameters
        self._dgc_boundaries = {p: devices.setdefault(p.device, len(devices)) for p in parameters.values()}
        check_agreement(ProcessGroupCollectives(self._dgc_process_group, "start"), self._dgc_agreed_fields())

    def _dgc_agreed_fields(self: Any) -> dict[str, str]:
        parameters = self._dgc_parameters
        return {
            **agreed_fields(self, parameters, self._dgc_config),
            "average": str(self._dgc_settings.averages),
            "backward_passes_per_step": str(self.backward_passes_per_step),
            "devices": "\n".join(f"{name} {self._dgc_boundaries[p]}" for name, p in parameters.items()),
        }

    def _dgc_group_name(self: Any) -> str:
        return f"process group {self._dgc_process_group.ranks}"

    def _dgc_exchange(self: Any) -> GradientExchange:
        config, collectives = self._dgc_config, ProcessGroupCollectives(self._dgc_process_group, self._dgc_tag)
        parameters, boundaries, scale = self._dgc_parameters, self._dgc_boundaries, scale_of(self._dgc_scaler)
        groups = transports(collectives, config, self._dgc_settings.averages, parameters)
        return exchange_of(parameters, boundaries, config, groups, self._dgc_settings, scale)

    def _dgc_build(self: Any) -> None:
        ExchangeMethods._dgc_build(self)
        warmup = self._dgc.config.warmup
        if warmup is not None and warmup.needs_epoch and self._dgc.collectives.workers > 1:
            self._dgc_same_density = SameDensity(self._dgc.buckets, self._dgc.collectives)

    def _dgc_check_density(self: Any) -> None:
        """Before anything of a step is sent: see `SameDensity`."""
        if self._dgc_same_density is not None:
            self._dgc_same_density.check()

    def _dgc_hand_over(self: Any, p: torch.Tensor) -> Callable[[], torch.Tensor]:
        self._dgc_check_density()
        return ExchangeMethods._dgc_hand_over(self, p)

    def flush(self: Any) -> None:
        """See `StateMethods.flush`; a rank that is alone here waits, and meets no packet of the others."""
        self._dgc_check_between_steps()  # first: a rank that may not flush may call it again, after step()
        self._dgc.collectives.meet("flush")
        ExchangeMethods.flush(self)

    def _dgc_ready(self: Any, p: torch.Tensor) -> None:
        left = self._dgc_passes_left[p] = self._dgc_passes_left[p] - 1
        if left < 0:
            raise UnsupportedUse(TOO_MANY_PASSES.format(passes=self.backward_passes_per_step))
        self._handles[p] = (self._dgc_hand_over(p) if left == 0 else None, None)

    def _dgc_finish_exchange(self: Any) -> None:
        for p in self._dgc_parameters.values():  # in one order on every rank
            if self._handles.get(p, (None,))[0] is None:
                self._handles[p] = (self._dgc_hand_over(p), None)
        taken: set[int] = set()
        for p, (result, _) in self._handles.items():
            _put(p, result(), taken)
        self._dgc_reset_passes()
        self._synchronized = True

    def _dgc_reset(self: Any) -> None:
        self._synchronized, self._should_synchronize = False, True
        self._dgc_reset_passes()

    def _dgc_reset_passes(self: Any) -> None:
        self._handles.clear()
        self._dgc_passes_left = dict.fromkeys(self._dgc_parameters.values(), self.backward_passes_per_step)

    @contextmanager
    def skip_synchronize(self: Any) -> Iterator[None]:
        """Inside, ``step`` applies what stands in ``p.grad`` after ``synchronize``."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True


class DataParallelMethods(ProcessGroupMethods):
    """In the class of an optimizer that is registered with a DistributedDataParallel model.

    After ``backward`` outside of ``no_sync``, ``p.grad`` holds the update, as it holds the average with DDP alone: what
    scripts do to it then (unscale, clip) they do to the same numbers on every rank.
    """

    def _register_hooks(self: Any) -> None:
        self._requires_update.update(self._dgc_parameters.values())
        install(self._dgc_model(), self)

    def _dgc_carry(self: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Hand over the gradients of one bucket of DDP.

        DDP gets them back as they are and puts them where they were. After it has done so, in the same backward pass,
        all exchanges are waited for, and ``p.grad`` gets what is the same on every rank.
        """
        if self._synchronized and not self._dgc_offered:
            steps.check_not_stepped_otherwise(self)
            if any(self._dgc_watch.writes_to(p) is not None for p in bucket.parameters()):
                raise UnsupportedUse(ACCUMULATED)
        views = bucket.gradients() if self._dgc_model().gradient_as_bucket_view else None
        for i, p in enumerate(bucket.parameters()):
            if p not in self._dgc.names:  # frozen since DDP was made
                continue
            if p.grad is None and views is not None:  # unused here
                p.grad = views[i]
            self._handles[p] = (self._dgc_hand_over(p), None)
        if bucket.is_last():
            after_ddp(self._dgc_end_backward)
        return as_it_is(bucket)

    def _dgc_finish_exchange(self: Any) -> None:
        """See `ProcessGroupMethods`; what is frozen stays where it is, as with DDP alone."""
        ProcessGroupMethods._dgc_finish_exchange(self)
        self._dgc_withheld = {p: p.grad for p in self._dgc_parameters.values() if not p.requires_grad}
        self._dgc_left_alone = set(self._dgc_withheld)
        for p in self._dgc_withheld:
            p.grad = None

    def synchronize(self: Any) -> None:
        """See `ExchangeMethods.synchronize`; an update that no weight gets goes on waiting, as much of it on each rank.

        Networks that take turns in one optimizer would lose it. Of what stays frozen nothing waits.
        """
        self._dgc_withheld = {}
        ExchangeMethods.synchronize(self)
        for p, update in self._dgc_withheld.items() if self._dgc_may_apply else ():
            if self._dgc.is_compressed(p) and self._dgc_frozen_for.get(p, 0) < FROZEN and all_finite([update]):
                moments.add_residual(self._dgc, p, update.float() / self._dgc.loss_scale())
        self._dgc_withheld = {}

    def _dgc_end_backward(self: Any) -> None:
        """The backward pass is over, and every ``p.grad`` is where DDP has it."""
        self._dgc_watch.look_again()
        self.synchronize()
        self._dgc_offered = False

    def load_state_dict(self: Any, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """See `ExchangeMethods`."""
        kept = self._dgc.buckets.state_arrays().values() if self._dgc_loaded else ()
        if any(x.any() for arrays in kept for x in arrays.values()):
            self._tell_once("loaded twice", LOADED_TWICE)
        ExchangeMethods.load_state_dict(self, state_dict, *args, **kwargs)

    @property
    def _step_supports_amp_scaling(self: Any) -> bool:
        self._dgc_offered = True
        return False

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Apply what ``backward`` has brought; see `ExchangeMethods.step`.

        Raises:
            UnsupportedUse: nothing was exchanged since the last step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        owners.check(self)
        if not self._synchronized:
            raise UnsupportedUse(self._dgc_why_not_exchanged())
        with self.skip_synchronize():
            returned = ExchangeMethods.step(self)
        return returned if closure is None else loss

    def _dgc_why_not_exchanged(self: Any) -> str:
        """What is said of a step without an update; DDP calls no hook for a bucket of which a gradient is missing."""
        model, parameters = self._dgc_model(), self._dgc_parameters
        missing = [repr(name) for name, p in parameters.items() if p not in self._handles and _brings_nothing(p)]
        # of the last forward pass: whether it was outside of no_sync(); the model may be gone
        in_sync = getattr(model, "require_forward_param_sync", False) and not model.find_unused_parameters
        if not (in_sync and 0 < len(missing) < len(parameters)):
            return NOT_EXCHANGED
        others = f" and {len(missing) - _NAMED} others" if len(missing) > _NAMED else ""
        return UNUSED.format(names=", ".join(missing[:_NAMED]) + others)


def _brings_nothing(p: torch.Tensor) -> bool:
    return not p.requires_grad or p.grad is None or not p.grad.any()


def _put(p: torch.Tensor, update: torch.Tensor, taken: set[int]) -> None:
    """Give ``p.grad`` an update, in its own memory, unless that is in `taken`: autograd lets sums share a gradient."""
    assert p.grad is not None
    if p.grad.is_sparse:
        p.grad = update
    elif update is not p.grad:
        if p.grad.data_ptr() in taken:
            p.grad = torch.empty_like(p)
        p.grad.copy_(update)
    if not p.grad.is_sparse and p.grad.numel():
        taken.add(p.grad.data_ptr())
