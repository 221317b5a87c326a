"""Which strategy, update and methods a compression takes, and the session that is made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dgc_horovod.config import DGCConfig
from dgc_horovod.planning.density import fitted
from dgc_horovod.torch import epochs
from dgc_horovod.torch.clipping import calls as clip_calls
from dgc_horovod.torch.local.update import LocalUpdate
from dgc_horovod.torch.session.auto import AutoTuned
from dgc_horovod.torch.session.carrier import Carrier
from dgc_horovod.torch.session.every_step import EveryStep
from dgc_horovod.torch.session.local import LocalSteps
from dgc_horovod.torch.session.overrides import LocalOverrides, Overrides
from dgc_horovod.torch.session.session import Scaler, Session
from dgc_horovod.torch.session.strategy import Strategy
from dgc_horovod.torch.updates.base import PlainUpdate
from dgc_horovod.torch.updates.choice import choose_update, kind_of


class Kind(NamedTuple):
    """What a session is made of.

    Args:
        config: compression settings, with what follows from the strategy.
        strategy: class of the strategy.
        update: function of the optimizer and the settings, of its split.
        overrides: class of the methods that the user's optimizer gets.
    """

    config: DGCConfig
    strategy: type[Strategy]
    update: Callable[[torch.optim.Optimizer, DGCConfig], PlainUpdate]
    overrides: type


def kind_for(config: DGCConfig, averages: bool) -> Kind:
    """The strategy that `config` asks for.

    Raises:
        UnsupportedUse: gradients are to be summed, and local steps average weights.
    """
    config.check_reduction(averages)
    if config.exchanges_weights:
        return Kind(config, LocalSteps, _local_update, LocalOverrides)
    if config.automatic:
        return Kind(fitted(config), AutoTuned, choose_update, Overrides)
    return Kind(config, EveryStep, choose_update, Overrides)


def begin(optimizer: Any, carrier: Carrier, kind: Kind, update: PlainUpdate, scaler: Scaler) -> None:
    """Give `optimizer`, which has the methods of `Kind.overrides`, its session.

    Args:
        optimizer, carrier, update, scaler: see `Session`.
        kind: what the session is made of.

    Raises:
        RankMismatch: on every rank, if the ranks differ in model, config or version.
    """
    clip_calls.watch()
    epochs.watch()
    optimizer._dgc = Session(optimizer, carrier, kind.config, update, scaler, kind.strategy)
    optimizer._dgc.start()


def _local_update(optimizer: torch.optim.Optimizer, config: DGCConfig) -> PlainUpdate:
    return LocalUpdate(kind_of(optimizer), config.outer_rate)
