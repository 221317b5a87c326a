"""What a training run must keep beside model and optimizer, and how it is saved, loaded and emptied."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from dgc_horovod.config_check import together
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.errors import CheckpointError
from dgc_horovod.state import checkpoint
from dgc_horovod.state.method import check_kept, method_of
from dgc_horovod.state.residual_state import RESIDUAL, ResidualState
from dgc_horovod.torch import model_file
from dgc_horovod.torch.clipping.local import records_of
from dgc_horovod.torch.gradients.collectives import Collectives
from dgc_horovod.torch.gradients.dense_path import laid_out_as
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.updates.base import SplitUpdate


def save(
    directory: str | os.PathLike[str],
    collectives: Collectives,
    model: Any,
    optimizer: Any,
    extra: dict[str, Any],
    group: int = 0,
) -> None:
    """What ``save_checkpoint`` of every adapter does.

    Args:
        directory, model, optimizer, extra: see ``save_checkpoint``.
        collectives: transport of the ranks that save, which bears with slow disks.
        group: number of the group of ranks; 0: all of the job.
    """
    exchange = getattr(optimizer, "_dgc", None)
    if exchange is not None:
        optimizer._dgc_finish_round()

    def content() -> checkpoint.Content:
        state = None if exchange is None else kept_by(optimizer)
        saved = _dumped(model, optimizer, extra) if collectives.rank == 0 else b""
        holds = checkpoint.digest_of_names(_own_names(optimizer), group)
        return checkpoint.Content(holds, saved, state, None if exchange is None else exchange.config)

    checkpoint.save(directory, collectives, content)


def _own_names(optimizer: Any) -> list[str]:
    """Names of what the optimizer has; it may have been given those of a whole model of which others have parts."""
    own = {p for group in optimizer.param_groups for p in group["params"]}
    return [name for p, name in optimizer._parameter_names.items() if p in own]


def load(
    directory: str | os.PathLike[str],
    collectives: Collectives,
    model: Any,
    optimizer: Any,
    averages: bool,
    residuals: str = checkpoint.REQUIRED,
) -> dict[str, Any]:
    """What ``load_checkpoint`` of every adapter does.

    Args:
        directory, model, optimizer, residuals: see ``load_checkpoint``.
        collectives: transport of the ranks that load, which bears with slow disks.
        averages: whether gradients are averaged or summed.
    """
    exchange = getattr(optimizer, "_dgc", None)
    config = None if exchange is None else exchange.config
    node_size = 1 if exchange is None else exchange.buckets.topology.node_size
    found = checkpoint.load(directory, collectives, config, averages, residuals, node_size)
    with model_file.put_back_on_error(model), together(collectives, f"loading {directory}"):
        if exchange is not None:
            check_between_steps(optimizer)
            _split(optimizer, found.state)
        name = found.manifest.file(checkpoint.MODEL).name
        saved = model_file.read(name, found.model)
        model_file.load_model(name, saved, model)
        model_file.check_fits(name, saved, optimizer)
        if exchange is not None:
            optimizer._dgc_check_state_dict(saved["optimizer"])
    with together(collectives, f"loading {directory}"):
        optimizer.load_state_dict(saved["optimizer"])
        if exchange is not None:
            put_back(optimizer, found.state)
            checkpoint.tell_if_empty(found, directory)
    if exchange is not None and found.manifest.workers not in (0, collectives.workers):
        optimizer._dgc_ranks_changed()
    return dict(saved["extra"])


def follow(optimizer: Any) -> None:
    """Know which ranks there are, before anything depends on it."""
    if optimizer._dgc_membership is not None:
        optimizer._dgc_membership.follow(optimizer)


def _dumped(model: Any, optimizer: Any, extra: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": extra}, out)
    try:
        torch.load(io.BytesIO(out.getvalue()), weights_only=True, map_location="cpu")
    except Exception as error:
        raise CheckpointError(
            "what is to be saved could not be loaded again without running code from the file; keep numbers, texts, "
            f"tensors, dicts and lists only ({error})"
        ) from None
    return out.getvalue()


# -- the state of one rank


def check_between_steps(optimizer: Any) -> None:
    """Raise UnsupportedUse while gradients are being exchanged, or have been and are not applied yet."""
    optimizer._dgc_check_between_steps()


def kept_by(optimizer: Any) -> ResidualState:
    """A copy of what this rank has kept; see ``residual_state_dict``."""
    follow(optimizer)
    check_between_steps(optimizer)
    state = copied(optimizer)
    optimizer._dgc_update.add_own(optimizer, state)
    return state


def load_residuals(optimizer: Any, state: ResidualState) -> None:
    """Go on from `state`, of this rank; see ``load_residual_state_dict``."""
    follow(optimizer)
    check_between_steps(optimizer)
    put_back(optimizer, state)


def copied(optimizer: Any) -> ResidualState:
    """`kept_by`, whatever is under way; without what stands in the optimizer's state."""
    exchange = optimizer._dgc
    state: ResidualState = exchange.residuals()
    state.mode = optimizer._dgc_mode()
    state.clips = records_of(exchange.clipping.asked, exchange.names)
    state.method = _method_of(optimizer)
    return state


def _method_of(optimizer: Any) -> str:
    update = optimizer._dgc_update
    return method_of(optimizer._dgc.config, isinstance(update, SplitUpdate), update.kind == "adam")


def _split(optimizer: Any, state: ResidualState) -> tuple[ResidualState, Any]:
    """`split_own` of the update, of a record that has been found to fit; nothing is changed."""
    exchange, update = optimizer._dgc, optimizer._dgc_update
    state, own = update.split_own(optimizer, state)
    check_kept(state, _method_of(optimizer))
    exchange.buckets.check_fits(state)
    return state, own


def put_back(optimizer: Any, state: ResidualState) -> None:
    """`load_residuals`, whatever is under way."""
    exchange, update = optimizer._dgc, optimizer._dgc_update
    state, own = _split(optimizer, state)
    exchange.load(state)
    update.take_own(optimizer, own)
    optimizer._dgc_resume(state.mode)


def to_dict(state: ResidualState) -> dict[str, Any]:
    """`state` as a dict of plain values and tensors."""
    found: dict[str, Any] = _converted(
        state.to_dict(), lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x
    )
    return found


def from_dict(record: Mapping[str, Any]) -> ResidualState:
    """What `to_dict` was given.

    Raises:
        CheckpointError: it is no such dict.
    """
    return ResidualState.from_dict(_converted(record, _as_array))


def _as_array(x: Any) -> Any:
    """`x` as an array where it may be one of a record, which says of everything else that it is none."""
    fit = isinstance(x, torch.Tensor) and x.layout is torch.strided and x.dtype in (torch.float32, torch.float64)
    return x.detach().cpu().numpy() if fit else x


def _converted(x: Any, convert: Callable[[Any], Any]) -> Any:
    """`x` with all that stands in its mappings converted."""
    return {key: _converted(y, convert) for key, y in x.items()} if isinstance(x, Mapping) else convert(x)


# -- nothing left behind


def flush(optimizer: Any) -> None:
    """See ``flush`` of the optimizer."""
    follow(optimizer)
    check_between_steps(optimizer)
    exchange, update = optimizer._dgc, optimizer._dgc_update
    kept = update.flush(optimizer, _left(exchange), exchange.is_compressed)
    share = 1 if exchange.settings.averages else exchange.collectives.workers
    for p, v in kept.items():
        if p in exchange.place:
            exchange.buckets.keep(exchange.names[p], {RESIDUAL: (v / share).reshape(-1).float().cpu().numpy()})
        else:
            exchange.dense_residuals[p] = v / share
    for p in exchange.names:
        p.grad = None
    update.prepare(optimizer)  # the next step takes over what stands in the optimizer's state now


def _left(exchange: GradientExchange) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """What all ranks together have kept of every tensor, by part; it is zero here afterwards.

    Residual and momentum are averaged or summed as gradients are. An allreduce of every part that any rank has.
    """
    own = {
        "parts": [run.engine.state.parts for run in exchange.runs],
        "dense_residuals": sorted(exchange.names[p] for p in exchange.dense_residuals),
    }
    theirs = [json.loads(data) for data in exchange.collectives.gather_bytes(json.dumps(own).encode(), "parts")]
    found: dict[torch.Tensor, dict[str, torch.Tensor]] = {p: {} for p in exchange.place}
    for run, *parts in zip(exchange.runs, *(each["parts"] for each in theirs), strict=True):
        for part in sorted({part for one in parts for part in one}):
            combined = _combined(exchange, run.engine, part)
            for segment, p in zip(run.engine.whole.segments, run.parameters, strict=True):
                found[p][part] = laid_out_as(combined[segment.place].view(p.shape).to(p.device), torch.empty_like(p))
    of_name = {name: p for p, name in exchange.names.items()}
    for name in sorted({name for each in theirs for name in each["dense_residuals"]}):
        p = of_name[name]
        whole = exchange.dense_residuals.get(p, torch.zeros_like(p)).float().contiguous()
        found[p] = {RESIDUAL: _reduced(exchange, whole, name, exchange.settings.averages)}
    exchange.dense_residuals.clear()
    exchange.buckets.empty()
    return found


def _combined(exchange: GradientExchange, engine: BucketEngine, part: str) -> torch.Tensor:
    whole = torch.from_numpy(engine.as_one_of_all(part))
    return _reduced(exchange, whole, f"{engine.bucket.index}.{part}", exchange.settings.averages)


def _reduced(exchange: GradientExchange, whole: torch.Tensor, name: str, averages: bool) -> torch.Tensor:
    collectives = exchange.collectives
    collectives.traffic.count_allreduce(whole.nbytes, collectives.workers)
    return collectives.wait(collectives.allreduce(whole, f"left.{name}", averages))
