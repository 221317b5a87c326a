"""The methods of an optimizer that takes the fastest exchange by its own clock, whoever carries gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dgc_horovod.config import DGCConfig
from dgc_horovod.notices import OVERFLOW
from dgc_horovod.planning.density import fitted
from dgc_horovod.planning.trial import COMPRESSED, DENSE, HALF
from dgc_horovod.state.residual_state import RESIDUAL, UNDECIDED
from dgc_horovod.torch import state
from dgc_horovod.torch.auto.choice import OptimizerChoice
from dgc_horovod.torch.clipping.norms import clip_all
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.gradients.grad_guard import GradientWatch
from dgc_horovod.torch.methods import ExchangeMethods
from dgc_horovod.torch.updates.base import PlainUpdate


class AutomaticMethods:
    """Methods that an adapter puts over its own. Never instantiated itself.

    Where `_dgc_stock`, the exchange is the framework's own, and so is every bit of the training. u, v and all else of
    `ExchangeMethods` are there, and empty. When compression begins, the optimizer's momentum becomes every rank's u;
    when it ends, a flush puts u there, and applies v.

    Those that raise NotImplementedError are the adapter's.
    """

    _dgc_below: type[ExchangeMethods]  # the adapter's methods that compress
    _dgc_stock_name: str  # in words
    _dgc_choice: OptimizerChoice
    _dgc_stock: bool

    def _attach(self: Any, config: DGCConfig, update: PlainUpdate, grad_scaler: Any) -> None:
        self._dgc_stock, self._dgc_halves = True, False
        self._dgc_waited, self._dgc_overflowed = 0.0, False  # in the present step
        self._dgc_owed: dict[torch.Tensor, torch.Tensor] = {}
        self._dgc_set_half(False)
        self._dgc_below._attach(self, fitted(config), update, grad_scaler)
        if self._dgc_takes_part:
            name, on_gloo = self._dgc_stock_name, self._dgc_is_on_gloo()
            self._dgc_choice = OptimizerChoice(self._dgc, name, on_gloo)

    def _dgc_is_on_gloo(self: Any) -> bool:
        """Whether the uncompressed exchange is Gloo's, on a CPU."""
        raise NotImplementedError

    def _dgc_step_as_stock(self: Any) -> None:
        """Step with what the uncompressed exchange has brought, unless `_dgc_overflowed` says that it is infinite."""
        raise NotImplementedError

    def _dgc_set_half(self: Any, halves: bool) -> None:
        """Let gradients travel as the framework's own half precision, or in full, where they are not compressed."""
        raise NotImplementedError

    def _dgc_flush(self: Any) -> None:
        """Flush, after a step."""
        state.flush(self)

    def _dgc_add_owed(self: Any, p: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Give a gradient what coding has left of those that were sent whole, which a flush need not apply."""
        owed = self._dgc_owed.pop(p, None)
        if owed is not None and gradient is not None:
            gradient.add_(owed.to(gradient), alpha=self._dgc.loss_scale())
            self._dgc.fade(p, 0.0)

    def _dgc_arrived(self: Any, waited: float) -> None:
        """The uncompressed exchange has filled every ``p.grad``.

        Args:
            waited: seconds in which nothing was left to do but wait for it, >= 0.
        """
        self._dgc_waited += waited
        self._check_nothing_unfrozen()
        if self._dgc_halves and self._dgc.loss_scale() == 1.0:  # else a GradScaler looks, and skips the step
            self._dgc_overflowed = not all(bool(p.grad.isfinite().all()) for p in self._dgc.names if p.grad is not None)
        if self._dgc_config.clip_norm is not None:
            clip_all(self._dgc.names, self._dgc_config.clip_norm * self._dgc.loss_scale())

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize unless that is done or skipped, then apply the optimizer; now and then, compare and choose."""
        if not self._dgc_takes_part or not self._dgc_stock:
            loss = self._dgc_below.step(self, closure)
        else:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._dgc_stock_step()
            self._dgc_loaded = False
        if self._dgc_takes_part and self._dgc_choice.compare_after(self._dgc_waited):
            self._dgc_switch(self._dgc_choice.trial.mode)
        self._dgc_waited = 0.0
        return loss

    def _dgc_stock_step(self: Any) -> None:
        """The framework's own, but for what half precision has made infinite: that is skipped, and fp16 is over."""
        self._dgc_update.begin(self)
        with self._dgc_stepping():
            self._dgc_step_as_stock()
        self._dgc.clipping.uncompressed_step_ends()
        overflowed, self._dgc_overflowed = self._dgc_overflowed, False
        self._dgc_choice.count(self._dgc_halves, skipped=overflowed)
        if overflowed:  # the same on every rank, which all have the same average
            self._synchronized = False
            self._dgc_choice.give_up(OVERFLOW)
            self._dgc_leave()

    def _dgc_leave(self: Any) -> None:
        """Go on with the uncompressed exchange, as every rank does, where the choice was given up."""
        choice = self._dgc_choice
        if choice.given_up and choice.trial.mode != DENSE:
            self._dgc_switch(DENSE)
            choice.trial.stay(DENSE)

    def _dgc_switch(self: Any, mode: str) -> None:
        """Exchange the gradients of the steps to come in another way; between two steps, on every rank."""
        if mode != COMPRESSED and not self._dgc_stock:
            held = {p: p.grad for p in self._dgc.names}  # a script may look at them after the step
            self._dgc_flush()
            for p, grad in held.items():
                p.grad = grad
        begins = mode == COMPRESSED and self._dgc_stock
        self._dgc_enter(mode)
        if begins:
            self._dgc_update.end_dense_steps(self, self._dgc)

    def _dgc_enter(self: Any, mode: str) -> None:
        stock = mode != COMPRESSED
        self._dgc_owed = _left_of_whole(self._dgc) if stock else {}
        self._dgc_halves = mode == HALF
        self._dgc_set_half(self._dgc_halves)
        if not stock and self._dgc_stock:
            self._dgc_update.prepare(self)  # the engine takes over what stands in the optimizer's state
            self._dgc_watch = GradientWatch()
            self._dgc_may_apply = True
            self._dgc.clipping.goes_on()
        self._dgc_stock, self._dgc.buckets.counts.mode = stock, mode

    @property
    def _dgc_is_undecided(self: Any) -> bool:
        return self._dgc_takes_part and not self._dgc_choice.trial.ended

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
        self._dgc_switch(DENSE)
        self._dgc_choice.begin()

    def _dgc_ranks_changed(self: Any) -> None:
        if self._dgc_choice.trial.ended:  # what was fastest for other ranks
            self._dgc_begin_anew()

    def _dgc_check_between_steps(self: Any) -> None:
        if self._handles or not self._dgc_stock:  # behind the uncompressed exchange u and v are empty
            self._dgc_below._dgc_check_between_steps(self)

    def _dgc_finish_round(self: Any) -> None:
        """A checkpoint holds no half of a trial: that begins anew."""
        if self._dgc_takes_part and not self._dgc_stock and not self._dgc_choice.trial.ended:
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
                whole = torch.zeros(p.numel(), dtype=torch.float32)
                whole[first : first + v.size] = torch.from_numpy(v) * exchange.buckets.topology.node_size
                left[p] = whole.view(p.shape)
    return left
