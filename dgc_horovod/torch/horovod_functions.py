"""Horovod's functions that scripts call, for compressed optimizers: broadcasts, and ``join`` for uneven data.

In ``join`` a rank without more data takes part in the other ranks' steps, with zero gradients, until all have joined.
Horovod's own join answers allreduces only; an allgather, which carries packets, fails while any rank is in join. A rank
in our join continues to exchange. Its messages have a flag, so that every rank knows the number of ranks in join at no
cost. A step in which all messages have the flag belongs to no script, and is rolled back.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

from dgc_horovod import envvars, leaving
from dgc_horovod.errors import CollectiveTimeout, DGCError, UnsupportedUse
from dgc_horovod.names import put_around
from dgc_horovod.notices import JOINED
from dgc_horovod.session import base
from dgc_horovod.state.residual_state import MOMENTUM
from dgc_horovod.torch.gradients.scaling import known
from dgc_horovod.torch.horovod_carrier import HorovodCarrier, HorovodCollectives
from dgc_horovod.torch.optimizer_state import group_options
from dgc_horovod.torch.session import local
from dgc_horovod.torch.session.auto import AutoTuned
from dgc_horovod.torch.session.session import Session, all_alive, live, session_of

_log = logging.getLogger("dgc_horovod")
_PAUSE = 1e-3  # seconds between two polls, as long as Horovod's cycle
_stock_join = mpi_ops.join


@put_around(mpi_ops.mpi_lib, "horovod_torch_join")
def _guarded_call(stock: Callable[..., Any], *arguments: object) -> Any:
    """Raise an error with the remedy for a script's earlier reference to Horovod's join."""
    if live():
        # not a RuntimeError, which Horovod would turn into a HorovodInternalError
        raise DGCError(
            "this is Horovod's own join, imported before dgc_horovod.torch; packets cannot be exchanged while it "
            "waits. Call hvd.join() (import horovod.torch as hvd), or dgc_horovod.torch.join()"
        )
    return stock(*arguments)


# -- broadcasts


@put_around(hvd, "broadcast_parameters")
def _broadcast_parameters(stock: Callable[..., None], params: Any, *place: object, **named_place: object) -> None:
    stock(params, *place, **named_place)
    entries: Iterable[Any] = params.values() if isinstance(params, dict) else params
    base.weights_set(entry[1] if isinstance(entry, tuple) else entry for entry in entries)


@put_around(hvd, "broadcast_optimizer_state")
def _broadcast_optimizer_state(
    stock: Callable[..., None], optimizer: Any, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    session = session_of(optimizer)
    if session is None:
        stock(optimizer, root_rank, model)
        return
    if not (_is_stateless(session) and optimizer.process_set.process_set_id == 0):
        _unmoved(session, lambda: stock(optimizer, root_rank, model))  # on every rank alike
    _follow(session, optimizer.process_set, root_rank)


def _is_stateless(session: Session) -> bool:
    """Return whether the optimizer has no state (SGD without momentum): stock then broadcasts no options either."""
    groups = session.optimizer.param_groups
    return MOMENTUM in session.update.stock.slots and not any(group["momentum"] for group in groups)


def _unmoved(session: Session, broadcast: Callable[[], None]) -> None:
    """Call `broadcast`, and restore the weights: to fill an empty optimizer state, stock Horovod makes a step."""
    empty = not session.optimizer.state_dict()["state"]
    before = [p.detach().clone() for p in session.exchange.names] if empty else []
    broadcast()
    with torch.no_grad():
        for p, value in zip(session.exchange.names, before, strict=False):
            p.copy_(value)


def _follow(session: Session, process_set: hvd.ProcessSet, root_rank: int) -> None:
    """Discard u and v of every rank if the root has loaded a state since its last step.

    Before the first step every ``p.grad`` is then zero, as with stock Horovod.
    """
    optimizer, ranks = session.optimizer, process_set.ranks
    if ranks is None or root_rank in ranks:
        own = session.loaded, group_options(optimizer) if _is_stateless(session) else []
        loaded, options = hvd.broadcast_object(own, root_rank, name="dgc.loaded", process_set=process_set)
        for group, theirs in zip(optimizer.param_groups, options, strict=False):
            group.update(theirs)
        if loaded and not session.loaded:
            session.forget()
        if loaded:
            session.strategy.share_loaded(root_rank if ranks is None else list(ranks).index(root_rank))
    if session.exchange.steps == 0:
        for p in session.exchange.names:
            if p.grad is None and p.requires_grad:
                p.grad = torch.zeros_like(p)


# -- join


@functools.wraps(_stock_join)
def join(device: int = -1) -> int:
    """Take part in the other ranks' steps, without data, until every rank has joined. Replaces ``hvd.join``.

    This rank contributes a zero gradient to each step, as in stock Horovod. Its weights follow the steps. At the end
    weights and the optimizer's state and options of the rank that joined last are copied to ranks that differ, so the
    weights are equal on all ranks; stock leaves that to the script. While a rank is in join, ranks may exchange only
    steps of compressed optimizers.

    With local steps this rank takes part in the other ranks' exchanges: first with its changes since the last exchange,
    then with zero changes. Join ends with an exchange of its own; the inner optimizer's state stays on each rank.

    Args:
        device: argument of stock Horovod's join, which is called where nothing is compressed.

    Returns:
        The rank that joined last.

    Raises:
        UnsupportedUse: between backward() and step(), under Elastic, or for optimizers of some of the ranks.
        CollectiveTimeout: no rank made a step, or joined, for DGC_TIMEOUT seconds.

    Cost: each step in join compresses, exchanges, and copies u and v to the host. If all ranks join after the same step
        there is one; otherwise a few small collectives are added, and if weights differ at the end a broadcast of
        weights and optimizer state.
    """
    gc.collect()  # optimizers that nothing refers to, which may be gone already on other ranks
    automatic = [session.strategy for session in all_alive() if isinstance(session.strategy, AutoTuned)]
    for strategy in automatic:
        if not strategy.choice.ended:
            strategy.choice.give_up(JOINED)  # other ranks see it at their next comparison
    sessions = live()
    last = _join_compressed(sessions) if sessions else int(_stock_join(device))
    if automatic := [strategy for strategy in automatic if _of_all_ranks(strategy.session)]:
        _even_out(automatic)
    return last


hvd.join = mpi_ops.join = join


def _of_all_ranks(session: Session) -> bool:
    carrier = session.carrier
    return isinstance(carrier, HorovodCarrier) and carrier.process_set.process_set_id == 0


def _even_out(strategies: Sequence[AutoTuned]) -> None:
    """Set the number of steps on every rank to the largest."""
    own = [each.session.exchange.steps for each in strategies]
    collectives = HorovodCollectives(hvd.global_process_set, "join")
    every = [json.loads(data) for data in collectives.gather_bytes(json.dumps(own).encode(), "automatic")]
    for strategy, found in zip(strategies, zip(*every, strict=True), strict=True):
        strategy.session.exchange.steps = max(found)
        strategy.leave()


def _join_compressed(sessions: Sequence[Session]) -> int:
    for session in sessions:
        _check(session)
    participants = [(_RoundParticipant if each.config.exchanges_weights else _Participant)(each) for each in sessions]
    try:
        _take_part(participants)
    finally:
        for participant in participants:
            participant.leave()
    return _settle(participants)


def _check(session: Session) -> None:
    if session.carrier.elastic:
        raise UnsupportedUse(
            "join() does not work under Horovod Elastic: use hvd.elastic.ElasticSampler, which distributes the data"
        )
    if not _of_all_ranks(session):
        raise UnsupportedUse("join() waits for all ranks; an optimizer of some of them (process_set) cannot join")
    if not session.exchange.runs:
        raise UnsupportedUse(
            "join() needs compressed tensors, but all tensors of an optimizer are small: use "
            "compression=Compression.none (dgcrun: --compression none)"
        )
    if session.passes.launched or (session.passes.synchronized and session.may_apply):
        raise UnsupportedUse(
            "join() between backward() and step(), while gradients are exchanged; call it after step()"
        )


class _Participant:
    """One session of a rank in join.

    Args:
        session: session of every step, between two steps.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.steps = session, session.exchange.steps
        self._grads = {p: p.grad for p in session.exchange.names}  # of accumulated passes of an incomplete step
        self._restore_passes = session.passes.set_aside()
        session.exchange.in_join = True

    def begin(self) -> None:
        """Start a step without a gradient; if all ranks are in join, it belongs to no script."""
        session = self.session
        exchange, states = session.exchange, session.optimizer.state
        self._before, self._selected = session.kept.record(own=False), exchange.counts.selected
        self._entries = {p: dict(states[p]) for p in exchange.names if p in states}
        for p in exchange.names:
            p.grad = None
            session.passes.results[p] = session.strategy.hand_over(p)

    def end(self) -> bool:
        """End the step, whose collectives are done; return whether all ranks are in join."""
        session, exchange = self.session, self.session.exchange
        session.strategy.synchronize()
        if exchange.ranks_in_join == exchange.workers:  # restore the state from before `begin`, bit for bit
            session.kept.resume(self._before)
            for p, entries in self._entries.items():
                session.optimizer.state[p] = entries
            session.update.prepare(session.optimizer, exchange)  # the optimizer's state is restored too
            exchange.counts.steps -= 1
            exchange.counts.selected = self._selected
            return True
        if exchange.loss_scale() == 1.0:
            with session.passes.skipping():
                session.step()  # not the optimizer's ``step``, which a scheduler may wrap to count steps
        # else p.grad has a loss scale unknown on this rank: it gets the weights at the end
        session.passes.synchronized = False
        return False

    def leave(self) -> None:
        """End join: restore gradients and backward passes from before."""
        session = self.session
        session.exchange.in_join = False
        for p, grad in self._grads.items():
            p.grad = grad
        self._restore_passes()
        session.passes.synchronized = False


class _RoundParticipant(_Participant):
    """One session with local steps of a rank in join.

    The rank's changes since the last exchange go into the next exchange; then it sends zero changes. The exchange in
    which all ranks are in join ends their present rounds, as ``exchange()`` does, and is not rolled back.

    Attributes:
        steps: number of inner steps before join, as if every round had been complete.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._strategy = local.of(session)
        self.steps = self.steps * self._strategy.rounds.steps + session.exchange.counts.pending

    def begin(self) -> None:
        """Start an exchange."""
        self._strategy.rounds.send()

    def end(self) -> bool:
        """End the exchange, whose collectives are done; return whether it was the last one."""
        self._strategy.end_exchange()
        exchange = self.session.exchange
        return exchange.ranks_in_join == exchange.workers


def _take_part(participants: Sequence[_Participant]) -> None:
    """Take part in the other ranks' steps, of any optimizer, until all ranks are in join."""
    waiting, limit = list(participants), envvars.timeout_seconds()
    for participant in waiting:
        participant.begin()
    deadline = time.monotonic() + limit
    while waiting:
        for participant in [each for each in waiting if each.session.exchange.arrived]:
            if participant.end():
                waiting.remove(participant)
            else:
                participant.begin()
            deadline = time.monotonic() + limit
        if time.monotonic() > deadline:
            leaving.without_others(hvd)
            raise CollectiveTimeout(
                f"rank {hvd.rank()} of {hvd.size()} waited {limit:g} s in join() for another rank's next step, or for "
                "its join(). While a rank is in join(), ranks must not use other Horovod operations (a metric by "
                "hvd.allreduce, the gradients of a dense optimizer): use them after join(). "
                f"{envvars.TIMEOUT.name} sets the limit"
            )
        time.sleep(_PAUSE)


def _settle(participants: Sequence[_Participant]) -> int:
    """Copy the state of the rank that joined last to ranks that differ; return that rank."""
    collectives = HorovodCollectives(hvd.global_process_set, "join")
    own = sum(participant.steps for participant in participants)
    steps = [int(text) for text in collectives.gather_bytes(str(own).encode(), "steps")]
    last = max(range(len(steps)), key=lambda rank: (steps[rank], rank))
    if len(set(steps)) == 1:
        return last
    for session in (participant.session for participant in participants):
        if not session.config.exchanges_weights:  # else weights are equal, and the state is each rank's own
            found = json.dumps([session.replicas.fingerprint(session.optimizer), _scale_of(session)])
            if len(set(collectives.gather_bytes(found.encode(), "fingerprints"))) == 1:
                continue
            if collectives.rank == 0:
                _log.info("dgc_horovod: join: all ranks take weights, optimizer state and options of rank %d", last)
            session.replicas.take_over(session, last)
        _take_over_options(session, last)
    return last


def _take_over_options(session: Session, root: int) -> None:
    """Copy the options of rank `root`, such as learning rates, and its loss scale."""
    own = group_options(session.optimizer), _scale_of(session)
    groups, scale = hvd.broadcast_object(own, root, name="dgc.join.options")
    for group, options in zip(session.optimizer.param_groups, groups, strict=True):
        group.update(options)
    if scale:
        scaler = known(session.scaler)
        if scaler is None:
            raise UnsupportedUse(
                "join() on a rank that has not used its GradScaler yet; make at least one step on each rank before"
            )
        scaler.load_state_dict(scale)


def _scale_of(session: Session) -> dict[str, Any]:
    scaler = known(session.scaler)
    return scaler.state_dict() if scaler is not None else {}
