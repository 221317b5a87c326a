"""DDP's communication hook: passes gradients to the exchange, and waits for all updates after the last bucket."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.torch.session.session import Session, after_backward

JOINING = (
    "Join does not work with a compressed model: ranks without more data would add zero gradients without their "
    "residuals. Give every rank the same number of batches (DistributedSampler with drop_last=True)"
)
SUPERSEDED = (
    "the optimizer that this DistributedDataParallel model was registered with does not exist any more; call "
    "register() with the present optimizer"
)
# model -> function that returns the taker of its gradients: a session, None if it is gone, or an OwnExchange
_users: weakref.WeakKeyDictionary[Any, Callable[[], Any]] = weakref.WeakKeyDictionary()


class OwnExchange:
    """DDP's exchange without a hook, or in half precision.

    Args:
        group: process group of the model.
        halves: whether gradients are summed in half precision.
    """

    def __init__(self, group: dist.ProcessGroup, halves: bool) -> None:
        self._group, self._halves = group, halves

    def carry(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket. Torch's fp16 hook divides before the sum and loses small values; this one divides after."""
        if not self._halves:
            return default_hooks.allreduce_hook(self._group, bucket)
        buffer, workers = bucket.buffer(), self._group.size()
        future = dist.all_reduce(buffer.half(), group=self._group, async_op=True).get_future()
        return future.then(lambda done: buffer.copy_(done.value()[0]).div_(workers))


class HookState:
    """The state that DDP passes to the hook: a weak reference to its model.

    It is copied or saved with a DistributedDataParallel. The copy of the model has no hook, so the copy of this state
    has no model.
    """

    def __init__(self, model: DistributedDataParallel | None = None) -> None:
        self.model = weakref.ref(model) if model is not None else lambda: None

    def __reduce__(self) -> tuple[Any, ...]:
        return HookState, ()


def install(model: DistributedDataParallel, user: Callable[[], Any]) -> None:
    """Deliver the gradients of `model` to what `user` returns, see `_users`, in place of an earlier one."""
    known = model in _users
    _users[model] = user
    if not known:
        model.register_comm_hook(HookState(model), exchange_hook)


def leave_to_ddp(model: DistributedDataParallel, halves: bool) -> None:
    """Make DDP exchange the gradients of `model` itself from now on; an earlier session gets no more gradients.

    Args:
        model: model, compressed before or not.
        halves: whether in half precision.
    """
    before = _users[model]() if model in _users else None
    if isinstance(before, Session):
        before.superseded = True
    if halves or model in _users:  # else DDP needs no hook
        own = OwnExchange(model.process_group, halves)
        install(model, lambda: own)


def fall_back_to_ddp(model: DistributedDataParallel) -> None:
    """Once the session of `model` is gone, let DDP exchange its gradients itself, until `install` is called again.

    Without this it is an error: a script that has registered an optimizer can register the next one.
    """
    if (carrier := _users.get(model)) is not None:
        own = OwnExchange(model.process_group, halves=False)
        _users[model] = lambda: carrier() or own


# This module has no postponed annotations, as DDP reads those of the hook. The hook is not compiled with backward().
@torch.compiler.disable
def exchange_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Pass the gradients of a bucket to the session of its model.

    Args:
        state: `HookState` of the model.
        bucket: bucket of DDP with several parameters, which may change after the first step.
    """
    model = state.model()
    user = _users[model]()
    if isinstance(user, OwnExchange):
        return user.carry(bucket)
    if model._join_config.enable:
        raise UnsupportedUse(JOINING)
    if user is None:
        raise UnsupportedUse(SUPERSEDED)
    user.check_not_superseded()
    return user.carrier.carry(user, bucket)


def as_it_is(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return a completed future with the unchanged bucket."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def after_ddp(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of this backward pass, after DDP's callback, which fills ``p.grad``."""
    after_backward(lambda: after_backward(callback))
