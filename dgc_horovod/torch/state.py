"""Save, load and flush the state of a training run; the model's file of a checkpoint."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.nn import Module
from torch.optim import Optimizer

from dgc_horovod.config_check import together
from dgc_horovod.errors import CheckpointError
from dgc_horovod.files import AnyPath
from dgc_horovod.session.base import left_of_all
from dgc_horovod.state import checkpoint
from dgc_horovod.state.kinds import MAPPING, NAMED, NUMBER, SWITCH, TEXT, Kind, checked, list_of, optional
from dgc_horovod.state.residual_state import RESIDUAL, ResidualState
from dgc_horovod.torch.gradients.collectives import laid_out_as
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.session.carrier import Carrier
from dgc_horovod.torch.session.session import Session, session_of

_FIELDS = {"model": MAPPING, "optimizer": MAPPING, "extra": NAMED}
_GROUPS = {"param_groups": list_of(MAPPING), "state": MAPPING}


def read(name: str, data: bytes) -> dict[str, Any]:
    """Read the model's file of ``save_checkpoint``: a dict of "model", "optimizer" and "extra".

    Args:
        name: name of the file, for messages.
        data: content of the file.

    Raises:
        CheckpointError: the file cannot be read, or has another structure.
    """
    try:
        saved = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises errors of any kind
        raise CheckpointError(f"the model's file, {name}, cannot be read ({error})") from None
    return checked(f"the model's file, {name}, is damaged", saved, _FIELDS)


@contextmanager
def put_back_on_error(model: object) -> Iterator[None]:
    """Restore parameters and buffers of `model` after an error inside.

    A model's own hooks decide whether a state can be loaded, and may change it, so loading is tried once. Other state
    of the hooks is not restored.

    Cost: a copy of the model, on the host.
    """
    found = chain(getattr(model, "parameters", tuple)(), getattr(model, "buffers", tuple)())
    kept = [(x, x.detach().to("cpu", copy=True)) for x in found if not torch.nn.parameter.is_lazy(x)]
    try:
        yield
    except BaseException:
        for x, before in kept:
            if x.shape == before.shape:
                x.detach().copy_(before)
            else:  # a hook has resized the tensor
                x.data = before.to(x.device)
        raise


def load_model(name: str, saved: Mapping[str, Any], model: Module) -> None:
    """Load the result of `read` into `model`; see `put_back_on_error`.

    Raises:
        CheckpointError: it does not fit the model.
    """
    try:
        model.load_state_dict(saved["model"])
    except Exception as error:  # raised by torch or by the model's own hooks
        raise CheckpointError(f"the model's file, {name}, does not fit the model: {error}") from None


def check_fits(name: str, saved: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Raise CheckpointError unless `optimizer` can load the result of `read`; changes nothing."""
    what = f"the model's file, {name}, does not fit"
    ours, theirs = optimizer.state_dict(), saved["optimizer"]
    if not ours.keys() >= _GROUPS.keys():
        return  # an optimizer with another structure of state_dict
    fields = checked(f"{what} the optimizer", theirs, _GROUPS, within="optimizer.")
    groups = fields["param_groups"]
    if len(groups) != len(ours["param_groups"]):
        raise CheckpointError(
            f"{what} the optimizer: it has {len(groups)} parameter groups, the optimizer {len(ours['param_groups'])}"
        )
    defaults = getattr(optimizer, "defaults", {})  # torch sets defaults for flags newer than the checkpoint
    needed = {key for key, value in defaults.items() if isinstance(value, tuple) or NUMBER.holds(value)}
    own = next(base for base in type(optimizer).__mro__ if base.__module__.partition(".")[0] != "horovod")
    known = own.__module__.startswith("torch.optim")  # others may convert their state when it is loaded
    for i, (our_group, group) in enumerate(zip(ours["param_groups"], groups, strict=True)):
        within = f"optimizer.param_groups[{i}]."
        kinds = {key: kind for key, value in our_group.items() if (kind := _like(value))}
        if known:
            kinds.update({key: _UNSET for key, value in our_group.items() if value is None and key in defaults})
        number = len(our_group["params"])
        kinds["params"] = Kind(f"a list of {number} whole numbers", lambda x, n=number: _is_list(x, n, int))  # type: ignore[misc]
        checked(f"{what} the optimizer", group, kinds, kinds.keys() - needed - {"params"}, within)
    for key, state in ours["state"].items() if known else ():
        if fields["state"].get(key, {}) != {}:
            kinds = {part: kind for part, value in state.items() if (kind := _like(value))}
            if "step" in state:
                kinds["step"] = Kind("a number from 0 on", lambda x: _is_number(x) and 0 <= x < math.inf)
            if "momentum_buffer" in kinds:
                kinds["momentum_buffer"] = optional(kinds["momentum_buffer"])  # None in torch before the first step
            within = f"optimizer.state[{key}]."
            checked(f"{what} the optimizer", fields["state"][key], kinds, ("momentum_buffer",), within)


def _like(ours: object) -> Kind | None:
    """Return the kind of values that may replace `ours`; None: any."""
    if isinstance(ours, torch.Tensor) and ours.numel() != 1:
        shape = ours.shape
        return Kind(f"a tensor of shape {tuple(shape)}", lambda x: isinstance(x, torch.Tensor) and x.shape == shape)
    if isinstance(ours, bool):
        return optional(SWITCH)
    if isinstance(ours, torch.Tensor) or NUMBER.holds(ours):
        return Kind("a number", _is_number)
    if isinstance(ours, tuple) and all(map(NUMBER.holds, ours)):
        number = len(ours)
        return Kind(f"{number} numbers", lambda x: _is_list(x, number) and all(map(_is_number, x)))
    return optional(TEXT) if isinstance(ours, str) else None


_UNSET = Kind("None, a flag or a text", lambda x: x is None or isinstance(x, (bool, str)))  # None lets torch choose


def _is_list(x: object, length: int, of: type = object) -> bool:
    return isinstance(x, (list, tuple)) and len(x) == length and all(isinstance(each, of) for each in x)


def _is_number(x: object) -> bool:
    return x.numel() == 1 if isinstance(x, torch.Tensor) else NUMBER.holds(x)


def save(
    directory: AnyPath, model: Module | None, optimizer: Optimizer, extra: dict[str, Any], carrier: Carrier
) -> None:
    """Save as ``save_checkpoint`` of every adapter; without `model`: the residuals of every rank alone."""
    session, collectives = session_of(optimizer), carrier.patient()
    if session is not None:
        session.strategy.conclude()

    def content() -> checkpoint.Content:
        state = None if session is None else kept_by(session)
        saved = _dumped(model, optimizer, extra) if collectives.rank == 0 else b""
        own = {p for group in optimizer.param_groups for p in group["params"]}
        names = [name for p, name in carrier.names.items() if p in own]
        holds = checkpoint.digest_of_names(names, carrier.group_number)
        return checkpoint.Content(holds, saved, state, None if session is None else session.config)

    checkpoint.save(directory, collectives, content)


def load(
    directory: AnyPath, model: Module | None, optimizer: Optimizer, residuals: str, carrier: Carrier
) -> dict[str, Any]:
    """Load as ``load_checkpoint`` of every adapter; without `model`: the residuals of every rank alone."""
    session, collectives = session_of(optimizer), carrier.patient()
    config = None if session is None else session.config
    node_size = 1 if session is None else session.exchange.topology.node_size
    found = checkpoint.load(directory, collectives, config, carrier.settings.averages, residuals, node_size)
    with put_back_on_error(model), together(collectives, f"loading {directory}"):
        if session is not None:
            session.strategy.check_between_steps()
            session.kept.check(found.state)
            session.saves_residuals = True
        name = found.manifest.file(checkpoint.MODEL).name
        saved = read(name, found.model)
        if model is not None:
            load_model(name, saved, model)
            check_fits(name, saved, optimizer)
        added = {} if session is None else session.strategy.split(saved["optimizer"])[1]
    with together(collectives, f"loading {directory}"):
        if model is not None:
            optimizer.load_state_dict(saved["optimizer"])
        if session is not None:
            if model is None:
                session.strategy.load(added)
            session.kept.resume(found.state)
            checkpoint.tell_if_empty(found, directory)
    if session is not None and found.manifest.workers not in (0, collectives.workers):
        session.strategy.ranks_changed()
    return dict(saved["extra"])


def _dumped(model: Module | None, optimizer: Optimizer, extra: dict[str, Any]) -> bytes:
    out, session = io.BytesIO(), session_of(optimizer)
    content: dict[str, Any] = {"model": {}, "optimizer": {}, "extra": extra}
    if model is not None:
        content |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    elif session is not None:
        content["optimizer"] = session.strategy.extend({})
    torch.save(content, out)
    try:
        torch.load(io.BytesIO(out.getvalue()), weights_only=True, map_location="cpu")
    except Exception as error:
        raise CheckpointError(
            "the state could not be loaded again without running code from the file; save numbers, texts, tensors, "
            f"dicts and lists only ({error})"
        ) from None
    return out.getvalue()


# -- the state of one rank


def kept_by(session: Session) -> ResidualState:
    """Copy the state of this rank; see ``residual_state_dict``."""
    session.check_between_steps()
    session.saves_residuals = True
    return session.kept.record()


def load_residuals(session: Session, state: ResidualState) -> None:
    """Load `state`, of this rank; see ``load_residual_state_dict``."""
    session.check_between_steps()
    session.kept.resume(state)


def to_dict(state: ResidualState) -> dict[str, Any]:
    """Convert `state` to a dict of plain values and tensors."""
    return _converted(state.to_dict(), lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x)


def from_dict(record: Mapping[str, Any]) -> ResidualState:
    """Convert the result of `to_dict` back.

    Raises:
        CheckpointError: `record` is not such a dict.
    """
    return ResidualState.from_dict(_converted(record, _as_array))


def _as_array(x: object) -> object:
    """Convert a tensor that can be an array of a record; return other values unchanged, for `from_dict` to refuse."""
    if isinstance(x, torch.Tensor) and x.layout is torch.strided and x.dtype in (torch.float32, torch.float64):
        return x.detach().cpu().numpy()
    return x


def _converted(x: object, convert: Callable[[Any], Any]) -> Any:
    """Convert all values in `x` and its nested mappings."""
    return {key: _converted(y, convert) for key, y in x.items()} if isinstance(x, Mapping) else convert(x)


# -- flush


def flush_between_steps(session: Session) -> None:
    """See ``flush`` of the optimizer; a rank that is within a step may call it again after the step."""
    session.carrier.follow(session)
    session.strategy.before_flush()
    session.exchange.collectives.meet("flush")
    flush(session)


def flush(session: Session) -> None:
    """Apply the residuals of all ranks, between two steps."""
    session.check_between_steps()
    exchange, update = session.exchange, session.update
    kept = update.flush(session.optimizer, exchange, _left(exchange), session.own_step)
    share = 1 if exchange.settings.averages else exchange.collectives.workers
    for p, v in kept.items():
        name, own = exchange.names[p], (v / share).reshape(-1).float().cpu().numpy()
        if name in exchange.layout.dense:
            exchange.dense_residuals[name] = own
        else:
            exchange.keep(name, {RESIDUAL: own})
    for p in exchange.names:
        p.grad = None
    update.prepare(session.optimizer, exchange)  # the next step takes over the optimizer's state


def _left(exchange: GradientExchange) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the combined state of all ranks for every tensor, by part, and set this rank's to zero.

    One allreduce for every part that any rank has.
    """
    collectives, averages = exchange.collectives, exchange.settings.averages

    def combined(whole: np.ndarray, name: str) -> torch.Tensor:
        return collectives.wait(collectives.allreduce(torch.from_numpy(whole), name, averages))

    of_name = {name: p for p, name in exchange.names.items()}
    left, names = left_of_all(exchange, collectives, combined, exchange.dense_residuals)
    found: dict[torch.Tensor, dict[str, torch.Tensor]] = {p: {} for run in exchange.runs for p in run.parameters}
    for run, parts in zip(exchange.runs, left, strict=True):
        for segment, p in zip(run.engine.whole.segments, run.parameters, strict=True):
            for part, whole in parts.items():
                found[p][part] = laid_out_as(whole[segment.place].view(p.shape).to(p.device), torch.empty_like(p))
    for name in names:
        p = of_name[name]
        v = exchange.dense_residuals.get(name, np.zeros(p.numel(), np.float32))
        collectives.traffic.count_allreduce(v.nbytes, collectives.workers)
        found[p] = {RESIDUAL: combined(v, f"left.{name}").view(p.shape).to(p.device)}
    exchange.dense_residuals.clear()
    return found
