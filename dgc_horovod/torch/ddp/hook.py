"""DDP's communication hook: it hands each gradient to the exchange, and waits for all of them after the last bucket."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.torch.session.session import Session

JOINING = (
    "Join with a compressed model: ranks whose data have run out would add gradients of zero that their residuals know "
    "nothing of; give every rank as many batches (DistributedSampler with drop_last=True)"
)
SUPERSEDED = (
    "the optimizer that this DistributedDataParallel model was registered with is gone; call register() with the "
    "optimizer that is used now"
)
# model -> function that gives who takes its gradients, a session unless it is gone or DDP itself
_users: weakref.WeakKeyDictionary[Any, Callable[[], Any]] = weakref.WeakKeyDictionary()


class OwnExchange:
    """What DDP does without a hook of others, or with half precision on the way.

    Args:
        group: process group of the model.
        halves: whether sums are of half precision.
    """

    def __init__(self, group: dist.ProcessGroup, halves: bool) -> None:
        self._group, self._halves = group, halves

    def carry(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket. torch's hook of fp16 divides before the sum, and loses what is small; this one after it."""
        if not self._halves:
            return default_hooks.allreduce_hook(self._group, bucket)
        buffer, workers = bucket.buffer(), self._group.size()
        future = dist.all_reduce(buffer.half(), group=self._group, async_op=True).get_future()
        return future.then(lambda done: buffer.copy_(done.value()[0]).div_(workers))


class HookState:
    """What DDP gives to the hook: a reference to its model, which keeps nothing alive.

    Who copies or saves the whole DistributedDataParallel copies this too. torch puts no hook into the copy, and so the
    copy of this knows no model.
    """

    def __init__(self, model: DistributedDataParallel | None = None) -> None:
        self.model = weakref.ref(model) if model is not None else lambda: None

    def __reduce__(self) -> tuple[Any, ...]:
        return HookState, ()


def install(model: DistributedDataParallel, session: Session) -> None:
    """Let `session` have the gradients of `model`; of an earlier one it takes the place."""
    _let_carry(model, weakref.ref(session))


def _let_carry(model: DistributedDataParallel, carrier: Callable[[], Any]) -> None:
    known = model in _users
    _users[model] = carrier
    if not known:
        model.register_comm_hook(HookState(model), exchange_hook)


def leave_to_ddp(model: DistributedDataParallel, halves: bool) -> None:
    """From now on DDP exchanges the gradients of `model` itself; a session that had them gets none any more.

    Args:
        model: model, compressed before or not.
        halves: whether in half precision.
    """
    before = _users[model]() if model in _users else None
    if isinstance(before, Session):
        before.superseded = True
    if halves or model in _users:  # else DDP needs no hook
        own = OwnExchange(model.process_group, halves)
        _let_carry(model, lambda: own)


def fall_back_to_ddp(model: DistributedDataParallel) -> None:
    """Once the session of `model` is gone, let DDP exchange its gradients itself, until `install` is called again.

    Without this it is an error: a script that has registered an optimizer can register the next one.
    """
    if (carrier := _users.get(model)) is not None:
        own = OwnExchange(model.process_group, halves=False)
        _users[model] = lambda: carrier() or own


def has_another(model: DistributedDataParallel) -> bool:
    """Whether `model` has a hook that is not ours."""
    return any(hook is not exchange_hook for hook, _ in model._comm_hooks)


# Without postponed annotations: DDP looks at them. As it is, where a script has compiled what calls backward().
@torch.compiler.disable
def exchange_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Hand over the gradients of a bucket to the session of its model.

    Args:
        state: that of the model.
        bucket: bucket of DDP, in which several parameters lie; another one in the next step may hold others.
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
    """What DDP waits for where it gets a bucket back unchanged."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def after_ddp(callback: Callable[[], None]) -> None:
    """Call `callback` in this backward pass, once DDP has put the gradients back: in a callback, which comes later."""
    _after_backward(lambda: _after_backward(callback))


def _after_backward(callback: Callable[[], None]) -> None:
    eager = torch.compiler.disable(callback)
    torch.autograd.Variable._execution_engine.queue_callback(eager)  # type: ignore[attr-defined]
