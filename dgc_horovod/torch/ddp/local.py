"""`LocalMethods` over torch.distributed, with DDP and without."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from dgc_horovod.config import DGCConfig
from dgc_horovod.torch.ddp.hook import as_it_is, install
from dgc_horovod.torch.ddp.methods import DataParallelMethods, ProcessGroupMethods
from dgc_horovod.torch.local.methods import LocalMethods
from dgc_horovod.torch.local.update import LocalUpdate

BROADCAST = (
    "DistributedDataParallel sends the model's buffers to all ranks before every forward pass, of local steps too; "
    "pass broadcast_buffers=False to it, so that they are each rank's own"
)
_log = logging.getLogger("dgc_horovod")


class _LocalMethods(LocalMethods):
    """What both below have in common."""

    def exchange(self: Any) -> None:
        """See `LocalMethods.exchange`."""
        self._dgc_check_density()
        LocalMethods.exchange(self)

    def _dgc_end_for_another(self: Any) -> None:
        self._dgc_check_density()
        LocalMethods._dgc_end_for_another(self)


class LocalProcessGroupMethods(_LocalMethods, ProcessGroupMethods):  # type: ignore[misc]
    """In the class of an optimizer of ``DistributedOptimizer``; never instantiated itself."""

    _dgc_below = ProcessGroupMethods


class LocalDataParallelMethods(_LocalMethods, DataParallelMethods):  # type: ignore[misc]
    """In the class of an optimizer that is registered with a DistributedDataParallel model; never instantiated."""

    _dgc_below = DataParallelMethods

    def _attach(self: Any, config: DGCConfig, update: LocalUpdate, grad_scaler: Any) -> None:  # type: ignore[override]
        LocalMethods._attach(self, config, update, grad_scaler)
        model = self._dgc_model()
        if model.broadcast_buffers and any(True for _ in model.buffers()) and self._dgc.collectives.rank == 0:
            _log.warning("dgc_horovod: %s", BROADCAST)

    def _register_hooks(self: Any) -> None:
        LocalMethods._register_hooks(self)
        install(self._dgc_model(), self)

    def _dgc_carry(self: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Nothing is sent: each rank's gradients are its own."""
        return as_it_is(bucket)
