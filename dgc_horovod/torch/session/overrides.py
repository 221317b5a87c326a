"""The class over the user's optimizer, its thin methods, and the session that a compression takes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn

import torch

from dgc_horovod.config import DGCConfig
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.planning.trial import fitted
from dgc_horovod.torch import epochs, state
from dgc_horovod.torch.clipping import calls as clip_calls
from dgc_horovod.torch.session.auto import AutoTuned
from dgc_horovod.torch.session.carrier import Carrier
from dgc_horovod.torch.session.local import LocalSteps
from dgc_horovod.torch.session.session import Closure, Scaler, Session
from dgc_horovod.torch.session.strategies import EveryStep, Strategy
from dgc_horovod.torch.updates import Update, update_of


class Overrides:
    """Methods of the class that is made for an optimizer; never instantiated itself."""

    _dgc: Session

    def step(self, closure: Closure | None = None) -> Any:
        """Synchronize unless that is done or skipped, then apply the optimizer; see `Session.step`."""
        return self._dgc.step(closure)

    def synchronize(self) -> None:
        """Wait for every exchange of this step; afterwards ``p.grad`` is the same on every rank."""
        self._dgc.strategy.synchronize()

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Inside, ``step`` applies what stands in ``p.grad`` after ``synchronize``."""
        return self._dgc.passes.skipping()

    def zero_grad(self, *args: object, **kwargs: object) -> None:
        """As torch's, and an error between backward and step, while gradients are being exchanged."""
        self._dgc.zero_grad(*args, **kwargs)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return self._dgc.offer_to_scaler()

    def state_dict(self, *args: object, **kwargs: object) -> dict[str, Any]:
        """As the optimizer's own. It has the same entries on every rank at any time: they may be broadcast one by one.

        Between steps with momentum correction, the momentum of compressed tensors is this rank's own
        (``residual_state_dict``); here it is zero. With local steps: the inner optimizer's state on this rank, and the
        outer momentum.
        """
        return self._dgc.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: dict[str, Any], *args: object, **kwargs: object) -> None:
        """As the optimizer's own; a stock checkpoint's momentum and moments are taken over, and u and v start empty.

        Raises:
            UnsupportedUse: gradients are being exchanged, or an outer momentum is of other parameters.
        """
        self._dgc.load_state_dict(state_dict, *args, **kwargs)

    def residual_state_dict(self) -> dict[str, Any]:
        """What this rank has kept of gradients that the model has not had yet: training state, of this rank alone.

        Returns:
            A dict of numbers and tensors, copies, for ``torch.save``; empty for a rank outside the process set.

        Raises:
            UnsupportedUse: between backward() and step().
        """
        return state.to_dict(state.kept_by(self._dgc))

    def load_residual_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on, bit for bit, from ``residual_state_dict()`` of this rank; after ``load_state_dict``.

        Raises:
            CheckpointError: it is of another rank, another number of ranks or another model.
        """
        state.load_residuals(self._dgc, state.from_dict(state_dict))

    def flush(self) -> None:
        """Apply everything that the ranks have kept, by one dense exchange: no residual is left on any rank.

        Momentum goes where the optimizer has it, so that ``state_dict()`` is a stock checkpoint of which nothing is
        missing. SGD: ``w -= lr*mean(v)``, ``momentum_buffer += mean(u)``, exact. Adam: the same for v, and the second
        moment that all ranks share; what 8-bit coding has left of small tensors stays. Other optimizers, and methods
        without momentum correction: a step of theirs with ``mean(v)`` as gradient. With local steps the round under way
        is exchanged first. Every rank must call it, between two steps; gradients are cleared.

        Cost: an fp32 allreduce of v and of u.
        """
        state.flush_between_steps(self._dgc)

    def set_epoch(self, epoch: int) -> None:
        """Tell the warm-up which epoch (from 0) it is, where no DistributedSampler does.

        Raises:
            ConfigError: it is no whole number.
        """
        self._dgc.exchange.epoch = epochs.whole(epoch)

    def compression_stats(self) -> dict[str, Any]:
        """What this rank has exchanged since it was wrapped; under Horovod Elastic, since the ranks changed.

        Returns:
            ``steps``; ``elements`` and ``selected`` of the sparse path; ``bytes_sent`` and ``bytes_received``:
            everything handed to and received from collectives, dense path and headers included;
            ``bytes_inside_node``: what came from workers of the same node, which is in neither of them;
            ``bytes_dense`` and ``bytes_dense_received``: the same for an fp32 ring allreduce of every gradient;
            ``compress_seconds``, ``decode_seconds``; ``exchange_seconds`` waiting for other ranks; ``skipped`` steps;
            figures of health, see `Diagnostics.close`; ``buckets``, see `BucketMeter.stats`. Costs a read of residuals.
        """
        return self._dgc.exchange.stats()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raises UnsupportedUse: hooks, buckets and collectives belong to this object in this process."""
        raise UnsupportedUse(
            "a wrapped optimizer cannot be copied or pickled; keep optimizer.state_dict(), or copy the model and wrap "
            "a new optimizer over the copy"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Raises UnsupportedUse: the ranks have agreed on the buckets."""
        raise UnsupportedUse(
            "add_param_group after wrapping: the ranks have already agreed on names and buckets; add the group to the "
            "optimizer first, then wrap it"
        )


class LocalOverrides(Overrides):
    """Those of an optimizer with local steps."""

    def exchange(self) -> None:
        """Exchange what the weights have changed by since the last time; every rank must call it, between two steps.

        Afterwards the weights are the same on every rank. ``step`` does it every ``local_steps`` steps. Right after an
        exchange it sends some more of what waits.
        """
        _local(self._dgc).exchange()

    def clear_residuals(self) -> None:
        """Empty `e` and outer momentum, and begin a round with the weights that a script has set.

        Every rank calls it, between two steps, and has set them to the same.
        """
        _local(self._dgc).clear_residuals()


def _local(session: Session) -> LocalSteps:
    assert isinstance(session.strategy, LocalSteps)
    return session.strategy


class OutsideOverrides:
    """Those of a rank that is not in the optimizer's process set: it steps alone, and says nothing."""

    def synchronize(self) -> None:
        """Nothing."""

    def residual_state_dict(self) -> dict[str, Any]:
        """Nothing is kept."""
        return {}

    def compression_stats(self) -> dict[str, Any]:
        """Nothing is exchanged."""
        return {}

    def load_residual_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""

    def set_epoch(self, epoch: int) -> None:
        """Nothing."""

    exchange = clear_residuals = flush = synchronize
    add_param_group, __reduce_ex__ = Overrides.add_param_group, Overrides.__reduce_ex__


def made_class(user_class: type, overrides: type, below: Mapping[str, Any], module: str) -> type:
    """A class one level over the user's.

    Args:
        user_class: class of the user's optimizer.
        overrides: class whose methods go over all others.
        below: attributes that go over the user's class, and under these.
        module: its ``__module__``.
    """
    ours = {
        name: value
        for base in reversed(overrides.__mro__[:-1])
        for name, value in vars(base).items()
        if not name.startswith("__") or name == "__reduce_ex__"
    }
    for name in ours.keys() & {"step", "synchronize", "zero_grad"}:  # as they are in a step that a script compiles
        ours[name] = torch.compiler.disable(ours[name])
        ours[name].hooked = True  # else torch puts its hooks around a step, which are around what it does already
    return type(user_class.__name__, (user_class,), {**below, **ours, "__module__": module})


class Kind(NamedTuple):
    """What a session is made of.

    Args:
        config: compression settings, with what follows from the strategy.
        strategy: class of the strategy.
        update: what the optimizer does with what was exchanged.
        overrides: class of the methods that the user's optimizer gets.
    """

    config: DGCConfig
    strategy: type[Strategy]
    update: Update
    overrides: type


def kind_for(optimizer: torch.optim.Optimizer, config: DGCConfig, averages: bool) -> Kind:
    """What `config` asks for.

    Raises:
        UnsupportedUse: gradients are to be summed, and local steps average weights; the optimizer has an option that
            momentum correction would get wrong.
    """
    config.check_reduction(averages)
    if config.exchanges_weights:
        return Kind(config, LocalSteps, update_of(optimizer, config), LocalOverrides)
    if config.automatic:
        return Kind(fitted(config), AutoTuned, update_of(optimizer, config), Overrides)
    return Kind(config, EveryStep, update_of(optimizer, config), Overrides)


def begin(optimizer: Any, carrier: Carrier, kind: Kind, scaler: Scaler) -> None:
    """Give `optimizer`, which has the methods of `Kind.overrides`, its session.

    Args:
        optimizer, carrier, scaler: see `Session`.
        kind: what the session is made of.

    Raises:
        RankMismatch: on every rank, if the ranks differ in model, config or version.
    """
    clip_calls.watch()
    epochs.watch()
    optimizer._dgc = Session(optimizer, carrier, kind.config, kind.update, scaler, kind.strategy)
    optimizer._dgc.start()
