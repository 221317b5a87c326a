"""`AutomaticMethods` where DDP's allreduce carries the uncompressed exchange."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from dgc_horovod.torch.auto.methods import AutomaticMethods
from dgc_horovod.torch.ddp.hook import after_ddp
from dgc_horovod.torch.ddp.methods import DataParallelMethods
from dgc_horovod.torch.wrapping import owners

STOCK = "DDP"


class AutomaticDataParallelMethods(AutomaticMethods, DataParallelMethods):  # type: ignore[misc, override]
    """In the class of an optimizer that is registered with a DistributedDataParallel model; never instantiated."""

    _dgc_below, _dgc_stock_name = DataParallelMethods, STOCK

    def _dgc_is_on_gloo(self: Any) -> bool:
        return str(dist.get_backend(self._dgc_model().process_group)) == "gloo"

    def _dgc_set_half(self: Any, halves: bool) -> None:
        """The hook looks at `_dgc_halves`."""

    def _dgc_carry(self: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Where nothing is compressed: what DDP does without a hook of others, or with its own one of fp16."""
        if not self._dgc_stock:
            return DataParallelMethods._dgc_carry(self, bucket)
        if self._dgc_owed:
            for p, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                self._dgc_add_owed(p, gradient)
        if bucket.is_last():
            begin = time.perf_counter()
            after_ddp(lambda: self._dgc_arrived(time.perf_counter() - begin))
        hook = default_hooks.fp16_compress_hook if self._dgc_halves else default_hooks.allreduce_hook
        return hook(self._dgc_model().process_group, bucket)

    def _dgc_step_as_stock(self: Any) -> None:
        owners.check(self)
        if not self._dgc_overflowed:
            super(type(self), self).step()  # type: ignore[misc]
