"""The methods of an optimizer that takes the fastest exchange by its own clock, over those of `CompressedMethods`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from horovod.torch.compression import Compression as HorovodCompression
from horovod.torch.optimizer import _DistributedOptimizer

from dgc_horovod import envvars
from dgc_horovod.config import DGCConfig
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.notices import OVERFLOW
from dgc_horovod.planning.density import fitted
from dgc_horovod.planning.trial import COMPRESSED, DENSE, HALF
from dgc_horovod.state.residual_state import RESIDUAL, UNDECIDED
from dgc_horovod.torch import state
from dgc_horovod.torch.auto.choice import Choice
from dgc_horovod.torch.gradients.collectives import Pending
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.gradients.grad_guard import GradientWatch
from dgc_horovod.torch.optimizer_mixin import CompressedMethods
from dgc_horovod.torch.transport import WITHOUT_CUDA, needs_host
from dgc_horovod.torch.updates.base import PlainUpdate
from dgc_horovod.torch.wrapping import owners


def check_automatic(named: list[tuple[str, torch.Tensor]]) -> None:
    """Raise UnsupportedUse where nothing can be chosen."""
    if envvars.horovod_elastic():
        raise UnsupportedUse("under Horovod Elastic the number of ranks changes, and auto measures one")
    if any(needs_host(p) for _, p in named):
        raise UnsupportedUse(f"{WITHOUT_CUDA}. Compression auto begins with Horovod's own exchange")


class AutomaticMethods:
    """In the class made by ``optimizer._adopt``; never instantiated itself.

    Where `_dgc_stock`, methods are stock Horovod's, and so is every bit of the training. u, v and all else of
    `CompressedMethods` are there, and empty. By linearity momentum is the sum of the optimizer's buffer and of u, so
    that nothing is done to it when compression begins; when it ends, a flush puts u there, and applies v.
    """

    _dgc_choice: Choice
    _dgc_stock: bool

    def _attach(self: Any, config: DGCConfig, update: PlainUpdate, grad_scaler: Any) -> None:
        self._dgc_stock, self._dgc_waited, self._dgc_overflowed = True, 0.0, False
        self._dgc_owed: dict[torch.Tensor, torch.Tensor] = {}
        CompressedMethods._attach(self, fitted(config), update, grad_scaler)  # type: ignore[arg-type]
        if self.process_set.included():
            self._dgc_choice = Choice(self._dgc, self, update.kind)

    def _allreduce_grad_async(self: Any, p: torch.Tensor) -> tuple[Callable[[], torch.Tensor], Any]:
        """Called by Horovod's hook or synchronize when the gradient of `p` is to be exchanged."""
        if not self._dgc_stock:
            return CompressedMethods._allreduce_grad_async(self, p)
        self._dgc_add_owed(p)
        handle, context = _DistributedOptimizer._allreduce_grad_async(self, p)
        return handle if callable(handle) else partial(self._dgc_wait, handle, p), context

    def _dgc_add_owed(self: Any, p: torch.Tensor) -> None:
        """Give the gradient what coding has left of those that were sent whole, which a flush need not apply."""
        owed = self._dgc_owed.pop(p, None)
        if owed is not None and p.grad is not None:
            p.grad.add_(owed.to(p.grad), alpha=self._dgc.loss_scale())
            self._dgc.fade(p, 0.0)

    def _dgc_wait(self: Any, handle: int, p: torch.Tensor) -> torch.Tensor:
        """Horovod's own would wait for ever for a rank that has stopped."""
        pending = Pending(handle, p, f"allreduce.{self._parameter_names[p]}")
        result: torch.Tensor = self._dgc.collectives.wait(pending)
        return result

    def synchronize(self: Any) -> None:
        """Wait for every exchange of this step; afterwards ``p.grad`` is the same on every rank."""
        if not self._dgc_stock or not self.process_set.included():
            CompressedMethods.synchronize(self)
            return
        owners.check(self)
        begin = time.perf_counter()
        _DistributedOptimizer.synchronize(self)
        self._dgc_waited += time.perf_counter() - begin
        self._check_nothing_unfrozen()
        if self._dgc_halves and self._dgc.loss_scale() == 1.0:  # else a GradScaler looks, and skips the step
            self._dgc_overflowed = not all(bool(p.grad.isfinite().all()) for p in self._dgc.names if p.grad is not None)
        if self._dgc_config.clip_norm is not None:
            limit = self._dgc_config.clip_norm * self._dgc.loss_scale()
            torch.nn.utils.clip_grad_norm_(list(self._dgc.names), limit)

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize unless that is done or skipped, then apply the optimizer; now and then, compare and choose."""
        if not self.process_set.included() or not self._dgc_stock:
            loss = CompressedMethods.step(self, closure)
        else:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._dgc_stock_step()
            self._dgc_loaded = False
            self._dgc_choice.watch(self)
        if self.process_set.included() and self._dgc_choice.step_ended(self._dgc_waited):
            self._dgc_take(self._dgc_choice.trial.mode)
        self._dgc_waited = 0.0
        return loss

    @property
    def _dgc_halves(self: Any) -> bool:
        """Whether gradients travel as stock Horovod's fp16."""
        return bool(self._dgc_stock and self._compression is HorovodCompression.fp16)

    def _dgc_stock_step(self: Any) -> None:
        """Stock Horovod's, but for what half precision has made infinite: that is skipped, and fp16 is over."""
        halves = self._dgc_halves
        if halves and self._should_synchronize and not self._synchronized:
            self.synchronize()
            with self.skip_synchronize():
                return self._dgc_stock_step()
        overflowed, self._dgc_overflowed = self._dgc_overflowed, False
        if not overflowed:
            _DistributedOptimizer.step(self)
        self._dgc_choice.count(halves, skipped=overflowed)
        if overflowed:  # the same on every rank, which all have the same average
            self._synchronized = False
            self._dgc_choice.give_up(OVERFLOW)
            self._dgc_leave()

    def _dgc_leave(self: Any) -> None:
        """Go on with stock Horovod's exchange, as every rank does, where the choice was given up."""
        choice = self._dgc_choice
        if choice.given_up and choice.trial.mode != DENSE:
            self._dgc_take(DENSE)
            choice.trial.stay(DENSE)

    def _dgc_take(self: Any, mode: str) -> None:
        """Exchange the gradients of the steps to come in another way; between two steps, on every rank."""
        if mode != COMPRESSED and not self._dgc_stock:
            held = {p: p.grad for p in self._dgc.names}  # a script may look at them after the step
            handles, delays = dict(self._handles), dict(self._allreduce_delay)  # of backward passes of a step to come
            self._handles.clear()
            state.flush(self)
            self._handles.update(handles)
            self._allreduce_delay.update(delays)
            for p, grad in held.items():
                p.grad = grad
        self._dgc_enter(mode)

    def _dgc_enter(self: Any, mode: str) -> None:
        stock = mode != COMPRESSED
        self._dgc_owed = _left_of_whole(self._dgc) if stock else {}
        self._compression = HorovodCompression.fp16 if mode == HALF else HorovodCompression.none
        if not stock and self._dgc_stock:
            self._dgc_update.prepare(self)  # the engine takes over what stands in the optimizer's state
            self._dgc_watch = GradientWatch()
            self._dgc_may_apply = True
        self._dgc_stock, self._dgc.buckets.counts.mode = stock, mode

    @property
    def _dgc_is_undecided(self: Any) -> bool:  # type: ignore[override]
        return self.process_set.included() and not self._dgc_choice.trial.ended

    def _dgc_mode(self: Any) -> str:
        trial = self._dgc_choice.trial
        return trial.mode if trial.ended or trial.mode == COMPRESSED else UNDECIDED

    def _dgc_resume(self: Any, mode: str) -> None:
        """A resumed job goes on with what was chosen; what was saved without a choice was compressed."""
        if mode == UNDECIDED:
            self._dgc_choice.begin()
            self._dgc_enter(self._dgc_choice.trial.mode)
        else:
            self._dgc_choice.trial.stay(mode or COMPRESSED)
            self._dgc_enter(mode or COMPRESSED)

    def _dgc_begin_anew(self: Any) -> None:
        """Choose again, as every rank does; what is kept is applied."""
        self._dgc_take(DENSE)
        self._dgc_choice.begin()

    def _dgc_ranks_changed(self: Any) -> None:
        if self._dgc_choice.trial.ended:  # what was fastest for other ranks
            self._dgc_begin_anew()

    def _dgc_finish_round(self: Any) -> None:
        """A checkpoint holds no half of a trial: that begins anew."""
        if self.process_set.included() and not self._dgc_stock and not self._dgc_choice.trial.ended:
            self._dgc_begin_anew()


def _left_of_whole(exchange: GradientExchange) -> dict[torch.Tensor, torch.Tensor]:
    """What coding has left of the gradients of tensors that are sent whole, where it has left something.

    A worker of a node has it of its slice, for all workers of the node.
    """
    left, state = {}, exchange.residuals()
    parameters = {name: p for p, name in exchange.names.items()}
    for engine in exchange.buckets.engines:
        for segment in engine.bucket.segments if engine.bucket.uncompressed else ():
            v = state.tensors.get(segment.name, {}).get(RESIDUAL)
            if v is not None and v.any():
                p, first = parameters[segment.name], state.runs.get(segment.name, [0])[0]
                whole = torch.zeros(p.numel())
                whole[first : first + v.size] = torch.from_numpy(v) * exchange.buckets.topology.node_size
                left[p] = whole.view(p.shape)
    return left
