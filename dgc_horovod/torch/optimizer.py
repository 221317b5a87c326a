"""``DistributedOptimizer``: Horovod's own, with its gradient exchange replaced; and its checkpoints.

The class of the returned object is made at run time, derived directly from the user's class. It has the methods of
Horovod's ``_DistributedOptimizer``, overridden by `Overrides`, which call the optimizer's `Session`. Horovod is not
copied or changed; ``Compression.none`` and ``.fp16`` are passed to Horovod's own factory.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.compression import Compression as HorovodCompression
from horovod.torch.optimizer import _DistributedOptimizer
from torch.nn import Module
from torch.optim import Optimizer

from dgc_horovod import envvars
from dgc_horovod.compression import ConfiguredCompressor, Presets, config_of
from dgc_horovod.config import DGCConfig, check_predivide
from dgc_horovod.errors import ConfigError, UnsupportedUse
from dgc_horovod.files import AnyPath
from dgc_horovod.notices import AUTO_IN_ELASTIC, tell_stock
from dgc_horovod.settings import check_whole
from dgc_horovod.state import checkpoint
from dgc_horovod.torch import state
from dgc_horovod.torch.elastic import ElasticCarrier
from dgc_horovod.torch.gradients.clipping import limit_averages
from dgc_horovod.torch.horovod_carrier import WITHOUT_CUDA, HorovodCarrier, HorovodCollectives, needs_host
from dgc_horovod.torch.session.carrier import Carrier
from dgc_horovod.torch.session.overrides import OutsideOverrides, begin, kind_for, made_class
from dgc_horovod.torch.session.session import Scaler, session_of
from dgc_horovod.torch.wrapping import checks


class Compression(Presets):
    """Compression methods. ``none`` and ``fp16`` are Horovod's; the others take any field of DGCConfig as keyword."""

    adapter = "torch"
    none = HorovodCompression.none
    fp16 = HorovodCompression.fp16


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: object = HorovodCompression.none,
    backward_passes_per_step: int = 1,
    op: int = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Iterable[Iterable[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    *,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> Any:
    """Wrap `optimizer` so that every step uses the gradients of all ranks, with compressed communication.

    Signature and behaviour are those of ``horovod.torch.DistributedOptimizer``.

    Args:
        optimizer: any torch optimizer; its state and parameter groups are kept.
        named_parameters: ``model.named_parameters()``; names must be unique and the same on every rank.
        compression: ``Compression.none``, ``.fp16``, ``.dgc(...)``, ``.topk(...)``, ..., or a DGCConfig.
        backward_passes_per_step: number of backward passes summed before one exchange, >= 1.
        op: reduction, hvd.Average or hvd.Sum; with compression no other.
        gradient_predivide_factor: divisor of the gradients before the sum and factor after it, > 0.
        num_groups, groups: groups of gradients reduced together, or their number; with compression, bucket boundaries.
        sparse_as_dense: whether sparse gradients are exchanged as dense ones; with compression, compressed.
        process_set: ranks that take part.
        grad_scaler: GradScaler of the script; residuals are then unscaled.

    Returns:
        An instance of ``type(optimizer)`` with Horovod's methods, and ``compression_stats()``, ``set_epoch()``,
        ``flush()``, ``residual_state_dict()`` and ``load_residual_state_dict()``.

    Raises:
        ConfigError: an argument is out of range.
        UnsupportedUse: a combination of arguments that is not supported, or would train wrongly.
        RankMismatch: on every rank, if the ranks differ in model, config or version.
    """
    if isinstance(named_parameters, (ConfiguredCompressor, DGCConfig)):
        raise ConfigError("the second argument is named_parameters; pass the compression as compression=...")
    config = config_of(compression)
    given = list(named_parameters) if named_parameters is not None else None  # it may be a generator
    settings: dict[str, Any] = {
        "backward_passes_per_step": backward_passes_per_step,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "sparse_as_dense": sparse_as_dense,
        "process_set": process_set,
    }

    def stock(theirs: object) -> Any:
        wrap = inspect.unwrap(hvd.DistributedOptimizer)  # under dgcrun hvd.DistributedOptimizer is ours
        return wrap(optimizer, given, theirs, num_groups=num_groups, groups=groups, **settings)

    if config is None:
        with checks.alike(_comparing(process_set), compression):
            uncompressed = stock(compression)
        return uncompressed
    try:
        borders = groups if groups is not None else (num_groups or None)
        return _compressing(optimizer, given, config, grad_scaler, groups=borders, **settings)
    except checks.NoChoice as refused:
        if hvd.rank() == 0:
            tell_stock(str(refused), HorovodCarrier.stock)
        uncompressed = stock(HorovodCompression.none)
        limit_averages(uncompressed, config.clip_norm)
        return uncompressed


def _compressing(
    optimizer: Optimizer, given: checks.Named | None, config: DGCConfig, grad_scaler: Scaler, **settings: Any
) -> Any:
    """`DistributedOptimizer` with compression; `settings` are Horovod's."""
    op, process_set = settings["op"], settings["process_set"]
    with checks.alike(_comparing(process_set), may_stay=config.automatic):
        named = checks.checked_names(optimizer, given)
        if op not in (hvd.Average, hvd.Sum):
            raise UnsupportedUse(
                "compression works with op=hvd.Average or hvd.Sum; for Adasum and the others use "
                "compression=Compression.none, under dgcrun --compression none"
            )
        check_predivide(settings["gradient_predivide_factor"], op == hvd.Average)
        check_whole("backward_passes_per_step", settings["backward_passes_per_step"], 1)
        checks.check_plain_models(optimizer, named)
        if config.automatic and envvars.horovod_elastic():
            raise UnsupportedUse(AUTO_IN_ELASTIC)
        if config.automatic and any(needs_host(p) for _, p in named):
            raise UnsupportedUse(f"{WITHOUT_CUDA}. Compression auto begins with Horovod's own exchange")
        records = process_set.included() and hvd.rank() == 0
        kind = kind_for(optimizer, named, config, op == hvd.Average, settings["sparse_as_dense"], records)
        wrapped = _adopt(optimizer, named, kind.overrides if process_set.included() else OutsideOverrides, **settings)
    if process_set.included():
        carrier = ElasticCarrier(wrapped) if envvars.horovod_elastic() else HorovodCarrier(wrapped)
        wrapped._groups = None  # they are used as bucket boundaries only
        begin(wrapped, carrier, kind, grad_scaler)
    return wrapped


def _comparing(process_set: hvd.ProcessSet) -> HorovodCollectives | None:
    """Return a transport to compare choices; None under Elastic: there a newcomer wraps while others wait in sync."""
    compares = process_set.included() and not envvars.horovod_elastic()
    return HorovodCollectives(process_set, "choice") if compares else None


def _adopt(optimizer: Optimizer, named: checks.Named, overrides: type, **settings: Any) -> Any:
    """Make a distributed optimizer with the state of `optimizer`, without calling its class's constructor again.

    Args:
        optimizer, named: optimizer, and its parameters with names.
        overrides: class whose methods override Horovod's.
        settings: Horovod's arguments.
    """
    user_class: Any = type(optimizer)
    # on a rank outside the process set, these methods are the user's
    left_out = ("step", "zero_grad", "load_state_dict") if overrides is OutsideOverrides else ()
    below = {name: x for name, x in vars(_DistributedOptimizer).items() if name not in left_out}
    below["set_backward_passes_per_step"] = _set_passes
    # broadcast_optimizer_state expects a class derived directly from the user's, with Horovod's __module__
    final = made_class(user_class, overrides, below, _DistributedOptimizer.__module__)
    # Horovod's constructor calls that of its base class with (params), which fails for some optimizers: while it runs,
    # the base class is one whose constructor does nothing. Hooks are ours, and registered later.
    quiet = type(user_class.__name__, (user_class,), {"__init__": lambda self, params: None})
    methods = {**vars(final), "_register_hooks": lambda self: None}
    under_construction = type(user_class.__name__, (quiet,), methods)
    wrapped: Any = object.__new__(under_construction)
    # wrappers of methods on the object (a scheduler's, the script's) stay on the unwrapped optimizer, as in stock
    kept = {name: x for name, x in optimizer.__dict__.items() if not callable(getattr(Optimizer, name, None))}
    wrapped.__dict__.update(kept)
    wrapped.__init__(wrapped.param_groups, named, HorovodCompression.none, **settings)
    wrapped.__class__ = final
    return wrapped


def _set_passes(self: _DistributedOptimizer, passes: int) -> None:
    """See Horovod's ``set_backward_passes_per_step``."""
    check_whole("backward_passes_per_step", passes, 1)
    self.backward_passes_per_step = passes
    session = session_of(self)
    if session is not None:  # None: this rank is not in the process set
        session.passes.sum_up(passes)


def save_checkpoint(directory: AnyPath, model: Module, optimizer: Optimizer, **extra: object) -> None:
    """Save model, optimizer and every rank's residuals; call it on every rank of the optimizer, between two steps.

    Args:
        directory: path, created if missing; one for each optimizer. A checkpoint in it is replaced when the new one is
            complete; other files are not changed.
        model: module whose state is saved.
        optimizer: optimizer of ``DistributedOptimizer``, with any compression.
        extra: more values to save: numbers, texts, tensors, dicts and lists of them (a scheduler's ``state_dict()``,
            the epoch, the state of a random generator); those of rank 0 are saved.

    Raises:
        CheckpointError: on every rank, if any rank cannot write, or is between backward() and step().

    Cost: u and v of every rank are written, twice the model's size each with momentum.
    """
    state.save(directory, model, optimizer, extra, _carrier_of(optimizer))


def load_checkpoint(
    directory: AnyPath, model: Module, optimizer: Optimizer, residuals: str = checkpoint.REQUIRED
) -> dict[str, Any]:
    """Load a checkpoint of ``save_checkpoint``; call it on every rank of the optimizer, for any number of ranks.

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
    return state.load(directory, model, optimizer, residuals, _carrier_of(optimizer))


def _carrier_of(optimizer: Any) -> Carrier:
    """Return the carrier of an optimizer of ``DistributedOptimizer``, which may be stock Horovod's own."""
    if not hasattr(optimizer, "_requires_update"):
        raise UnsupportedUse(f"pass the optimizer that DistributedOptimizer returned, got {type(optimizer).__name__}")
    if not optimizer.process_set.included():
        raise UnsupportedUse("this rank is not in the optimizer's process set; call it on ranks of the set only")
    session = session_of(optimizer)
    if session is None:
        return HorovodCarrier(optimizer)
    session.carrier.follow(session)
    return session.carrier
