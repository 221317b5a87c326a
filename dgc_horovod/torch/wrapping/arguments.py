"""The arguments of every adapter: checked here, and compared between ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import is_lazy

from dgc_horovod import __version__
from dgc_horovod.config import FIELD_NAMES
from dgc_horovod.errors import ConfigError, UnsupportedUse
from dgc_horovod.torch.session.session import Session, session_of


def checked_names(optimizer: torch.optim.Optimizer, named_parameters: Any) -> list[tuple[str, torch.Tensor]]:
    """`named_parameters` as a list, or Horovod's own names where None was given.

    Raises:
        ConfigError: names are repeated or missing.
        UnsupportedUse: the optimizer is already wrapped.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
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


def choice_fields(compression: Any, refused: str) -> dict[str, str]:
    """What ranks compare before they agree on anything else: whether they compress, and what they refuse."""
    name = compression if isinstance(compression, str) else getattr(compression, "__name__", repr(compression))
    return {"version": __version__, "compression": name, "refused": refused}


def agreed_fields(session: Session) -> dict[str, str]:
    """What the ranks must have in common, whoever carries bytes: one text each; lists one entry a line."""
    parameters, scaler = session.parameters, session.scaler
    return {
        "optimizer": type(session.optimizer).__name__,
        "grad_scaler": str(scaler is not None and scaler.is_enabled()),
        **{f"config.{name}": repr(getattr(session.config, name)) for name in FIELD_NAMES},
        "tensor count": str(len(parameters)),
        "names": "\n".join(parameters),
        "shapes": "\n".join(f"{name} {tuple(p.shape)}" for name, p in parameters.items()),
        "dtypes": "\n".join(f"{name} {p.dtype}" for name, p in parameters.items()),
        "rounds of earlier optimizers, which exchange() ends": str(len(session.still_apart())),
    }
