"""What cannot be compressed is refused when it is wrapped, in words, on every rank alike."""

from __future__ import annotations

import gc
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dgc_horovod.errors import UnsupportedUse

# modules of optimizers that shard their state, or send weights or gradients by themselves
_DISTRIBUTED = (
    "torch.distributed.optim.",
    "deepspeed.runtime.",
    "fairscale.optim.oss",
    "fairscale.optim.adascale",
    "apex.contrib.optimizers.distributed_",
)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class NoChoice(UnsupportedUse):
    """What cannot be compressed, of an optimizer whose exchange was to be chosen: nothing has been changed in it."""


@contextmanager
def without_a_choice(automatic: bool) -> Iterator[None]:
    """Let a refusal be told from others, where the framework's own exchange can do without compression."""
    try:
        yield
    except UnsupportedUse as refused:
        raise (NoChoice(str(refused)) if automatic else refused) from None


def check_optimizer(optimizer: torch.optim.Optimizer, sparse_as_dense: bool) -> None:
    """Raise UnsupportedUse for an optimizer, not yet wrapped, whose steps are none that an exchanged gradient fits."""
    name, step = type(optimizer).__name__, inspect.unwrap(type(optimizer).step)
    if any(base.__module__.startswith(_DISTRIBUTED) for base in type(optimizer).__mro__):
        raise UnsupportedUse(
            f"{name} is distributed itself: each rank holds a part of its state, or it sends whole weights, which "
            "nothing compresses; use the optimizer that is inside of it, such as AdamW"
        )
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedUse(
            f"{name} calls its closure several times in a step, for a gradient each, but gradients are exchanged once "
            "in a step; use an optimizer that steps without a closure, such as SGD or AdamW"
        )
    if isinstance(optimizer, torch.optim.SparseAdam) and not sparse_as_dense:
        raise UnsupportedUse(
            "SparseAdam takes sparse gradients, and what is exchanged is dense; pass sparse_as_dense=True, or use "
            "Adam, with sparse=False in the embedding"
        )


def check_parameters(optimizer: torch.optim.Optimizer, names: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raise UnsupportedUse for a parameter that cannot be exchanged."""
    name_of = {p: name for name, p in names}
    for group in optimizer.param_groups:
        for p, times in Counter(group["params"]).items():
            if times > 1:
                raise UnsupportedUse(
                    f"{name_of[p]!r} is {times} times in one parameter group, and would move as often in each step"
                )
    for p, name in _trained(optimizer, names).items():
        if problem := _problem(p):
            raise UnsupportedUse(f"{name!r} {problem}")


def check_plain_models(optimizer: torch.optim.Optimizer, names: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise UnsupportedUse where DistributedDataParallel exchanges gradients as well."""
    trained = _trained(optimizer, names)
    for p in data_parallel_around(trained):
        raise UnsupportedUse(
            f"{trained[p]!r} belongs to a model in DistributedDataParallel, which exchanges every gradient "
            "itself, uncompressed; leave the model plain, without DistributedDataParallel around it"
        )


def _trained(optimizer: torch.optim.Optimizer, names: Iterable[tuple[str, torch.Tensor]]) -> dict[torch.Tensor, str]:
    """Name of each parameter that requires a gradient."""
    name_of = {p: name for name, p in names}
    return {p: name_of[p] for group in optimizer.param_groups for p in group["params"] if p.requires_grad}


def _problem(p: torch.Tensor) -> str:
    """Why `p` cannot be exchanged and what to do, or ""."""
    if hasattr(p, "_in_backward_optimizers"):
        return "has an optimizer in the backward pass; momentum correction is part of the optimizer's step()"
    if is_lazy(p):
        return "has no shape yet (a lazy module); call the model once, on any batch, before wrapping the optimizer"
    if p.is_meta:
        return "is on the meta device, without data; call model.to_empty(device=...) and initialize it before wrapping"
    if _is_sharded(p):
        return (
            "is sharded over the ranks (FSDP, DTensor, tensor parallel), and what is averaged are whole gradients of "
            "replicas; wrap the optimizer of a model that is whole on every rank"
        )
    if is_traceable_wrapper_subclass(p):
        return f"is a {type(p).__name__}, which has no plain memory to exchange; use a plain torch.nn.Parameter"
    if p.layout != torch.strided:
        return f"has the layout {p.layout}; only dense tensors can be exchanged (p.to_dense())"
    if p.is_complex():
        return (
            "is complex, which the compression cannot exchange; make its real view (torch.view_as_real) the parameter"
        )
    if p.dtype not in _DTYPES:
        return f"is of {p.dtype}; gradients of float16, bfloat16, float32 and float64 can be exchanged"
    return ""


def _is_sharded(p: torch.Tensor) -> bool:
    if getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False):
        return True
    if hasattr(p, "_st_info"):  # DDP made it of a DTensor; after a step the model has it no more, nor has a checkpoint
        return True
    distributed = getattr(torch.distributed, "tensor", None)  # without it, nothing is a DTensor
    return distributed is not None and isinstance(p, distributed.DTensor)


def data_parallel_around(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those of `parameters` that a living DistributedDataParallel exchanges.

    Parameters do not know of it; without a process group there is none.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    gc.collect()  # of those that are not in use any more none counts
    models = [found for found in gc.get_objects() if issubclass(type(found), DistributedDataParallel)]
    exchanged = {p for model in models for p in model.parameters()}
    return [p for p in parameters if p in exchanged]
