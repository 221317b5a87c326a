"""The class derived from the user's optimizer class, its methods, and the choice of a session's parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, NoReturn

import torch
from torch.utils.data.distributed import DistributedSampler

from dgc_horovod.config import DGCConfig, whole_epoch
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.names import put_around
from dgc_horovod.planning.trial import fitted
from dgc_horovod.recording import begin_as_environment_says
from dgc_horovod.torch import state
from dgc_horovod.torch.session.carrier import Carrier
from dgc_horovod.torch.session.session import Closure, Kind, Scaler, Session, all_alive
from dgc_horovod.torch.updates import update_of
from dgc_horovod.torch.wrapping import checks, clip_calls


class Overrides:
    """Methods of the class that is made for an optimizer; it is not instantiated itself."""

    _dgc: Session

    def step(self, closure: Closure | None = None) -> Any:
        """Synchronize, unless that is done or skipped; then step the optimizer. See `Session.step`."""
        return self._dgc.step(closure)

    def synchronize(self) -> None:
        """Wait for every exchange of this step; afterwards ``p.grad`` is the same on every rank."""
        self._dgc.strategy.synchronize()

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Inside, ``step`` applies ``p.grad`` without a second ``synchronize``."""
        return self._dgc.passes.skipping()

    def zero_grad(self, *args: object, **kwargs: object) -> None:
        """As torch's; raises UnsupportedUse between backward and step, while gradients are exchanged."""
        self._dgc.strategy.clear_gradients()
        self._dgc.own("zero_grad")(*args, **kwargs)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return self._dgc.offer_to_scaler()

    def state_dict(self, *args: object, **kwargs: object) -> dict[str, Any]:
        """As the optimizer's own, with the same entries on every rank at any time, for broadcasts of single entries.

        With momentum correction, the momentum of compressed tensors differs between ranks and is in
        ``residual_state_dict``; here it is zero. With local steps: the inner optimizer's state on this rank, and the
        outer momentum.
        """
        return self._dgc.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: dict[str, Any], *args: object, **kwargs: object) -> None:
        """As the optimizer's own; a stock checkpoint's momentum and moments are taken over, and u and v become zero.

        Raises:
            UnsupportedUse: gradients are being exchanged, or an outer momentum is of other parameters.
        """
        self._dgc.load_state_dict(state_dict, *args, **kwargs)

    def residual_state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals and other state that differs between ranks.

        Returns:
            A dict of numbers and tensors, copies, for ``torch.save``; empty for a rank outside the process set.

        Raises:
            UnsupportedUse: between backward() and step().
        """
        return state.to_dict(state.kept_by(self._dgc))

    def load_residual_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load ``residual_state_dict()`` of this rank, after ``load_state_dict``; training continues bit for bit.

        Raises:
            CheckpointError: it is of another rank, number of ranks or model.
        """
        state.load_residuals(self._dgc, state.from_dict(state_dict))

    def flush(self) -> None:
        """Apply the residuals of all ranks by one dense exchange, and empty them.

        Momentum moves to the optimizer's state, so that ``state_dict()`` is a complete stock checkpoint. SGD:
        ``w -= lr*mean(v)``, ``momentum_buffer += mean(u)``, exact. Adam: the same for v, and the shared second moments;
        small tensors keep the rounding error of 8-bit coding. Other optimizers, and methods without momentum
        correction: one step with ``mean(v)`` as gradient. With local steps the present round is exchanged first. Every
        rank must call it, between two steps; gradients are cleared.

        Cost: an fp32 allreduce of v and of u.
        """
        state.flush_between_steps(self._dgc)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (from 0) for the warm-up, in scripts without a DistributedSampler.

        Raises:
            ConfigError: `epoch` is not a whole number.
        """
        self._dgc.exchange.epoch = whole_epoch(epoch)

    def compression_stats(self) -> dict[str, Any]:
        """Return counters of this rank since wrapping; under Horovod Elastic, since the ranks changed.

        Returns:
            ``steps``; ``elements`` and ``selected`` of the sparse path; ``bytes_sent`` and ``bytes_received``:
            bytes passed to and received from collectives, dense path and headers included;
            ``bytes_inside_node``: bytes received from workers of the same node, which the others do not include;
            ``bytes_dense`` and ``bytes_dense_received``: the same for an fp32 ring allreduce of every gradient;
            ``compress_seconds``, ``decode_seconds``; ``exchange_seconds`` waiting for other ranks; ``skipped`` steps;
            figures of health, see `Diagnostics.close`; ``buckets``, see `BucketMeter.stats`. Costs a read of residuals.
        """
        return self._dgc.exchange.stats()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise UnsupportedUse: hooks, buckets and collectives belong to this object in this process."""
        raise UnsupportedUse(
            "a wrapped optimizer cannot be copied or pickled; save optimizer.state_dict(), or copy the model and wrap "
            "a new optimizer of the copy"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Raise UnsupportedUse: the ranks have agreed on the buckets."""
        raise UnsupportedUse(
            "add_param_group after wrapping: the ranks have already agreed on names and buckets; add the group to the "
            "optimizer first, then wrap it"
        )


class OutsideOverrides:
    """The methods of a rank outside the optimizer's process set, which steps alone."""

    def synchronize(self) -> None:
        """Do nothing."""

    def residual_state_dict(self) -> dict[str, Any]:
        """Return an empty dict."""
        return {}

    def load_residual_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""

    def set_epoch(self, epoch: int) -> None:
        """Do nothing."""

    exchange = clear_residuals = flush = synchronize
    compression_stats = residual_state_dict
    add_param_group, __reduce_ex__ = Overrides.add_param_group, Overrides.__reduce_ex__


@put_around(DistributedSampler, "set_epoch")
def _tell_epoch(stock: Callable[..., None], sampler: DistributedSampler[object], epoch: int) -> None:
    """Report the epoch to sessions whose warm-up needs it."""
    stock(sampler, epoch)
    for session in all_alive():
        if session.config.warmup is not None and session.config.warmup.needs_epoch:
            session.exchange.epoch = whole_epoch(epoch)


def made_class(user_class: type, overrides: type, below: Mapping[str, Any], module: str) -> type:
    """Make a class derived from the user's class.

    Args:
        user_class: class of the user's optimizer.
        overrides: class whose methods override all others.
        below: attributes that override those of the user's class, but not `overrides`.
        module: ``__module__`` of the new class.
    """
    ours = {
        name: value
        for base in reversed(overrides.__mro__[:-1])
        for name, value in vars(base).items()
        if not name.startswith("__") or name == "__reduce_ex__"
    }
    for name in ours.keys() & {"step", "synchronize", "zero_grad"}:  # not compiled in a step that a script compiles
        ours[name] = torch.compiler.disable(ours[name])
        ours[name].hooked = True  # else torch wraps ``step`` in its hooks, which `Session.with_hooks` already runs
    return type(user_class.__name__, (user_class,), {**below, **ours, "__module__": module})


def kind_for(
    optimizer: torch.optim.Optimizer,
    named: checks.Named,
    config: DGCConfig,
    averages: bool,
    sparse_as_dense: bool,
    records: bool,
) -> Kind:
    """Choose the parts of a session by `config`, after all checks of the optimizer.

    Args:
        optimizer, named: optimizer that is not wrapped yet, and its parameters with names.
        config: compression settings.
        averages, sparse_as_dense: see `ReduceSettings`.
        records: whether this rank begins the records that the environment asks for.

    Raises:
        ConfigError: the environment asks for records that cannot be written.
        UnsupportedUse: the optimizer, or one of its parameters, cannot be exchanged; gradients are summed, but local
            steps average weights; or momentum correction does not support an option of the optimizer.
    """
    checks.check_optimizer(optimizer, sparse_as_dense)
    checks.check_parameters(optimizer, named)
    config.check_reduction(averages)
    update = update_of(optimizer, config)
    if records:
        begin_as_environment_says(config)
    module = import_module(f"dgc_horovod.torch.session.{config.strategy or 'strategies'}")
    return Kind(fitted(config), module.STRATEGY, update, getattr(module, "OVERRIDES", Overrides))


def begin(optimizer: Any, carrier: Carrier, kind: Kind, scaler: Scaler) -> None:
    """Make the session of `optimizer`, which has the methods of `Kind.overrides`.

    Args:
        optimizer, carrier, scaler: see `Session`.
        kind: parts of the session.

    Raises:
        RankMismatch: on every rank, if the ranks differ in model, config or version.
    """
    clip_calls.watch()
    optimizer._dgc = Session(optimizer, carrier, kind, scaler)
    optimizer._dgc.start()
