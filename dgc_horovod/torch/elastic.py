"""Horovod Elastic: residuals are committed and restored with the optimizer, and handed on when the ranks change.

``hvd.elastic.TorchState`` finds the handler of an optimizer by itself (`register`). What a rank has kept is its
own: it is never broadcast. When N ranks become M, what the survivors have kept is scaled by M/N (where gradients are
averaged), so that the combined residual stays the same; newcomers begin with nothing.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import sys
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.elastic import TorchState as HorovodTorchState
from horovod.torch.elastic.state import OptimizerStateHandler, get_handler_registry, set_handler_registry

from dgc_horovod import __version__, envvars
from dgc_horovod.config_check import check_agreement
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.notices import NOT_ALL_RANKS, going_back
from dgc_horovod.state.residual_state import ResidualState
from dgc_horovod.torch.horovod_carrier import HorovodCarrier
from dgc_horovod.torch.session.session import Session, session_of
from dgc_horovod.torch.transport import HorovodCollectives

_log = logging.getLogger("dgc_horovod")


class ElasticCarrier(HorovodCarrier):
    """All ranks of an elastic job, which may be others at every step.

    Args:
        optimizer: see `HorovodCarrier`.

    Raises:
        UnsupportedUse: for a part of the ranks, since Horovod forgets process sets when the ranks change.
    """

    elastic = True

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        if self.process_set.process_set_id != 0:
            raise UnsupportedUse(NOT_ALL_RANKS)
        self._agreed = False

    def agree(self, session: Session) -> None:
        """Not yet: a newcomer makes its optimizer while the others wait for its state."""

    def agree_anew(self) -> None:
        self._agreed = False

    def check_ranks(self, session: Session) -> None:
        """Follow a change of the ranks; compare once what all are about to do: not before the first step do all meet.

        Raises:
            RankMismatch: on every rank, if they differ.
        """
        self.follow(session)
        if not self._agreed:
            self._agreed = True
            exchange = session.exchange
            fields = {
                **self.agreed_fields(session),
                "step": str(exchange.steps),
                "loss scale (keep the scaler's state_dict() in the TorchState)": str(exchange.loss_scale()),
            }
            check_agreement(HorovodCollectives(hvd.global_process_set, "start"), fields)

    def follow(self, session: Session) -> None:
        """Where a host has left, no state is synced."""
        collectives = session.exchange.collectives
        if (hvd.size(), hvd.rank()) != (collectives.workers, collectives.rank):
            renew(session, session.kept.record(own=False))


def renew(session: Session, state: ResidualState) -> None:
    """Work with the ranks that there are now; this rank goes on with its part of `state`, which it has had before."""
    session.build()
    session.kept.resume(state.carried_on(hvd.rank(), hvd.size()))
    session.carrier.agree_anew()
    if state.workers != hvd.size() and hvd.rank() == 0:
        _log.info("dgc_horovod: %d ranks have become %d; each keeps its residuals", state.workers, hvd.size())


class ResidualHandler(OptimizerStateHandler):
    """The handler of a compressed optimizer in a ``TorchState``: what Horovod's does, and this rank's residuals.

    Args:
        optimizer: optimizer of ``DistributedOptimizer``.
    """

    _saved_optimizer_state: Any  # Horovod's

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        found = session_of(optimizer)
        assert found is not None
        self.session = found
        self._saved, self._round = found.kept.record(own=False), found.strategy.remembered()
        self._flushed_at: tuple[int, int] | None = None  # `_place` after it

    def meet(self) -> None:
        """Compare with the others before anything is exchanged; a newcomer may have data to read before it comes."""
        collectives = HorovodCollectives(hvd.global_process_set, "meeting", envvars.checkpoint_seconds())
        check_agreement(collectives, {"version": __version__, **self.session.carrier.agreed_fields(self.session)})

    def flush(self) -> None:
        """Apply what ranks have kept, unless they have made no step since: some methods make one of their own."""
        if self._place() != self._flushed_at:
            self.value.flush()
            self._flushed_at = self._place()

    def _place(self) -> tuple[int, int]:
        """What another step changes."""
        exchange = self.session.exchange
        return exchange.steps, exchange.counts.pending

    def save(self) -> None:
        """Remember u, v and the round under way with the optimizer's state: a commit."""
        super().save()
        session = self.session
        session.carrier.follow(session)
        if session.is_exchanging:  # in an accumulation nothing has been handed to the exchange yet
            session.strategy.check_between_steps()
        self._saved, self._round = session.kept.record(own=False), session.strategy.remembered()

    def restore(self) -> None:
        """Go back to the last commit; a step under way is given up."""
        going_back(sys.exc_info()[1])
        self._flushed_at = None
        self.session.strategy.go_back(self._round)
        # the optimizer goes on in the tensors that it loads
        committed = copy.deepcopy(self._saved_optimizer_state)
        super().restore()  # ends what is under way, and empties u and v
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
        renew(session, dataclasses.replace(own, **shared))  # and not what stands in the places of u and v


class TorchState(HorovodTorchState):
    """Horovod's, with a choice of what a commit does.

    Args:
        model, optimizer, kwargs: see ``hvd.elastic.TorchState``.
        flush_on_commit: whether everything that ranks have kept is applied before each commit, by one dense exchange: a
            rank that is lost then loses nothing that was committed (see ``flush`` for what it leaves under Adam).
    """

    def __init__(self, model: Any = None, optimizer: Any = None, flush_on_commit: bool = False, **kwargs: Any) -> None:
        self._flushes = flush_on_commit
        super().__init__(model=model, optimizer=optimizer, **kwargs)

    def commit(self) -> None:
        """As Horovod's."""
        if self._flushes:
            for handler in self._compressed:
                handler.flush()
        super().commit()

    def sync(self) -> None:
        """As Horovod's.

        Raises:
            RankMismatch: on every rank, if a newcomer has another model, compression or version.
        """
        for handler in self._compressed:
            handler.meet()
        super().sync()

    @property
    def _compressed(self) -> list[ResidualHandler]:
        return [handler for handler in self._handlers.values() if isinstance(handler, ResidualHandler)]


class _Compressed(type):
    """What `isinstance` asks."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return session_of(instance) is not None


class _CompressedOptimizer(metaclass=_Compressed):
    """Any optimizer of ours: their classes are made on the spot, and have no base in common."""


def register() -> None:
    """Let ``hvd.elastic.TorchState`` make the handler of each of our optimizers."""
    others = [entry for entry in get_handler_registry() if entry[0] is not _CompressedOptimizer]
    set_handler_registry([(_CompressedOptimizer, ResidualHandler), *others])
