"""The strategy of ``Compression.auto``: the fastest exchange by measurement."""

from __future__ import annotations

import statistics
import time
import warnings

import torch

from dgc_horovod.planning.trial import COMPRESSED, DENSE
from dgc_horovod.session.auto import REPEATS, Choice
from dgc_horovod.state.residual_state import RESIDUAL, UNDECIDED, ResidualState
from dgc_horovod.torch import state as kept
from dgc_horovod.torch.gradients.clipping import Clip, clip_all
from dgc_horovod.torch.gradients.collectives import Parameter
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.session.records import GradientWatch, Result
from dgc_horovod.torch.session.session import Session
from dgc_horovod.torch.session.strategies import EveryStep
from dgc_horovod.torch.wrapping.steps import SYNCHRONIZED_TWICE


class AutoTuned(EveryStep):
    """Uses the framework's own exchange until a measurement shows that another is faster.

    With the framework's own exchange every bit of the training is that of the framework; u and v are zero. When
    compression begins, the optimizer's momentum becomes u of every rank. When it ends, a flush moves u back to the
    optimizer, and applies v.
    """

    choice: Choice
    stock = True

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._waited = 0.0  # seconds, in the present step
        self._owed: dict[Parameter, torch.Tensor] = {}

    def built(self) -> None:
        """See `Strategy`; ranks do not change under ``auto``."""
        carrier = self.session.carrier
        self.choice = Choice(self.session.exchange, carrier.stock, carrier.stock_on_gloo)

    # -- a step of the framework's own exchange

    def hand_over(self, p: Parameter) -> Result:
        """See `EveryStep`."""
        if not self.stock:
            return super().hand_over(p)
        self.session.see_scaler()
        if p.grad is not None and not (p.grad.is_sparse or p.grad.is_contiguous()):
            p.grad = p.grad.contiguous()  # as Horovod needs; gradients in channels_last are not contiguous
        self.add_owed(p, p.grad)
        return self.session.carrier.start_stock(p)

    def add_owed(self, p: Parameter, gradient: torch.Tensor | None) -> None:
        """Add the residual of a dense tensor, the rounding error of its coding, to its next gradient."""
        owed = self._owed.pop(p, None)
        if owed is not None and gradient is not None:
            gradient.add_(owed.to(gradient), alpha=self.session.exchange.loss_scale())
            self.session.exchange.fade(self.session.exchange.names[p], 0.0)

    def synchronize(self) -> None:
        """See `EveryStep`; DDP's own exchange is over with the backward pass."""
        if not self.stock:
            super().synchronize()
        elif not self.session.carrier.exchanges_in_backward:
            self.session.check_not_superseded()
            begin = time.perf_counter()
            self.session.take_updates()
            self.arrived(time.perf_counter() - begin)

    def arrived(self, waited: float) -> None:
        """Record that the framework's own exchange has filled every ``p.grad``.

        Args:
            waited: seconds spent only waiting for it, >= 0.
        """
        session, exchange = self.session, self.session.exchange
        self._waited += waited
        session.groups.check_nothing_unfrozen(exchange.names)
        if session.config.clip_norm is not None:
            clip_all(exchange.names, session.config.clip_norm * exchange.loss_scale())

    def step(self) -> bool:
        """See `EveryStep`; at intervals the ranks compare measurements and choose."""
        is_made = self._stock_step() if self.stock else super().step()
        waited, self._waited = self._waited, 0.0
        if self.choice.step_ended(time.perf_counter(), waited):
            self._compare()
        return is_made

    def _stock_step(self) -> bool:
        session, passes = self.session, self.session.passes
        session.update.begin(session.optimizer)
        with session.as_step():
            if session.carrier.exchanges_in_backward:
                self.choice.script_accumulates |= session.carrier.stock_accumulates()
            elif not passes.skips:
                if passes.synchronized:
                    warnings.warn(SYNCHRONIZED_TWICE, stacklevel=5)
                self.synchronize()
            passes.synchronized = False
            session.returned = session.own("step")()
        session.exchange.clipping.uncompressed_step_ends()
        self.choice.count()
        return True

    # -- comparison of measurements between ranks

    def _compare(self) -> None:
        choice, before, own = self.choice, self.choice.mode, self.choice.own()
        if self.stock:
            sparse = any(p.grad is not None and p.grad.is_sparse for p in self.session.exchange.names)
            own = choice.own(self._timed(1), self._timed(choice.probed), sparse)
        choice.compare(self._allreduced(torch.tensor(own, dtype=torch.float64), "times").tolist())
        if choice.mode != before:
            self.switch(choice.mode)

    def _allreduced(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        collectives = self.session.exchange.collectives
        return collectives.wait(collectives.allreduce(tensor, f"auto.{name}"))

    def _timed(self, numel: int) -> float:
        device, times = next(iter(self.session.exchange.names)).device, []
        for _ in range(1 + REPEATS):
            begin = time.perf_counter()
            self._allreduced(torch.zeros(numel, device=device), f"link.{numel}")
            times.append(time.perf_counter() - begin)
        return statistics.median(times[1:])  # the first time includes waiting for ranks, and Horovod's negotiation

    # -- switching between exchanges

    def leave(self) -> None:
        """Switch to the framework's own exchange, on every rank, if the choice was given up."""
        if self.choice.given_up and self.choice.mode != DENSE:
            self.switch(DENSE)
            self.choice.stay(DENSE)

    def switch(self, mode: str) -> None:
        """Switch to another exchange from the next step on; call it on every rank, between two steps."""
        session = self.session
        if mode != COMPRESSED and not self.stock:
            grads = {p: p.grad for p in session.exchange.names}  # a script may read them after the step
            restore = session.passes.set_aside()  # backward passes of the next step
            kept.flush(session)
            restore()
            for p, grad in grads.items():
                p.grad = grad
        begins = mode == COMPRESSED and self.stock
        self._enter(mode)
        if begins:
            session.update.end_dense_steps(session.optimizer, session.exchange)

    def _enter(self, mode: str) -> None:
        session, stock = self.session, mode != COMPRESSED
        self._owed = _left_of_whole(session.exchange) if stock else {}
        if not stock and self.stock:
            session.update.prepare(session.optimizer, session.exchange)  # the engine takes over the state
            session.watch = GradientWatch()
            session.may_apply = True
            session.exchange.clipping.goes_on()
        self.stock, session.exchange.counts.mode = stock, mode  # type: ignore[misc]

    def put(self, state: ResidualState) -> None:
        """See `StatePart`."""
        choice = self.choice
        state.mode = choice.mode if choice.ended or choice.mode == COMPRESSED else UNDECIDED

    def resume(self, state: ResidualState) -> None:
        """See `StatePart`."""
        self.choice.resume(state.mode)
        self._enter(self.choice.mode)

    def _begin_anew(self) -> None:
        """Flush, and start the choice again, on every rank."""
        self.switch(DENSE)
        self.choice.begin()

    def ranks_changed(self) -> None:
        """See `Strategy`."""
        if self.choice.ended:  # the choice was made for another number of ranks
            self._begin_anew()

    def check_between_steps(self) -> None:
        """See `Strategy`."""
        if self.session.passes.results or not self.stock:  # with the framework's own exchange u and v are zero
            super().check_between_steps()

    def conclude(self) -> None:
        """Start a trial again before a checkpoint, which cannot hold a part of one."""
        if not self.stock and not self.choice.ended:
            self._begin_anew()

    def sees_clip(self, clip: Clip, known: bool) -> None:
        """See `Strategy`."""
        if not self.choice.ended:
            self.choice.script_clips = True
        if self.stock and known:
            self.session.exchange.clipping.keep(clip)


def _left_of_whole(exchange: GradientExchange) -> dict[Parameter, torch.Tensor]:
    """Return the non-zero residuals of dense tensors with coded values: the rounding errors of their gradients.

    A worker of a node has those of its slice, for all workers of the node.
    """
    left: dict[Parameter, torch.Tensor] = {}
    for run in exchange.runs:
        if run.engine.bucket.uncompressed:
            whole = torch.from_numpy(run.engine.as_one_of_all(RESIDUAL))
            parts = [whole[segment.place] for segment in run.engine.whole.segments]
            left |= {p: v.view(p.shape) for p, v in zip(run.parameters, parts, strict=True) if v.any()}
    return left


STRATEGY = AutoTuned
