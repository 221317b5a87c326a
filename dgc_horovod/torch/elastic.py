"""Horovod Elastic: residuals are committed and restored with the optimizer, and rescaled when the ranks change.

``hvd.elastic.TorchState`` finds the handler of an optimizer by itself (`register`). A rank's residuals are never
broadcast. When N ranks become M, the residuals of the survivors are scaled by M/N (if gradients are averaged), so the
combined residual stays the same; newcomers start with zero.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import sys
from typing import Any, Protocol, runtime_checkable

import horovod.torch as hvd
import torch
from horovod.torch.elastic import TorchState as HorovodTorchState
from horovod.torch.elastic.state import OptimizerStateHandler, get_handler_registry, set_handler_registry
from horovod.torch.optimizer import _DistributedOptimizer

from dgc_horovod import __version__, envvars
from dgc_horovod.config_check import check_agreement
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.notices import NOT_ALL_RANKS, going_back
from dgc_horovod.state.residual_state import ResidualState
from dgc_horovod.torch.horovod_carrier import HorovodCarrier, HorovodCollectives
from dgc_horovod.torch.session.session import Session, session_of

_log = logging.getLogger("dgc_horovod")


class ElasticCarrier(HorovodCarrier):
    """All ranks of an elastic job, which may change at every step.

    Args:
        optimizer: see `HorovodCarrier`.

    Raises:
        UnsupportedUse: the process set has only some of the ranks; Horovod drops process sets when the ranks change.
    """

    elastic = True

    def __init__(self, optimizer: _DistributedOptimizer) -> None:
        super().__init__(optimizer)
        if self.process_set.process_set_id != 0:
            raise UnsupportedUse(NOT_ALL_RANKS)
        self.agreed = False

    def agree(self, session: Session) -> None:
        """Do nothing yet: a newcomer makes its optimizer while the other ranks wait in sync."""

    def check_ranks(self, session: Session) -> None:
        """Follow a change of the ranks; compare fields once, at the first step, where all ranks meet.

        Raises:
            RankMismatch: on every rank, if they differ.
        """
        self.follow(session)
        if not self.agreed:
            self.agreed = True
            exchange = session.exchange
            fields = {
                **self.agreed_fields(session),
                "step": str(exchange.steps),
                "loss scale (keep the scaler's state_dict() in the TorchState)": str(exchange.loss_scale()),
            }
            check_agreement(self.collectives("start"), fields)

    def follow(self, session: Session) -> None:
        """Adapt to the present ranks: Horovod does not sync the state when a host has only left."""
        collectives = session.exchange.collectives
        if (hvd.size(), hvd.rank()) != (collectives.workers, collectives.rank):
            renew(session, session.kept.record(own=False))


def renew(session: Session, state: ResidualState) -> None:
    """Rebuild the session for the present ranks; this rank continues with `state`, its own, rescaled."""
    session.build()
    session.kept.resume(state.carried_on(hvd.rank(), hvd.size()))
    session.carrier.agreed = False
    if state.workers != hvd.size() and hvd.rank() == 0:
        _log.info("dgc_horovod: the job had %d ranks, and has %d; residuals are kept", state.workers, hvd.size())


class ResidualHandler(OptimizerStateHandler):
    """The handler of a compressed optimizer in a ``TorchState``: Horovod's, extended by this rank's residuals.

    Args:
        optimizer: optimizer of ``DistributedOptimizer``.
    """

    _saved_optimizer_state: Any  # Horovod's attribute

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        found = session_of(optimizer)
        assert found is not None
        self.session = found
        self._saved, self._round = found.kept.record(own=False), found.strategy.remembered()
        self._flushed_at: tuple[int, int] | None = None  # `_place` after the last flush

    def meet(self) -> None:
        """Compare fields with the other ranks before an exchange; waits long, as a newcomer may read data first."""
        collectives = HorovodCollectives(hvd.global_process_set, "meeting", envvars.checkpoint_seconds())
        check_agreement(collectives, {"version": __version__, **self.session.carrier.agreed_fields(self.session)})

    def flush(self) -> None:
        """Flush, unless no step was made since the last flush: the flush of some methods is a step itself."""
        if self._place() != self._flushed_at:
            self.value.flush()
            self._flushed_at = self._place()

    def _place(self) -> tuple[int, int]:
        """Return the numbers of steps, of the training and of the present round."""
        exchange = self.session.exchange
        return exchange.steps, exchange.counts.pending

    def save(self) -> None:
        """Save u, v and the present round with the optimizer's state: a commit."""
        super().save()
        session = self.session
        session.carrier.follow(session)
        if session.is_exchanging:  # between accumulated passes nothing has been passed to the exchange
            session.strategy.check_between_steps()
        self._saved, self._round = session.kept.record(own=False), session.strategy.remembered()

    def restore(self) -> None:
        """Return to the last commit; the present step is given up."""
        going_back(sys.exc_info()[1])
        self._flushed_at = None
        self.session.strategy.go_back(self._round)
        # the optimizer changes the tensors that it loads
        committed = copy.deepcopy(self._saved_optimizer_state)
        super().restore()  # it ends the present step, and empties u and v
        self._saved_optimizer_state = committed
        exchange = self.session.exchange
        self.session.kept.resume(self._saved.carried_on(exchange.rank, exchange.workers))

    def sync(self) -> None:
        """Take over the optimizer's state and the step of rank 0; keep this rank's own residuals."""
        self._flushed_at = None
        self.session.strategy.meet(self._share)

    def _share(self) -> None:
        session = self.session
        own = session.kept.record(own=False)
        session.update.prepare(session.optimizer, session.exchange)  # all ranks must broadcast the same entries
        super().sync()
        shared = hvd.broadcast_object(own.shared, 0, name="dgc.elastic.step")
        renew(session, dataclasses.replace(own, **shared))  # with this rank's own u and v


class TorchState(HorovodTorchState):
    """``hvd.elastic.TorchState`` with an option to flush at each commit.

    Args:
        model, optimizer, kwargs: see ``hvd.elastic.TorchState``.
        flush_on_commit: whether the residuals of all ranks are applied before each commit, by one dense exchange: no
            committed gradient is then lost with a rank (see ``flush`` for the rest that stays under Adam).
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        flush_on_commit: bool = False,
        **kwargs: object,
    ) -> None:
        self._flushes = flush_on_commit
        super().__init__(model=model, optimizer=optimizer, **kwargs)

    def commit(self) -> None:
        """Commit as Horovod's does, after a flush if `flush_on_commit`."""
        if self._flushes:
            for handler in self._compressed:
                handler.flush()
        super().commit()

    def sync(self) -> None:
        """Synchronize as Horovod's does, after a comparison of fields.

        Raises:
            RankMismatch: on every rank, if a newcomer has another model, compression or version.
        """
        for handler in self._compressed:
            handler.meet()
        super().sync()

    @property
    def _compressed(self) -> list[ResidualHandler]:
        return [handler for handler in self._handlers.values() if isinstance(handler, ResidualHandler)]


@runtime_checkable
class _Compressed(Protocol):
    """Any optimizer of ours; their classes are made at run time, and have no common base."""

    _dgc: Session


def register() -> None:
    """Make ``hvd.elastic.TorchState`` use `ResidualHandler` for our optimizers."""
    others = [entry for entry in get_handler_registry() if entry[0] is not _Compressed]
    set_handler_registry([(_Compressed, ResidualHandler), *others])
