"""The models that ``register`` supports, the names of their parameters, and DDP's communication hook.

The hook passes gradients to the exchange, and waits for all updates after the last bucket.
"""

import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.errors import ConfigError, UnsupportedUse
from dgc_horovod.torch.session.session import Session, after_backward
from dgc_horovod.torch.wrapping.checks import Named, data_parallel_around

COMPILED = "_orig_mod"  # name of the inner module of torch.compile
_WRAPPED = (COMPILED, "_forward_module")  # names of the inner module of torch.compile and of Lightning's Fabric
_OPTIONS = (
    (lambda model: model.mixed_precision is not None, "mixed_precision; use torch.autocast"),
    (lambda model: model._use_python_reducer, 'optimize_ddp = "python_reducer" of torch._dynamo; leave it at True'),
    (lambda model: bool(model._delay_all_reduce_params), "delay_all_reduce_named_params; leave it out"),
    (lambda model: getattr(model, "skip_all_reduce_unused_params", False),
     "skip_all_reduce_unused_params=True; ranks would exchange different buckets; leave it out"),
    (lambda model: any(hasattr(p, "_in_backward_optimizers") for p in model.parameters()),
     "an optimizer in the backward pass; compression needs the step() of a registered optimizer"),
)  # fmt: skip
JOINING = (
    "Join does not work with a compressed model: ranks without more data would add zero gradients without their "
    "residuals. Give every rank the same number of batches (DistributedSampler with drop_last=True)"
)
SUPERSEDED = (
    "the optimizer that this DistributedDataParallel model was registered with does not exist any more; call "
    "register() with the present optimizer"
)


def data_parallel(model: Any) -> DistributedDataParallel:
    """Return the DistributedDataParallel model in `model`, which may be wrapped.

    Raises:
        ConfigError: there is none.
        UnsupportedUse: the model is sharded, or exchanges gradients in a way that a hook cannot replace.
    """
    found = unwrapped(model)
    if not isinstance(found, DistributedDataParallel):
        if "FullyShardedDataParallel" in type(found).__name__ or hasattr(found, "unshard"):
            raise UnsupportedUse(
                "the model is sharded (FSDP): each rank has a part of every parameter, but only gradients of replicas "
                "can be compressed. Use DistributedDataParallel if a replica fits on a device; else see HYBRID_SHARD "
                "of FSDP, whose exchange between nodes is not compressed"
            )
        remedy = "wrap it first, or pass the optimizer of a plain model to dgc_horovod.torch.ddp.DistributedOptimizer"
        if data_parallel_around(getattr(found, "parameters", tuple)()):
            remedy = (
                "a DistributedDataParallel is around it already: pass that. transformers.Trainer has it in "
                "trainer.model_wrapped, Lightning in trainer.strategy.model, and accelerator.prepare(model) returns it"
            )
        raise ConfigError(f"model must be a DistributedDataParallel, got {type(found).__name__}; {remedy}")
    for used, what in _OPTIONS:
        if used(found):
            raise UnsupportedUse(f"this DistributedDataParallel has {what}")
    if any(hook is not exchange_hook for hook, _ in found._comm_hooks):
        raise UnsupportedUse(
            "this DistributedDataParallel has a communication hook already, but can have only one; remove it"
        )
    for name, module in found.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise UnsupportedUse(f"{name!r} has sparse gradients, which DDP does not pass to hooks; use sparse=False")
    return found


def unwrapped(model: Any) -> Any:
    """Return the model inside wrappers that do not change gradients (torch.compile, Fabric)."""
    inner: Any = model
    while inner is not None:
        model, modules = inner, getattr(inner, "_modules", {})
        inner = next((modules[name] for name in _WRAPPED if name in modules), None)
    return model


def bare_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer inside a wrapper of accelerate or Lightning's Fabric; others unchanged.

    Such a wrapper has no state of its own; wrappers with state (Lookahead) change the step.
    """
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer) and getattr(optimizer, "state", None) is inner.state:
        return bare_optimizer(inner)
    return optimizer


def renew_step(optimizer: Any) -> None:
    """Make accelerate's wrapper call the new step(): under fp16 it keeps a reference to the one from its construction.

    Unpickling makes the wrapper take the methods again; its own step() then sets them on the torch optimizer.
    """
    if hasattr(optimizer, "_optimizer_patched_step_method"):
        optimizer.__setstate__({})


def named_parameters(model: DistributedDataParallel) -> Named:
    """Return the parameters that DDP exchanges, with their names in the model itself, compiled or not."""
    ignored = model.parameters_to_ignore
    found = [(name, p) for name, p in model.module.named_parameters() if name not in ignored]
    return [(name.replace(f"{COMPILED}.", ""), p) for name, p in found]


def check_same_parameters(optimizer: torch.optim.Optimizer, named: Named) -> None:
    """Raise UnsupportedUse unless DDP exchanges the parameters that `optimizer` trains, and no others."""
    trained = Counter(p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    exchanged = {p: name for name, p in named if p.requires_grad}
    missing = [name for p, name in exchanged.items() if p not in trained]
    if missing:
        raise UnsupportedUse(
            f"{len(missing)} parameters are in the model but not in the optimizer ({missing[0]!r} is the first), and "
            "their gradients would differ between ranks; put them into the optimizer, or freeze them before DDP"
        )
    others = [tuple(p.shape) for p in trained if p not in exchanged]
    if others:
        raise UnsupportedUse(
            f"{len(others)} parameters of the optimizer (shapes {others[:5]}) are not exchanged by this "
            "DistributedDataParallel; give them an optimizer of their own"
        )


def bare(model: Any) -> nn.Module:
    """Return the model inside DDP, torch.compile and Fabric, whose state has no prefixes of wrappers."""
    while isinstance(found := unwrapped(model), DistributedDataParallel):
        model = found.module
    return found


# -- the communication hook


def own_exchange(group: dist.ProcessGroup, halves: bool, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket as DDP does without a hook.

    Args:
        group: process group of the model.
        halves: whether gradients are summed in half precision. Torch's fp16 hook divides before the sum and loses small
            values; this function divides after it.
        bucket: bucket of DDP.
    """
    if not halves:
        return default_hooks.allreduce_hook(group, bucket)
    buffer = bucket.buffer()
    future = dist.all_reduce(buffer.half(), group=group, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]).div_(group.size()))


class HookState:
    """The state that DDP passes to the hook: a weak reference to its model, and who takes the gradients.

    It is copied or saved with a DistributedDataParallel. The copy of the model has no hook, so the copy of this state
    has no model.

    Attributes:
        session: function that returns the session of the gradients; None if it is gone.
        own: exchange of a bucket where there is no session; None: that is an error.
    """

    def __init__(self, model: DistributedDataParallel | None = None) -> None:
        self.model = weakref.ref(model) if model is not None else lambda: None
        self.session: Callable[[], Session | None] = lambda: None
        self.own: Callable[[dist.GradBucket], torch.futures.Future[torch.Tensor]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return HookState, ()


def _state_of(model: DistributedDataParallel) -> HookState | None:
    """Return the state of our hook of `model`; None if it has no such hook."""
    states = (state for _, state in model._comm_hooks if isinstance(state, HookState))
    return next((state for state in states if state.model() is model), None)


def install(model: DistributedDataParallel) -> HookState:
    """Return the state of our hook of `model`, which gets the hook if it has none."""
    state = _state_of(model)
    if state is None:
        state = HookState(model)
        model.register_comm_hook(state, exchange_hook)
    return state


def leave_to_ddp(model: DistributedDataParallel, halves: bool) -> None:
    """Make DDP exchange the gradients of `model` itself from now on; an earlier session gets no more gradients.

    Args:
        model: model, compressed before or not.
        halves: whether in half precision.
    """
    if not halves and _state_of(model) is None:
        return  # DDP needs no hook
    state = install(model)
    before = state.session()
    if before is not None:
        before.superseded = True
    state.session, state.own = lambda: None, partial(own_exchange, model.process_group, halves)


def fall_back_to_ddp(model: DistributedDataParallel) -> None:
    """Once the session of `model` is gone, let DDP exchange its gradients itself, until the next `register`.

    Without this it is an error: a script that has registered an optimizer can register the next one.
    """
    state = _state_of(model)
    if state is not None and state.own is None:  # else DDP exchanges already, perhaps in half precision
        state.own = partial(own_exchange, model.process_group, False)


# This module has no postponed annotations, as DDP reads those of the hook. The hook is not compiled with backward().
@torch.compiler.disable
def exchange_hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Pass the gradients of a bucket to the session of its model.

    Args:
        state: `HookState` of the model.
        bucket: bucket of DDP with several parameters, which may change after the first step.
    """
    session, model = state.session(), state.model()
    if session is None and state.own is not None:
        return state.own(bucket)
    if model is not None and model._join_config.enable:
        raise UnsupportedUse(JOINING)
    if session is None:
        raise UnsupportedUse(SUPERSEDED)
    session.check_not_superseded()
    carrier: Any = session.carrier  # that of a DDP model
    return carrier.carry(session, bucket)


def as_it_is(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return a completed future with the unchanged bucket."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def after_ddp(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of this backward pass, after DDP's callback, which fills ``p.grad``."""
    after_backward(lambda: after_backward(callback))
