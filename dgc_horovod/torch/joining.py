"""``join``: a rank whose data have run out goes on in the others' steps, with gradients of zero, until all are there.

Horovod's own join answers allreduces only; an allgather, which packets travel by, fails while any rank is in it. A rank
in ours goes on exchanging. Its messages carry a flag, by which each step tells every rank how many are in join: nobody
else pays for it. The round in which all of them carry the flag is no step of anybody, and is taken back.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

from dgc_horovod import envvars, leaving
from dgc_horovod.errors import CollectiveTimeout, DGCError, UnsupportedUse
from dgc_horovod.notices import JOINED, OVERFLOW
from dgc_horovod.torch import state
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.local.joining import RoundParticipant
from dgc_horovod.torch.transport import HorovodCollectives
from dgc_horovod.torch.wrapping import owners

_log = logging.getLogger("dgc_horovod")
_PAUSE = 1e-3  # seconds between two looks, as long as Horovod's cycle
_stock_join, _stock_call = mpi_ops.join, mpi_ops.mpi_lib.horovod_torch_join


@functools.wraps(_stock_join)
def join(device: int = -1) -> int:
    """This rank has no more data: take part in the others' steps until every rank is here. In place of ``hvd.join``.

    What this rank contributes to a step is what stock Horovod's contributes, a gradient of zero. Its weights follow; if
    they, or the optimizer's state or options, are not those of the rank that came last in the end, they become so.
    The weights of every rank are then the same, which stock leaves to the script. Between a rank's join and the end of
    it, the ranks may exchange nothing but steps of compressed optimizers.

    With local steps it takes part in the others' exchanges: with what it has changed since the last one, then with
    changes of zero. The end of join is an exchange of its own, and the inner optimizer stays each rank's own.

    Args:
        device: argument of stock Horovod's join, which is called where nothing is compressed.

    Returns:
        The rank that joined last.

    Raises:
        UnsupportedUse: between backward() and step(), under Elastic, or for optimizers of a part of the ranks.
        CollectiveTimeout: no rank made a step, or joined, for DGC_TIMEOUT seconds.

    Cost: each step taken in join compresses, exchanges, and copies u and v to the host. Where all ranks join after the
        same step that is one; otherwise a few small collectives more, and if weights differ in the end a broadcast of
        weights and optimizer state.
    """
    for optimizer in owners.undecided():
        optimizer._dgc_choice.give_up(JOINED)  # the others see it at their next comparison
    last = _join(device)
    _even_out([optimizer for optimizer in owners.automatic() if optimizer.process_set.process_set_id == 0])
    return last


def _even_out(optimizers: Sequence[Any]) -> None:
    """Let what a rank has counted, or seen, in steps that others have not made, be the same on every rank."""
    if not optimizers:
        return
    own = [[each._dgc.buckets.steps, each._dgc_choice.trial.mode] for each in optimizers]
    collectives = HorovodCollectives(hvd.global_process_set, "join")
    every = [json.loads(data) for data in collectives.gather_bytes(json.dumps(own).encode(), "automatic")]
    for optimizer, found in zip(optimizers, zip(*every, strict=True), strict=True):
        optimizer._dgc.buckets.steps = max(steps for steps, _ in found)
        if len({mode for _, mode in found}) > 1:  # of fp16, whose overflow one in join has not seen
            optimizer._dgc_choice.give_up(OVERFLOW)
        optimizer._dgc_leave()


def _join(device: int) -> int:
    optimizers = owners.live()
    if not optimizers:
        return int(_stock_join(device))
    for optimizer in optimizers:
        _check(optimizer)
    participants = [_participant_of(optimizer) for optimizer in optimizers]
    try:
        _take_part(participants)
    finally:
        for participant in participants:
            participant.leave()
    return _settle(participants)


def install() -> None:
    """Put `join` in place of Horovod's; a reference to that one which a script has taken before says what to do."""
    hvd.join = mpi_ops.join = join
    mpi_ops.mpi_lib.horovod_torch_join = _guarded_call


def _guarded_call(*arguments: Any) -> Any:
    if owners.live():
        # no RuntimeError: Horovod would make a HorovodInternalError of it
        raise DGCError(
            "this is Horovod's own join, imported before dgc_horovod.torch was; while it waits no packet can be "
            "exchanged. Call hvd.join() (import horovod.torch as hvd), or dgc_horovod.torch.join()"
        )
    return _stock_call(*arguments)


def _check(optimizer: Any) -> None:
    if optimizer._dgc_membership is not None:
        raise UnsupportedUse("join() under Horovod Elastic: use hvd.elastic.ElasticSampler, which shares the data out")
    if optimizer.process_set.process_set_id != 0:
        raise UnsupportedUse("join() waits for all ranks; an optimizer of a part of them (process_set) cannot join")
    if not optimizer._dgc.runs:
        raise UnsupportedUse(
            "join() with an optimizer of which nothing is compressed, as all its tensors are small: use "
            "compression=Compression.none (dgcrun: --compression none)"
        )
    launched = any(handle is not None for handle, _ in optimizer._handles.values())
    if launched or (optimizer._synchronized and optimizer._dgc_may_apply):
        raise UnsupportedUse(
            "join() between backward() and step(), while gradients are exchanged; call it after step()"
        )


class _Participant:
    """One optimizer of a rank in join.

    Args:
        optimizer: optimizer of ``DistributedOptimizer``, between two steps.
    """

    has_own_state = False  # whether the optimizer's state is each rank's own, and weights are the same in any case

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.steps = optimizer, self._exchange(optimizer).buckets.steps
        self._held = {p: p.grad for p in self.exchange.names}  # of backward passes that make no whole step
        self._handles, self._delays = dict(optimizer._handles), dict(optimizer._allreduce_delay)
        optimizer._handles.clear()
        self._mark(True)

    @staticmethod
    def _exchange(optimizer: Any) -> GradientExchange:
        found: GradientExchange = optimizer._dgc
        return found

    @property
    def exchange(self) -> GradientExchange:
        """The exchange of the optimizer."""
        return self._exchange(self.optimizer)

    def _mark(self, in_join: bool) -> None:
        for engine in self.exchange.buckets.engines:
            engine.in_join = in_join

    def begin(self) -> None:
        """Start a step without a gradient, which may turn out to be nobody's."""
        optimizer = self.optimizer
        self._before, self._selected = state.copied(optimizer), self.exchange.buckets.counts.selected
        self._entries = {p: dict(optimizer.state[p]) for p in self.exchange.names if p in optimizer.state}
        for p in self.exchange.names:
            p.grad = None
            optimizer._handles[p] = optimizer._allreduce_grad_async(p)

    def end(self) -> bool:
        """Finish the step, all of which has arrived; returns whether it was nobody's."""
        optimizer, buckets = self.optimizer, self.exchange.buckets
        optimizer.synchronize()
        if buckets.ranks_in_join == buckets.workers:
            self._take_back()
            return True
        if self.exchange.loss_scale() == 1.0:
            with optimizer.skip_synchronize():
                type(optimizer).step(optimizer)  # not what a scheduler has put over it, to count the steps
        # else p.grad has a scale that this rank's GradScaler does not know: the weights come in the end
        optimizer._synchronized = False
        return False

    def _take_back(self) -> None:
        """Be as before `begin`, bit for bit."""
        optimizer, exchange = self.optimizer, self.exchange
        state.put_back(optimizer, self._before)
        for p, entries in self._entries.items():
            optimizer.state[p] = entries
        optimizer._dgc_update.prepare(optimizer)  # what the step has taken over is there again
        exchange.buckets.counts.steps -= 1
        exchange.buckets.counts.selected = self._selected

    def leave(self) -> None:
        """Be as before join, but for what the steps have changed."""
        optimizer = self.optimizer
        self._mark(False)
        for p, grad in self._held.items():
            p.grad = grad
        optimizer._handles.update(self._handles)
        optimizer._allreduce_delay.update(self._delays)
        optimizer._synchronized = False


def _participant_of(optimizer: Any) -> _Participant | RoundParticipant:
    local = optimizer._dgc_config.local_steps is not None
    return RoundParticipant(optimizer) if local else _Participant(optimizer)


def _take_part(participants: Sequence[_Participant | RoundParticipant]) -> None:
    """Step with the others, whichever optimizer they step, until all ranks are in join."""
    waiting, limit = list(participants), envvars.timeout_seconds()
    for participant in waiting:
        participant.begin()
    deadline = time.monotonic() + limit
    while waiting:
        for participant in [each for each in waiting if each.exchange.arrived]:
            if participant.end():
                waiting.remove(participant)
            else:
                participant.begin()
            deadline = time.monotonic() + limit
        if time.monotonic() > deadline:
            leaving.without_others(hvd)
            raise CollectiveTimeout(
                f"rank {hvd.rank()} of {hvd.size()} waited {limit:g} s in join() for another rank's next step, or for "
                "its join(). Meanwhile nobody may exchange anything else with Horovod (a metric by hvd.allreduce, the "
                f"gradients of a dense optimizer): do that after join(). {envvars.TIMEOUT.name} sets the limit"
            )
        time.sleep(_PAUSE)


def _settle(participants: Sequence[_Participant | RoundParticipant]) -> int:
    """All ranks are here: those that came earlier become as the last one; returns which that is."""
    collectives = HorovodCollectives(hvd.global_process_set, "join")
    own = sum(participant.steps for participant in participants)
    steps = [int(text) for text in collectives.gather_bytes(str(own).encode(), "steps")]
    last = max(range(len(steps)), key=lambda rank: (steps[rank], rank))
    if len(set(steps)) == 1:
        return last
    for participant in participants:
        optimizer = participant.optimizer
        if participant.has_own_state:
            _take_over_options(optimizer, last)
            continue
        found = json.dumps([optimizer._dgc_replicas.fingerprint(optimizer), _state_of(_scaler(optimizer))])
        if len(set(collectives.gather_bytes(found.encode(), "fingerprints"))) == 1:
            continue
        if collectives.rank == 0:
            _log.info("dgc_horovod: join: weights, state and options of the optimizer become those of rank %d", last)
        optimizer._dgc_replicas.take_over(optimizer, last)
        _take_over_options(optimizer, last)
    return last


def _take_over_options(optimizer: Any, root: int) -> None:
    """Learning rates and the like, and the loss scale, of rank `root`."""
    groups = [{key: x for key, x in group.items() if key != "params"} for group in optimizer.param_groups]
    groups, scale = hvd.broadcast_object((groups, _state_of(_scaler(optimizer))), root, name="dgc.join.options")
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        group.update(options)
    if scale:
        scaler = _scaler(optimizer)
        if scaler is None:
            raise UnsupportedUse("join() on a rank that has not used its GradScaler yet; make one step on each rank")
        scaler.load_state_dict(scale)


def _scaler(optimizer: Any) -> torch.amp.GradScaler | None:
    """The script's GradScaler, if it is known."""
    scaler = optimizer._dgc_scaler
    return getattr(scaler, "_scaler", scaler)


def _state_of(scaler: torch.amp.GradScaler | None) -> dict[str, Any]:
    return scaler.state_dict() if scaler is not None else {}
