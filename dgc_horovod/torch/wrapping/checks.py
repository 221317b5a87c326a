"""Checks of arguments, optimizers and models when an optimizer is wrapped, with the same error on every rank."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dgc_horovod import __version__
from dgc_horovod.config_check import Gatherer, refused_alike
from dgc_horovod.errors import ConfigError, UnsupportedUse
from dgc_horovod.torch.session.session import session_of

Named = list[tuple[str, torch.Tensor]]  # parameters with their names


def checked_names(optimizer: Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None) -> Named:
    """Return `named_parameters` as a list, or Horovod's own names for None.

    Raises:
        ConfigError: names are repeated or missing.
        UnsupportedUse: the optimizer is already wrapped.
    """
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if hasattr(optimizer, "_requires_update") or session_of(optimizer) is not None:  # Horovod's own, or ours
        raise UnsupportedUse(
            "this optimizer is already wrapped by a DistributedOptimizer; wrap the torch optimizer itself"
        )
    if named_parameters is None:
        return [
            (f"allreduce.noname.{i}.{j}", p)
            for i, group in enumerate(optimizer.param_groups)
            for j, p in enumerate(group["params"])
        ]
    named = list(named_parameters)
    if any(not isinstance(entry, tuple) for entry in named):
        raise ConfigError(
            f"named_parameters must be (name, parameter) tuples, got {type(named[0]).__name__}; "
            "pass model.named_parameters()"
        )
    names = [name for name, _ in named]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigError(
            f"named_parameters has repeated names: {', '.join(repeated)}; each parameter needs a unique name, for "
            "example with a prefix for each model"
        )
    known = {id(p) for _, p in named}
    missing = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if missing:
        shapes = ["not known yet" if is_lazy(p) else tuple(p.shape) for p in missing[:5]]
        raise ConfigError(
            f"{len(missing)} parameters of the optimizer have no name in named_parameters (shapes {shapes}); pass "
            "the named_parameters() of every model whose parameters it holds"
        )
    return named


class NoChoice(UnsupportedUse):
    """The refusal of an optimizer with ``Compression.auto`` that cannot be compressed; the optimizer is unchanged."""


@contextmanager
def alike(ranks: Gatherer | None, compression: object = "dgc", may_stay: bool = False) -> Iterator[None]:
    """Run the checks of this rank.

    Args:
        ranks: transport of the ranks; None: they do not compare.
        compression: choice of this rank; the default stands for all with settings, which are compared later.
        may_stay: whether UnsupportedUse becomes `NoChoice`: training continues with the framework's own exchange.

    Raises:
        RankMismatch: on every rank, if only some compress, or some refuse: their collectives would never match.
    """
    name = compression if isinstance(compression, str) else getattr(compression, "__name__", repr(compression))
    with refused_alike(ranks, {"version": __version__, "compression": name}):
        try:
            yield
        except UnsupportedUse as refused:
            raise (NoChoice(str(refused)) if may_stay else refused) from None


# modules of optimizers that shard their state, or exchange weights or gradients themselves
_DISTRIBUTED = (
    "torch.distributed.optim.",
    "deepspeed.runtime.",
    "fairscale.optim.oss",
    "fairscale.optim.adascale",
    "apex.contrib.optimizers.distributed_",
)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_optimizer(optimizer: Optimizer, sparse_as_dense: bool) -> None:
    """Raise UnsupportedUse for an optimizer, not yet wrapped, whose step() does not work with exchanged gradients."""
    name, step = type(optimizer).__name__, inspect.unwrap(type(optimizer).step)
    if any(base.__module__.startswith(_DISTRIBUTED) for base in type(optimizer).__mro__):
        raise UnsupportedUse(
            f"{name} is a distributed optimizer: it shards its state, or exchanges weights or gradients itself; pass "
            "its inner optimizer, such as AdamW"
        )
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedUse(
            f"{name} calls its closure several times in a step, for a new gradient each time, but gradients are "
            "exchanged once a step; use an optimizer that steps without a closure, such as SGD or AdamW"
        )
    if isinstance(optimizer, torch.optim.SparseAdam) and not sparse_as_dense:
        raise UnsupportedUse(
            "SparseAdam takes sparse gradients, but compressed gradients are dense; pass sparse_as_dense=True, or use "
            "Adam, with sparse=False in the embedding"
        )


def check_parameters(optimizer: Optimizer, names: Named) -> None:
    """Raise UnsupportedUse for a parameter that cannot be exchanged."""
    for p, name in _trained(optimizer, names).items():
        if problem := _problem(p):
            raise UnsupportedUse(f"{name!r} {problem}")


def check_plain_models(optimizer: Optimizer, names: Named) -> None:
    """Raise UnsupportedUse if DistributedDataParallel exchanges gradients of the optimizer as well."""
    trained = _trained(optimizer, names)
    for p in data_parallel_around(trained):
        raise UnsupportedUse(
            f"{trained[p]!r} belongs to a model in DistributedDataParallel, which exchanges every gradient "
            "itself, uncompressed; leave the model plain, without DistributedDataParallel"
        )


def _trained(optimizer: Optimizer, names: Named) -> dict[torch.Tensor, str]:
    """Return the name of each parameter that requires a gradient."""
    name_of = {p: name for name, p in names}
    return {p: name_of[p] for group in optimizer.param_groups for p in group["params"] if p.requires_grad}


def _problem(p: torch.Tensor) -> str:
    """Return why `p` cannot be exchanged and what to do, or ""."""
    if hasattr(p, "_in_backward_optimizers"):
        return "is stepped by an optimizer in the backward pass; compression needs the step() of a wrapped optimizer"
    if is_lazy(p):
        return "has no shape yet (a lazy module); call the model once, on any batch, before wrapping the optimizer"
    if p.is_meta:
        return "is on the meta device, without data; call model.to_empty(device=...) and initialize it before wrapping"
    if _is_sharded(p):
        return (
            "is sharded over the ranks (FSDP, DTensor, tensor parallel), but only whole gradients of replicas can be "
            "averaged; wrap the optimizer of a model that is whole on every rank"
        )
    if is_traceable_wrapper_subclass(p):
        return f"is a {type(p).__name__}, a tensor without plain memory; use a plain torch.nn.Parameter"
    if p.layout != torch.strided:
        return f"has the layout {p.layout}; only dense tensors can be exchanged (p.to_dense())"
    if p.dtype not in _DTYPES:
        return f"is of {p.dtype}; parameters must be of float16, bfloat16, float32 or float64"
    return ""


def _is_sharded(p: torch.Tensor) -> bool:
    # `_st_info`: DDP made it from a DTensor; it is in neither model nor checkpoint after a step
    if getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False) or hasattr(p, "_st_info"):
        return True
    distributed = getattr(torch.distributed, "tensor", None)  # without it, nothing is a DTensor
    return distributed is not None and isinstance(p, distributed.DTensor)


def data_parallel_around(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters that a DistributedDataParallel exchanges; it is found among all objects of the process."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    gc.collect()  # drop models that are not in use any more
    models = [found for found in gc.get_objects() if issubclass(type(found), DistributedDataParallel)]
    exchanged = {p for model in models for p in model.parameters()}
    return [p for p in parameters if p in exchanged]
