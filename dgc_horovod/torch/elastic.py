"""Horovod Elastic: residuals are committed and restored with the optimizer, and handed on when the ranks change.

``hvd.elastic.TorchState`` finds the handler of this file by itself. What a rank has kept is its own: it is never
broadcast. When N ranks become M, what the survivors have kept is scaled by M/N (where gradients are averaged), so that
what they owe the model stays the same; newcomers begin with nothing.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import horovod.torch as hvd
from horovod.torch.elastic import TorchState as HorovodTorchState
from horovod.torch.elastic.state import OptimizerStateHandler, get_handler_registry, set_handler_registry

from dgc_horovod.agreement import check_agreement
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.state import ResidualState
from dgc_horovod.torch.collectives import Collectives
from dgc_horovod.torch.state import kept_by, load_residuals

_log = logging.getLogger("dgc_horovod")


class Membership:
    """With which ranks an optimizer of an elastic job works at present, and whether they have agreed.

    Raises:
        UnsupportedUse: for a part of the ranks, since Horovod forgets process sets when the ranks change.
    """

    def __init__(self, process_set: hvd.ProcessSet) -> None:
        if process_set.process_set_id != 0:
            raise UnsupportedUse("under Horovod Elastic an optimizer works with all ranks; leave process_set out")
        self.agreed = False

    def check(self, optimizer: Any) -> None:
        """Before a gradient is exchanged: follow a change of the ranks; compare once what all are about to do.

        A newcomer makes its optimizer while the others wait for its state: not before the first step do all meet.

        Raises:
            RankMismatch: on every rank, if they differ.
        """
        collectives = optimizer._dgc.collectives
        if (hvd.size(), hvd.rank()) != (collectives.workers, collectives.rank):  # a host has left; no state was synced
            renew(optimizer)
        if not self.agreed:
            self.agreed = True
            fields = {**optimizer._dgc_agreed_fields(), "step": str(optimizer._dgc.buckets.steps)}
            check_agreement(Collectives(optimizer.process_set, "start"), fields)


def renew(optimizer: Any) -> None:
    """Work with the ranks that there are now; this rank keeps what it has."""
    state = kept_by(optimizer)
    optimizer._dgc_build()
    load_residuals(optimizer, state.carried_on(hvd.rank(), hvd.size()))
    optimizer._dgc_membership.agreed = False
    if state.workers != hvd.size() and hvd.rank() == 0:
        _log.info("dgc_horovod: %d ranks have become %d; each keeps its residuals", state.workers, hvd.size())


class ResidualHandler(OptimizerStateHandler):
    """The handler of a compressed optimizer in a ``TorchState``: what Horovod's does, and this rank's residuals.

    Args:
        optimizer: of ``DistributedOptimizer``.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._saved: ResidualState = kept_by(optimizer)

    def save(self) -> None:
        """Remember u and v with the optimizer's state: a commit."""
        super().save()
        self._saved = kept_by(self.value)

    def restore(self) -> None:
        """Go back to the last commit; a step under way is given up."""
        reason = str(sys.exc_info()[1]).split(". ")[0]
        _log.warning("dgc_horovod: going back to the last commit: %s", reason)  # Horovod says nothing
        super().restore()  # ends what is under way, and empties u and v
        buckets = self.value._dgc.buckets
        load_residuals(self.value, self._saved.carried_on(buckets.rank, buckets.workers))

    def sync(self) -> None:
        """Take over the optimizer's state and the step of rank 0; keep this rank's own residuals."""
        optimizer = self.value
        own = kept_by(optimizer)
        optimizer._dgc_update.prepare(optimizer)  # newcomers and survivors must broadcast the same entries
        super().sync()
        load_residuals(optimizer, own)  # and not what stands in their places
        renew(optimizer)
        buckets = optimizer._dgc.buckets
        buckets.steps, buckets.epoch = hvd.broadcast_object((buckets.steps, buckets.epoch), 0, name="dgc.elastic.step")


class TorchState(HorovodTorchState):
    """Horovod's, with a choice of what a commit does.

    Args:
        flush_on_commit: apply everything that ranks have kept before each commit, by one dense exchange: a rank that is
            lost then loses nothing that was committed.
        optimizer: the one that is flushed; by default that of the state.
        kwargs: as for ``hvd.elastic.TorchState``.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, flush_on_commit: bool = False, **kwargs: Any) -> None:
        self._flushes = flush_on_commit
        super().__init__(model=model, optimizer=optimizer, **kwargs)

    def commit(self) -> None:
        """As Horovod's."""
        if self._flushes:
            self.optimizer.flush()
        super().commit()


class _Compressed(type):
    """What `isinstance` asks."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return hasattr(instance, "_dgc_update")


class _CompressedOptimizer(metaclass=_Compressed):
    """Any optimizer of ours: their classes are made on the spot, and have no base in common."""


def register() -> None:
    """Let ``hvd.elastic.TorchState`` find `ResidualHandler`."""
    others = [entry for entry in get_handler_registry() if entry[0] is not _CompressedOptimizer]
    set_handler_registry([(_CompressedOptimizer, ResidualHandler), *others])
