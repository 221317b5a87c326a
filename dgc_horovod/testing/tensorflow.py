"""The parts of a Keras optimizer or a GradientTape that ``dgc_horovod.tensorflow`` has wrapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.state.residual_state import ResidualState
from dgc_horovod.tensorflow.auto import AutomaticExchange
from dgc_horovod.tensorflow.distribution import Distribution
from dgc_horovod.tensorflow.gradients.exchange import Exchange, GradientExchange
from dgc_horovod.tensorflow.local_steps import LocalRounds
from dgc_horovod.tensorflow.settings import Settings


@dataclass(frozen=True)
class SessionView:
    """The parts of an optimizer, or of all tapes with the same settings; made by `session`."""

    _distribution: Distribution
    _strategy: Any  # the optimizer's strategy; None for a tape

    @property
    def settings(self) -> Settings:
        """Settings of the wrapping; ``config`` is None if nothing is compressed."""
        return self._distribution.settings

    @property
    def exchanges(self) -> list[Exchange]:
        """Exchanges, one for each set of variables that was trained; empty before the first step."""
        return self._distribution.exchanges

    @property
    def exchange(self) -> GradientExchange:
        """The only exchange of compressed gradients."""
        (exchange,) = self._distribution.compressing
        return exchange

    @property
    def buckets(self) -> OptimizerExchange:
        """The engines of the exchange, their state, counters and config."""
        return self.exchange.steps.buckets

    @property
    def choice(self) -> Any:
        """The `Choice` of ``Compression.auto``."""
        assert isinstance(self.exchange, AutomaticExchange)
        return self.exchange.choice

    @property
    def rounds(self) -> LocalRounds:
        """The rounds of local steps, of an optimizer that is built."""
        rounds: LocalRounds = self._strategy.rounds
        return rounds

    def residuals(self) -> ResidualState | None:
        """Copy the residuals, also within a round of local steps, without the inner optimizer's variables."""
        return self._distribution.residuals(own=False)


def session(wrapped: Any) -> SessionView:
    """Return the parts of `wrapped`, an optimizer or a tape."""
    return SessionView(wrapped._dgc.distribution, getattr(wrapped._dgc, "strategy", None))


def make_exchange(optimizer: Any, variables: Sequence[Any]) -> None:
    """Agree with the other ranks on the exchange of `variables`, as the first step does."""
    optimizer._dgc.distribution.variable_set(variables, [tf.zeros(variable.shape) for variable in variables])
