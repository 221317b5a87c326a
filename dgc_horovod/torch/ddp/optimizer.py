"""``register`` and ``DistributedOptimizer`` over torch.distributed, which add methods to the user's optimizer.

And ``save_checkpoint``, ``load_checkpoint``, ``save_residuals`` and ``load_residuals`` for these optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dgc_horovod import envvars
from dgc_horovod.compression import ConfiguredCompressor, Presets, config_of
from dgc_horovod.config import DGCConfig
from dgc_horovod.errors import ConfigError, UnsupportedUse
from dgc_horovod.files import AnyPath
from dgc_horovod.notices import tell_stock
from dgc_horovod.settings import check_whole
from dgc_horovod.state import checkpoint
from dgc_horovod.torch import state
from dgc_horovod.torch.ddp import models
from dgc_horovod.torch.ddp.carrier import DataParallelCarrier, GroupCarrier
from dgc_horovod.torch.ddp.transport import Group, ProcessGroupCollectives, new_group
from dgc_horovod.torch.gradients.clipping import limit_averages
from dgc_horovod.torch.gradients.collectives import ReduceSettings
from dgc_horovod.torch.gradients.scaling import SeenScaler, watch_scalers
from dgc_horovod.torch.session.overrides import begin, kind_for, made_class
from dgc_horovod.torch.session.session import Kind, Scaler, Session, session_of
from dgc_horovod.torch.wrapping import checks
from dgc_horovod.torch.wrapping.steps import lead_to_ours


class Compression(Presets):
    """Compression methods. ``none`` and ``fp16`` leave the exchange to DDP; the others take any field of DGCConfig."""

    adapter = "torch.ddp"
    none, fp16 = ConfiguredCompressor(adapter, None, "none"), ConfiguredCompressor(adapter, None, "fp16")


ANOTHERS_STEP = (
    "this step() was taken from the optimizer before register() or DistributedOptimizer(), and does not wait for the "
    "exchange. Take it afterwards. accelerate takes it under fp16: pass the optimizer that accelerator.prepare() has "
    "returned (trainer.optimizer) to register(), not its inner optimizer"
)
COMPRESSES = (
    "this optimizer compresses, and its residuals are a part of the training; for Compression.none or .fp16 make a new "
    "torch optimizer, and load this one's state_dict() after flush()"
)


def register(
    model: Module,
    optimizer: Optimizer,
    compression: Any = None,
    process_group: dist.ProcessGroup | None = None,
) -> Any:
    """Compress the gradients of a DDP model, and step `optimizer` with the exchanged updates.

    DDP's communication hook replaces its allreduce. `optimizer` stays the same object; its class becomes a derived one.
    The training loop is unchanged: ``backward`` exchanges, outside of ``no_sync``.

    Args:
        model: DistributedDataParallel model, also with torch.compile or Lightning's Fabric around it.
        optimizer: torch optimizer of exactly the model's parameters that require a gradient; also wrapped by accelerate
            or Fabric.
        compression: ``Compression.dgc(...)``, ``.topk(...)``, ..., or a DGCConfig; None: ``Compression.dgc()``;
            ``Compression.none`` and ``.fp16`` leave the exchange to DDP.
        process_group: ranks that take part; None: the ranks of the model.

    Returns:
        The argument `optimizer`. The torch optimizer has ``compression_stats()``, ``set_epoch()``, ``flush()``,
        ``residual_state_dict()`` and ``load_residual_state_dict()`` now.

    Raises:
        ConfigError: an argument is out of range.
        UnsupportedUse: a combination of arguments that is not supported, or would train wrongly.
        RankMismatch: on every rank, if the ranks differ in model, config or version.
    """
    given, optimizer = optimizer, models.bare_optimizer(optimizer)
    compression = Compression.dgc() if compression is None else compression
    config, bare = config_of(compression), models.unwrapped(model)
    group = _group_of(process_group or getattr(bare, "process_group", None))
    if config is None:
        with checks.alike(ProcessGroupCollectives(group, "choice"), compression):
            found = models.data_parallel(model)
            if session_of(optimizer) is not None:
                raise UnsupportedUse(COMPRESSES)
        _uncompressed(optimizer, found, group, halves=compression is Compression.fp16)
        return given
    try:
        _compressed(model, optimizer, config, group)
        models.renew_step(given)
    except checks.NoChoice as refused:
        if group.rank == 0:
            tell_stock(str(refused), DataParallelCarrier.stock)
        limit_averages(optimizer, config.clip_norm)
        _uncompressed(optimizer, cast(DistributedDataParallel, bare), group)
    return given


def _uncompressed(optimizer: Any, model: DistributedDataParallel, group: Group, halves: bool = False) -> None:
    """Leave the exchange of `optimizer` to DDP; add only the data for checkpoints."""
    models.leave_to_ddp(model, halves)
    optimizer._dgc = GroupCarrier(group, models.named_parameters(model), ReduceSettings(averages=True))


def _compressed(model: Module, optimizer: Optimizer, config: DGCConfig, group: Group) -> None:
    may_stay = config.automatic and isinstance(models.unwrapped(model), DistributedDataParallel)
    with checks.alike(ProcessGroupCollectives(group, "choice"), may_stay=may_stay):
        found = models.data_parallel(model)
        if sorted(dist.get_process_group_ranks(found.process_group)) != group.ranks:
            raise UnsupportedUse("process_group has other ranks than the process group of DistributedDataParallel")
        named = models.named_parameters(found)
        models.check_same_parameters(optimizer, named)
        known = {p for _, p in named}
        frozen = [p for each in optimizer.param_groups for p in each["params"] if p not in known]
        named += [(f"frozen.{i}", p) for i, p in enumerate(frozen)]
        checks.checked_names(optimizer, named)
        kind = kind_for(optimizer, named, config, averages=True, sparse_as_dense=False, records=dist.get_rank() == 0)
    watch_scalers()
    carrier = DataParallelCarrier(found, group, named)
    _take_over(optimizer, carrier, kind, SeenScaler())


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    average: bool = True,
    process_group: dist.ProcessGroup | None = None,
    *,
    sparse_as_dense: bool = False,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> Any:
    """Make every step of `optimizer` use the gradients of all ranks, for a plain model without DDP.

    The script must broadcast the weights before the first step (``torch.distributed.broadcast``), as with Horovod.

    Args:
        optimizer: torch optimizer; it stays the same object, and its class becomes a derived one.
        named_parameters: ``model.named_parameters()``; names must be unique and the same on every rank.
        compression: ``Compression.dgc(...)``, ``.topk(...)``, ..., or a DGCConfig; None: ``Compression.dgc()``.
        backward_passes_per_step: number of backward passes summed before one exchange, >= 1.
        average: whether gradients are averaged (True) or summed.
        process_group: ranks that take part; None: all.
        sparse_as_dense: whether sparse gradients are compressed as dense ones.
        grad_scaler: GradScaler of the script; residuals are then unscaled.

    Returns:
        `optimizer`, with the methods that `register` adds, ``synchronize()`` and ``skip_synchronize()``.

    Raises:
        ConfigError, UnsupportedUse, RankMismatch: see `register`.
    """
    config = config_of(Compression.dgc() if compression is None else compression)
    group = _group_of(process_group)
    if config is None:
        raise ConfigError(f"{compression!r} leaves the exchange to DDP, but there is no DDP: use DDP and register()")
    with checks.alike(ProcessGroupCollectives(group, "choice")):
        check_whole("backward_passes_per_step", backward_passes_per_step, 1)
        if config.automatic:
            raise UnsupportedUse("Compression.auto compares with DDP's own exchange: use DDP and register()")
        named = checks.checked_names(optimizer, named_parameters)
        checks.check_plain_models(optimizer, named)
        kind = kind_for(optimizer, named, config, average, sparse_as_dense, records=dist.get_rank() == 0)
    settings = ReduceSettings(average, sparse_as_dense=sparse_as_dense)
    carrier = GroupCarrier(group, named, settings, backward_passes_per_step)
    _take_over(optimizer, carrier, kind, grad_scaler)
    return optimizer


def _group_of(theirs: Any) -> Group:
    """Return our own group of the same ranks; None: of all ranks."""
    if not dist.is_initialized():
        raise UnsupportedUse("call torch.distributed.init_process_group() before, and start the script with torchrun")
    if theirs is not None and dist.get_rank(theirs) < 0:  # there new_group returns a number
        raise UnsupportedUse(
            f"rank {dist.get_rank()} is not in the given process_group; do not call this function on this rank"
        )
    return new_group(dist.get_process_group_ranks(theirs or dist.group.WORLD), envvars.timeout_seconds())


def _take_over(optimizer: Any, carrier: GroupCarrier, kind: Kind, scaler: Scaler) -> None:
    """Give `optimizer` a session, and the methods of a class derived from its own.

    Earlier references to its methods are redirected to ours; a step that bypasses them is an error.
    """
    own = type(optimizer)
    with _undone_on_error(optimizer):
        optimizer.__class__ = made_class(own, kind.overrides, {}, own.__module__)
        begin(optimizer, carrier, kind, scaler)
    lead_to_ours(optimizer)
    optimizer.register_step_pre_hook(_only_ours)


def _only_ours(optimizer: Any, *_: Any) -> None:
    if not optimizer._dgc.stepping:
        raise UnsupportedUse(ANOTHERS_STEP)


@contextmanager
def _undone_on_error(optimizer: Any) -> Iterator[None]:
    """Restore `optimizer` after an error, so that the script may continue without compression."""
    own, before = type(optimizer), dict(vars(optimizer))
    try:
        yield
    except BaseException:
        optimizer.__class__ = own
        vars(optimizer).clear()
        vars(optimizer).update(before)
        raise


# -- checkpoints, with the same files as with Horovod


def save_checkpoint(directory: AnyPath, model: Module, optimizer: Optimizer, **extra: object) -> None:
    """Save model, optimizer and every rank's residuals; call it on every rank of the optimizer, between two steps.

    ``dgc_horovod.torch.load_checkpoint`` reads the same files: names are those of the model without DDP.

    Args:
        directory: path, created if missing; one for each optimizer. A checkpoint in it is replaced when the new one is
            complete; other files are not changed.
        model: module whose state is saved, with or without DDP around it.
        optimizer: optimizer of `register` or `DistributedOptimizer`, with any compression.
        extra: more values to save: numbers, texts, tensors, dicts and lists of them; those of rank 0 are saved.

    Raises:
        CheckpointError: on every rank, if any rank cannot write, or is between backward() and step().

    Cost: u and v of every rank are written, twice the model's size each with momentum.
    """
    state.save(directory, models.bare(model), models.bare_optimizer(optimizer), extra, carrier_of(optimizer))


def load_checkpoint(
    directory: AnyPath, model: Module, optimizer: Optimizer, residuals: str = checkpoint.REQUIRED
) -> dict[str, Any]:
    """Load a checkpoint of ``save_checkpoint``, also of Horovod's adapter; call it on every rank of the optimizer.

    With the same number of ranks training continues bit for bit. With another number the combined residual of all ranks
    stays the same (to fp32 rounding); all ranks must then see the directory.

    Args:
        directory: path of the checkpoint.
        model, optimizer: model and optimizer, built as they were when it was saved.
        residuals: handling of the residuals: "required"; "if sound": missing or damaged ones are lost and start from
            zero; "ignored": all start from zero.

    Returns:
        The `extra` of ``save_checkpoint``.

    Raises:
        CheckpointError: on every rank, if a file is missing or damaged on any, or of another model or method.
    """
    return state.load(directory, models.bare(model), models.bare_optimizer(optimizer), residuals, carrier_of(optimizer))


def save_residuals(directory: AnyPath, optimizer: Optimizer) -> None:
    """Save only every rank's residuals, in addition to a checkpoint of the script or of another library.

    Call it on every rank of the optimizer, between two steps. Save model and ``optimizer.state_dict()`` separately.

    Args:
        directory: path, created if missing; see `save_checkpoint`.
        optimizer: see `save_checkpoint`.

    Raises:
        CheckpointError: see `save_checkpoint`.

    Cost: u and v of every rank are written, twice the model's size each with momentum.
    """
    state.save(directory, None, models.bare_optimizer(optimizer), {}, carrier_of(optimizer))


def load_residuals(directory: AnyPath, optimizer: Optimizer, residuals: str = checkpoint.REQUIRED) -> None:
    """Load residuals of `save_residuals`, after the state of model and optimizer; call it on every rank.

    Args:
        directory: path, also of a checkpoint of `save_checkpoint`.
        optimizer: see `load_checkpoint`.
        residuals: see `load_checkpoint`.

    Raises:
        CheckpointError: see `load_checkpoint`.
    """
    state.load(directory, None, models.bare_optimizer(optimizer), residuals, carrier_of(optimizer))


def carrier_of(optimizer: Optimizer) -> GroupCarrier:
    """Return the carrier of a registered optimizer, which may leave the exchange to DDP.

    Raises:
        UnsupportedUse: the optimizer was not registered.
    """
    found = getattr(models.bare_optimizer(optimizer), "_dgc", None)
    found = found.carrier if isinstance(found, Session) else found
    if not isinstance(found, GroupCarrier):
        raise UnsupportedUse("pass the optimizer that was passed to register() or DistributedOptimizer()")
    return found
