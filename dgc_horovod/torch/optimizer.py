"""``DistributedOptimizer``: Horovod's own, with its gradient exchange replaced.

The returned object's class is made on the spot, exactly one level over the user's class, out of the
methods of Horovod's ``_DistributedOptimizer`` and the few overridden here. Nothing of Horovod is copied
or changed; ``Compression.none`` and ``.fp16`` go to Horovod's own factory untouched.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.util import split_list
from horovod.torch.compression import Compression as HorovodCompression
from horovod.torch.optimizer import _DistributedOptimizer

from dgc_horovod import __version__
from dgc_horovod.config import FIELD_NAMES, DGCConfig
from dgc_horovod.errors import ConfigError, UnsupportedUse
from dgc_horovod.torch import epochs
from dgc_horovod.torch.agreement import check_agreement, unique_tag
from dgc_horovod.torch.collectives import Collectives
from dgc_horovod.torch.compression import config_of
from dgc_horovod.torch.exchange import GradientExchange, ReduceSettings
from dgc_horovod.torch.updates import PlainUpdate, choose_update

_log = logging.getLogger("dgc_horovod")


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = HorovodCompression.none,
    backward_passes_per_step: int = 1,
    op: int = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    *,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> Any:
    """Wrap `optimizer` so that every step uses the gradients of all ranks, compressed on the way.

    Signature and behaviour are those of ``horovod.torch.DistributedOptimizer``.

    Args:
        optimizer: any torch optimizer; its state and parameter groups are kept.
        named_parameters: ``model.named_parameters()``; names must be unique and the same on every rank.
        compression: ``Compression.none``, ``.fp16``, ``.dgc(...)``, ``.topk(...)``, ..., or a DGCConfig.
        backward_passes_per_step: backward passes summed before one exchange, >= 1.
        op: hvd.Average or hvd.Sum; with compression no other.
        gradient_predivide_factor: part of the averaging done before the sum; no effect on exact arithmetic.
        num_groups, groups: with compression, boundaries of buckets.
        sparse_as_dense: exchange sparse gradients as dense ones; with compression, compressed.
        process_set: the ranks that take part.
        grad_scaler: the script's GradScaler; residuals are then kept in unscaled units.

    Returns:
        An instance of ``type(optimizer)`` with Horovod's methods, and ``compression_stats()``, ``set_epoch()``.

    Raises:
        ConfigError: an argument is out of range.
        UnsupportedUse: a combination that would train wrongly.
        RankMismatch: on every rank, if the ranks differ in model, config or version.
    """
    config = config_of(compression)
    if config is None:
        return hvd.DistributedOptimizer(
            optimizer,
            named_parameters,
            compression,
            backward_passes_per_step,
            op,
            gradient_predivide_factor,
            num_groups,
            groups,
            sparse_as_dense,
            process_set,
        )
    named = _checked_names(optimizer, named_parameters)
    _check_arguments(optimizer, op, gradient_predivide_factor, backward_passes_per_step)
    update = choose_update(optimizer, config)
    wrapped = _adopt(
        optimizer,
        named,
        backward_passes_per_step=backward_passes_per_step,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups if groups is not None else (num_groups or None),
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    wrapped._attach(config, update, grad_scaler)
    return wrapped


class _CompressedMethods:
    """The methods that replace Horovod's in the class made by `_adopt`. Never instantiated itself."""

    _dgc: GradientExchange
    _dgc_update: PlainUpdate

    def _attach(self: Any, config: DGCConfig, update: PlainUpdate, grad_scaler: Any) -> None:
        """Second half of construction: agree with the other ranks, lay out the buckets, hook the gradients."""
        self._dgc_update, self._dgc_scaler = update, grad_scaler
        self._dgc_may_apply, self._dgc_versions, self._dgc_told = True, {}, set()
        if getattr(self, "_step_supports_amp_scaling", False):
            self._step_supports_amp_scaling = False  # a fused step would unscale the dense path only
        if not self.process_set.included():
            return
        parameters = {self._parameter_names[p]: p for g in self.param_groups for p in g["params"] if p.requires_grad}
        collectives = Collectives(self.process_set, unique_tag("\n".join(parameters)))
        check_agreement(collectives, _agreed_fields(self, parameters, config))
        self._dgc = GradientExchange(
            parameters,
            _boundaries(self, parameters),
            config,
            collectives,
            ReduceSettings(self.op, self.gradient_predivide_factor, self.sparse_as_dense),
            _scale_of(grad_scaler),
        )
        self._groups = None  # their only use here is as bucket boundaries
        update.prepare(self, self._dgc.compressed)
        if config.warmup is not None and config.warmup.needs_epoch:
            epochs.observe(self._dgc)
        self._dgc_group_of = {p: i for i, g in enumerate(self.param_groups) for p in g["params"]}
        self._register_hooks()
        if collectives.rank == 0:
            _describe(self._dgc)

    def _register_hooks(self: Any) -> None:
        # The hook must not keep the optimizer alive: a script may wrap the same model again.
        weak = weakref.ref(self)

        def ready(p: torch.Tensor) -> None:
            optimizer = weak()
            if optimizer is not None:
                optimizer._make_hook(p)()

        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    self._requires_update.add(p)
                    self._grad_accs.append(p.register_post_accumulate_grad_hook(ready))

    def _allreduce_grad_async(self: Any, p: torch.Tensor) -> tuple[Callable[[], torch.Tensor], None]:
        """Called by Horovod's hook or synchronize when the gradient of `p` is to be exchanged."""
        if p.grad is None:  # unused in this step; another rank may have used it
            p.grad = torch.zeros_like(p)
        group, state = self.param_groups[self._dgc_group_of[p]], self.state
        if (moments := self._dgc_update.adopt_state(p, state[p]) if p in self._dgc_compressed else None) is not None:
            self._dgc.load_moments(p, moments)
        feed = lambda: self._dgc_update.feed(p, group, state[p])  # noqa: E731
        return self._dgc.submit(p, feed, self._dgc_update.decay_before(group)), None

    @property
    def _dgc_compressed(self: Any) -> Any:
        return self._dgc._place

    def synchronize(self: Any) -> None:
        """Wait for every exchange of this step; afterwards ``p.grad`` is the same on every rank."""
        _DistributedOptimizer.synchronize(self)
        if not self.process_set.included():
            return
        self._dgc_kept = {}
        if self._dgc.config.clip_norm is not None:
            scale = _scale_of(self._dgc_scaler)()
            self._dgc_kept = {p: p.grad / scale for p in self._dgc.dense}
        self._dgc_may_apply = self._dgc.finish()
        self._dgc_versions = {p: p.grad._version for p in self._dgc.names}

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize unless that is done or skipped, then apply the optimizer.

        A step in which any rank's gradient was not finite is applied on no rank. A closure is evaluated
        first, so that its gradients are the ones exchanged.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        own_step = super(type(self), self).step  # type: ignore[misc]
        if not self.process_set.included():
            own_step()
            return loss
        if self._should_synchronize and (self._handles or not self._synchronized):
            self.synchronize()
        self._synchronized = False
        if not self._dgc_may_apply:
            self._tell_once("nonfinite", "a gradient was not finite on some rank; that step is applied on no rank")
            return loss
        self._check_untouched()
        self._dgc_update.step(self, self._dgc.compressed, own_step)
        return loss

    def _check_untouched(self: Any) -> None:
        """Notice a script that clips after synchronize(): what it clips is an update, not a gradient."""
        expected = 1 if self._dgc_scaler is not None and self._dgc_scaler.is_enabled() else 0  # unscale_
        touched = [p for p, version in self._dgc_versions.items() if _version(p) - version > expected]
        if self._dgc.config.clip_norm is not None:
            if touched:
                for p in self._dgc.compressed:
                    self._dgc.refill(p)
                for p, grad in self._dgc_kept.items():
                    p.grad.copy_(grad)
        elif touched:
            self._tell_once(
                "clipping",
                "p.grad was changed between synchronize() and step(). After compression it is an update that arrives "
                "in bursts, and what is clipped off it is lost; pass clip_norm=c to the compression instead",
            )

    def _tell_once(self: Any, key: str, text: str) -> None:
        if key not in self._dgc_told and self._dgc.collectives.rank == 0:
            self._dgc_told.add(key)
            _log.warning("dgc_horovod: %s", text)

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """As torch's, and an error between backward and step, while gradients are being exchanged."""
        if self._handles:
            raise UnsupportedUse(
                "optimizer.zero_grad() was called after backward() but before step() or synchronize(); the gradients "
                "are being exchanged. Call it after step(), or before backward()"
            )
        super(type(self), self).zero_grad(set_to_none)  # type: ignore[misc]

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """As torch's; a stock checkpoint's momentum and moments are taken over. A step under way is dropped."""
        _DistributedOptimizer.load_state_dict(self, state_dict)
        if self.process_set.included():
            self._dgc.abandon_step()

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        """Raises UnsupportedUse: the ranks have agreed on the buckets."""
        raise UnsupportedUse(
            "add_param_group after wrapping: the ranks have already agreed on names and buckets; add the group to the "
            "optimizer first, then wrap it"
        )

    def set_epoch(self: Any, epoch: int) -> None:
        """Tell the warm-up which epoch (from 0) it is, where no DistributedSampler does."""
        if self.process_set.included():
            self._dgc.epoch = epoch

    def compression_stats(self: Any) -> dict[str, int]:
        """What this rank has exchanged since it was wrapped.

        Returns:
            ``steps``; ``elements`` and ``selected`` of the sparse path; ``bytes_sent`` and ``bytes_received``:
            everything handed to and received from collectives, dense path and headers included;
            ``bytes_dense`` and ``bytes_dense_received``: the same for an fp32 ring allreduce of every gradient.
        """
        return self._dgc.stats() if self.process_set.included() else {}


def _adopt(optimizer: torch.optim.Optimizer, named: list[tuple[str, torch.Tensor]], **settings: Any) -> Any:
    """A distributed optimizer with `optimizer`'s state, without running its class's constructor again."""
    user_class: Any = type(optimizer)
    ours = {k: v for k, v in vars(_CompressedMethods).items() if k not in ("__dict__", "__weakref__", "__module__", "__doc__")}
    methods = {**vars(_DistributedOptimizer), **ours}
    # broadcast_optimizer_state expects the class one level over the user's, with Horovod's __module__
    final = type(user_class.__name__, (user_class,), methods)
    # Horovod's constructor calls the next class's with (params), which not every optimizer survives: while it
    # runs, that next class is one that does nothing. Its hooks are ours, and registered later.
    quiet = type(user_class.__name__, (user_class,), {"__init__": lambda self, params: None})
    under_construction = type(user_class.__name__, (quiet,), {**methods, "_register_hooks": lambda self: None})
    wrapped = under_construction.__new__(under_construction)
    wrapped.__dict__.update(optimizer.__dict__)
    wrapped.__dict__.pop("step", None)  # a scheduler's wrapper around the unwrapped optimizer's step
    wrapped.__init__(wrapped.param_groups, named, HorovodCompression.none, **settings)
    wrapped.__class__ = final
    return wrapped


def _checked_names(optimizer: torch.optim.Optimizer, named_parameters: Any) -> list[tuple[str, torch.Tensor]]:
    if hasattr(optimizer, "_requires_update"):
        raise UnsupportedUse("this optimizer is already wrapped by a DistributedOptimizer; wrap the torch optimizer itself")
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
    missing = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if missing:
        raise ConfigError(
            f"{len(missing)} parameters of the optimizer have no name in named_parameters (shapes {missing[:5]}); pass "
            "the named_parameters() of every model whose parameters it holds"
        )
    return named


def _check_arguments(optimizer: torch.optim.Optimizer, op: int, predivide: float, passes: int) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if op not in (hvd.Average, hvd.Sum):
        raise UnsupportedUse(
            "compression works with op=hvd.Average or hvd.Sum; for Adasum and the others use compression=Compression.none"
        )
    if predivide != 1.0 and op != hvd.Average:
        raise ConfigError(f"gradient_predivide_factor={predivide} goes with op=hvd.Average only; leave it at 1.0")
    if passes < 1:
        raise ConfigError(f"backward_passes_per_step must be >= 1, got {passes}")


def _agreed_fields(optimizer: Any, parameters: dict[str, torch.Tensor], config: DGCConfig) -> dict[str, str]:
    """What the ranks must have in common, one text each; lists one entry a line."""
    return {
        "version": __version__,
        "optimizer": type(optimizer).__name__,
        "op": str(int(optimizer.op)),
        "backward_passes_per_step": str(optimizer.backward_passes_per_step),
        "sparse_as_dense": str(optimizer.sparse_as_dense),
        **{f"config.{name}": repr(getattr(config, name)) for name in FIELD_NAMES},
        "tensor count": str(len(parameters)),
        "names": "\n".join(parameters),
        "shapes": "\n".join(f"{name} {tuple(p.shape)}" for name, p in parameters.items()),
        "dtypes": "\n".join(f"{name} {p.dtype}" for name, p in parameters.items()),
    }


def _boundaries(optimizer: Any, parameters: dict[str, torch.Tensor]) -> dict[torch.Tensor, int]:
    """A number per parameter; those of one Horovod group and one device share it."""
    groups = optimizer._groups
    if isinstance(groups, int):
        groups = split_list(list(parameters.values()), groups)
    group_of = {p: i for i, group in enumerate(groups or [])  for p in group}
    keys: dict[Any, int] = {}
    return {p: keys.setdefault((group_of.get(p, -1), p.device), len(keys)) for p in parameters.values()}


def _scale_of(grad_scaler: Any) -> Callable[[], float]:
    if grad_scaler is None:
        return lambda: 1.0
    return lambda: float(grad_scaler.get_scale())


def _version(p: torch.Tensor) -> int:
    return p.grad._version if p.grad is not None else 0


def _describe(exchange: GradientExchange) -> None:
    """What is compressed and what is not, and the one recommendation."""
    config, layout = exchange.config, exchange.layout
    numel = sum(bucket.numel for bucket in layout.buckets)
    _log.info(
        "dgc_horovod: %s at density %g: %d tensors (%d elements) in %d buckets; %d tensors (%d elements) stay dense: %s",
        config.rule,
        config.final_density,
        len(exchange.compressed),
        numel,
        len(layout.buckets),
        len(exchange.dense),
        sum(p.numel() for p in exchange.dense),
        ", ".join(layout.dense),
    )
    if not layout.buckets:
        _log.warning(
            "dgc_horovod: NOTHING IS COMPRESSED: every tensor is 1-D or smaller than min_numel=%d", config.min_numel
        )
    elif config.momentum_correction and config.warmup is None and config.density < 0.01:
        _log.warning(
            "dgc_horovod: density warm-up is off; the DGC paper warms up over 4 epochs: "
            "warmup=WarmupSchedule(epochs=4, steps_per_epoch=...)"
        )
