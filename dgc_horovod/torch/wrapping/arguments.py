"""The arguments of ``DistributedOptimizer``: checked here, compared between ranks, turned into bucket boundaries."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.util import split_list
from torch.nn.parameter import is_lazy

from dgc_horovod import __version__, envvars
from dgc_horovod.config import FIELD_NAMES, DGCConfig, check_predivide
from dgc_horovod.config_check import check_agreement
from dgc_horovod.errors import ConfigError, UnsupportedUse
from dgc_horovod.torch.transport import HorovodCollectives


def checked_names(optimizer: torch.optim.Optimizer, named_parameters: Any) -> list[tuple[str, torch.Tensor]]:
    """`named_parameters` as a list, or Horovod's own names where None was given.

    Raises:
        ConfigError: names are repeated or missing.
        UnsupportedUse: the optimizer is already wrapped.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if hasattr(optimizer, "_requires_update"):
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
            f"named_parameters has repeated names: {', '.join(repeated)}; each parameter needs a name of its own, e.g. "
            "prefix those of each model"
        )
    known = {id(p) for _, p in named}
    missing = [_shape(p) for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if missing:
        raise ConfigError(
            f"{len(missing)} parameters of the optimizer have no name in named_parameters (shapes {missing[:5]}); pass "
            "the named_parameters() of every model whose parameters it holds"
        )
    return named


def _shape(p: torch.Tensor) -> tuple[int, ...] | str:
    return "not known yet" if is_lazy(p) else tuple(p.shape)


def check_arguments(op: int, predivide: float, passes: int) -> None:
    """Raise ConfigError or UnsupportedUse for what compression cannot do."""
    if op not in (hvd.Average, hvd.Sum):
        raise UnsupportedUse(
            "compression works with op=hvd.Average or hvd.Sum; for Adasum and the others use "
            "compression=Compression.none, under dgcrun --compression none"
        )
    check_predivide(predivide, op == hvd.Average)
    if not isinstance(passes, int) or passes < 1:
        raise ConfigError(f"backward_passes_per_step must be a whole number >= 1, got {passes!r}")


def check_same_choice(compression: Any, process_set: hvd.ProcessSet, refused: str = "nothing") -> None:
    """Stop every rank if some compress and others do not, or refuse to: their collectives would never meet.

    Not under Elastic, where a newcomer makes its optimizer while the others wait for its state.
    """
    if process_set.included() and not envvars.horovod_elastic():
        name = compression if isinstance(compression, str) else getattr(compression, "__name__", repr(compression))
        fields = {"version": __version__, "compression": name, "refused": refused}
        check_agreement(HorovodCollectives(process_set, "choice"), fields)


def agreed_fields(
    optimizer: Any, parameters: dict[str, torch.Tensor], groups: dict[torch.Tensor, int], config: DGCConfig
) -> dict[str, str]:
    """What the ranks must have in common, one text each; lists one entry a line. `groups`: see `boundaries`."""
    return {
        "optimizer": type(optimizer).__name__,
        "op": str(int(optimizer.op)),
        "backward_passes_per_step": str(optimizer.backward_passes_per_step),
        "gradient_predivide_factor": str(float(optimizer.gradient_predivide_factor)),
        "grad_scaler": str(optimizer._dgc_scaler is not None and optimizer._dgc_scaler.is_enabled()),
        "sparse_as_dense": str(optimizer.sparse_as_dense),
        **{f"config.{name}": repr(getattr(config, name)) for name in FIELD_NAMES},
        "tensor count": str(len(parameters)),
        "names": "\n".join(parameters),
        "shapes": "\n".join(f"{name} {tuple(p.shape)}" for name, p in parameters.items()),
        "bucket boundaries": "\n".join(f"{name} {groups[p]}" for name, p in parameters.items()),
        "dtypes": "\n".join(f"{name} {p.dtype}" for name, p in parameters.items()),
    }


def boundaries(optimizer: Any, parameters: dict[str, torch.Tensor]) -> dict[torch.Tensor, int]:
    """A number per parameter; those of one Horovod group and one device share it."""
    groups = optimizer._groups
    if isinstance(groups, int):
        groups = split_list(list(parameters.values()), groups)
    group_of = {p: i for i, group in enumerate(groups or []) for p in group}
    keys: dict[Any, int] = {}
    return {p: keys.setdefault((group_of.get(p, -1), p.device), len(keys)) for p in parameters.values()}
