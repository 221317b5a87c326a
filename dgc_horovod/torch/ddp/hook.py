"""DDP's communication hook: it hands each gradient to the exchange, and waits for all of them after the last bucket."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.torch.wrapping import owners

JOINING = (
    "Join with a compressed model: ranks whose data have run out would add gradients of zero that their residuals know "
    "nothing of; give every rank as many batches (DistributedSampler with drop_last=True)"
)
SUPERSEDED = (
    "the optimizer that this DistributedDataParallel model was registered with is gone; call register() with the "
    "optimizer that is used now"
)
_users: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # model -> weak reference to its optimizer


def install(model: DistributedDataParallel, optimizer: Any) -> None:
    """Let `optimizer` have the gradients of `model`; of an earlier one it takes the place."""
    known = model in _users
    _users[model] = weakref.ref(optimizer)
    if not known:
        model.register_comm_hook(weakref.ref(model), exchange_hook)


def is_installed(model: DistributedDataParallel) -> bool:
    """Whether the hook of `model` is ours."""
    return model in _users


# Without postponed annotations: DDP looks at them.
def exchange_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Hand over the gradients of a bucket to the optimizer of its model.

    Args:
        state: weak reference to the model.
        bucket: bucket of DDP, in which several parameters lie; another one in the next step may hold others.
    """
    model = state()
    if model._join_config.enable:
        raise UnsupportedUse(JOINING)
    optimizer = _users[model]()
    if optimizer is None:
        raise UnsupportedUse(SUPERSEDED)
    owners.check(optimizer)
    return optimizer._dgc_carry(bucket)


def as_it_is(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP waits for where it gets a bucket back unchanged."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def after_ddp(callback: Callable[[], None]) -> None:
    """Call `callback` in this backward pass, once DDP has put the gradients back: in a callback, which comes later."""
    _after_backward(lambda: _after_backward(callback))


def _after_backward(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]
