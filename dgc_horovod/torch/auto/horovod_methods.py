"""`AutomaticMethods` where stock Horovod carries the uncompressed exchange."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.compression import Compression as HorovodCompression
from horovod.torch.optimizer import _DistributedOptimizer

from dgc_horovod import envvars
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.torch import state
from dgc_horovod.torch.auto.methods import AutomaticMethods
from dgc_horovod.torch.gradients.collectives import Pending
from dgc_horovod.torch.optimizer_mixin import CompressedMethods
from dgc_horovod.torch.transport import WITHOUT_CUDA, needs_host
from dgc_horovod.torch.wrapping import owners

STOCK = "stock Horovod"


def check_automatic(named: list[tuple[str, torch.Tensor]]) -> None:
    """Raise UnsupportedUse where nothing can be chosen."""
    if envvars.horovod_elastic():
        raise UnsupportedUse("under Horovod Elastic the number of ranks changes, and auto measures one")
    if any(needs_host(p) for _, p in named):
        raise UnsupportedUse(f"{WITHOUT_CUDA}. Compression auto begins with Horovod's own exchange")


class HorovodAutomaticMethods(AutomaticMethods):
    """In the class made by ``optimizer._adopt``, over `CompressedMethods`; never instantiated itself."""

    _dgc_below, _dgc_stock_name = CompressedMethods, STOCK

    def _dgc_is_on_gloo(self: Any) -> bool:
        return bool(hvd.gloo_enabled())

    def _dgc_set_half(self: Any, halves: bool) -> None:
        self._compression = HorovodCompression.fp16 if halves else HorovodCompression.none

    def _allreduce_grad_async(self: Any, p: torch.Tensor) -> tuple[Callable[[], torch.Tensor], Any]:
        """Called by Horovod's hook or synchronize when the gradient of `p` is to be exchanged."""
        if not self._dgc_stock:
            return CompressedMethods._allreduce_grad_async(self, p)
        if p.grad is not None and not (p.grad.is_sparse or p.grad.is_contiguous()):
            p.grad = p.grad.contiguous()  # Horovod takes no other: those of channels_last are not
        self._dgc_add_owed(p, p.grad)
        handle, context = _DistributedOptimizer._allreduce_grad_async(self, p)
        return handle if callable(handle) else partial(self._dgc_wait, handle, p), context

    def _dgc_wait(self: Any, handle: int, p: torch.Tensor) -> torch.Tensor:
        """Horovod's own would wait for ever for a rank that has stopped."""
        pending = Pending(handle, p, f"allreduce.{self._parameter_names[p]}")
        result: torch.Tensor = self._dgc.collectives.wait(pending)
        return result

    def synchronize(self: Any) -> None:
        """Wait for every exchange of this step; afterwards ``p.grad`` is the same on every rank."""
        if not self._dgc_stock or not self._dgc_takes_part:
            CompressedMethods.synchronize(self)
            return
        owners.check(self)
        begin = time.perf_counter()
        _DistributedOptimizer.synchronize(self)
        self._dgc_arrived(time.perf_counter() - begin)

    def _dgc_step_as_stock(self: Any) -> None:
        if self._dgc_halves and self._should_synchronize and not self._synchronized:
            self.synchronize()
            with self.skip_synchronize():
                return self._dgc_step_as_stock()
        if not self._dgc_overflowed:
            _DistributedOptimizer.step(self)

    def _dgc_flush(self: Any) -> None:
        handles, delays = dict(self._handles), dict(self._allreduce_delay)  # of backward passes of a step to come
        self._handles.clear()
        state.flush(self)
        self._handles.update(handles)
        self._allreduce_delay.update(delays)
