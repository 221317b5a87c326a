"""`AutomaticMethods` where DDP's allreduce carries the uncompressed exchange."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from dgc_horovod.torch.auto.methods import AutomaticMethods
from dgc_horovod.torch.ddp.hook import OwnExchange, after_ddp
from dgc_horovod.torch.ddp.methods import DataParallelMethods
from dgc_horovod.torch.wrapping import owners

STOCK = "DDP"


class AutomaticDataParallelMethods(AutomaticMethods, DataParallelMethods):  # type: ignore[misc, override]
    """In the class of an optimizer that is registered with a DistributedDataParallel model; never instantiated."""

    _dgc_below, _dgc_stock_name = DataParallelMethods, STOCK
    _dgc_passes = 0  # backward passes outside of no_sync() in the present step

    def _dgc_is_on_gloo(self: Any) -> bool:
        device = next(iter(self._dgc.names)).device  # a group may have a backend for each kind
        return bool(self._dgc_model().process_group._get_backend(device).name() == "gloo")

    def _dgc_set_half(self: Any, halves: bool) -> None:
        self._dgc_own_exchange = OwnExchange(self._dgc_model().process_group, halves)

    def _dgc_carry(self: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Where nothing is compressed DDP does its own exchange."""
        if not self._dgc_stock:
            return DataParallelMethods._dgc_carry(self, bucket)
        if self._dgc_owed:
            for p, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                self._dgc_add_owed(p, gradient)
        if bucket.is_last():
            self._dgc_passes = 1 if self._dgc_offered else self._dgc_passes + 1  # a GradScaler may have skipped a step
            self._dgc_offered = False
            begin = time.perf_counter()
            after_ddp(lambda: self._dgc_arrived(time.perf_counter() - begin))
        return self._dgc_own_exchange._dgc_carry(bucket)  # type: ignore[no-any-return]

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        """See `ExchangeMethods.zero_grad`."""
        self._dgc_passes = 0
        DataParallelMethods.zero_grad(self, *args, **kwargs)

    def synchronize(self: Any) -> None:
        """``backward`` has done it."""
        if not self._dgc_stock:
            DataParallelMethods.synchronize(self)

    def _dgc_step_as_stock(self: Any) -> None:
        owners.check(self)
        self._dgc_choice.script_accumulates |= self._dgc_passes != 1  # which DDP alone can do
        self._dgc_passes = 0
        if not self._dgc_overflowed:
            super(type(self), self).step()  # type: ignore[misc]
