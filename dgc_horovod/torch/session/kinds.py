"""Which strategy, update and methods a compression takes, and the session that is made of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dgc_horovod.config import DGCConfig
from dgc_horovod.planning.density import fitted
from dgc_horovod.torch import epochs
from dgc_horovod.torch.clipping import calls as clip_calls
from dgc_horovod.torch.session.auto import AutoTuned
from dgc_horovod.torch.session.carrier import Carrier
from dgc_horovod.torch.session.every_step import EveryStep
from dgc_horovod.torch.session.local import LocalSteps
from dgc_horovod.torch.session.overrides import LocalOverrides, Overrides
from dgc_horovod.torch.session.session import Scaler, Session
from dgc_horovod.torch.session.strategy import Strategy
from dgc_horovod.torch.updates import Update, update_of


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
