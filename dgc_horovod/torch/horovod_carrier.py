"""Horovod as the carrier of a session: its collectives, its names, its own exchange where nothing is compressed."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.optimizer import _DistributedOptimizer

from dgc_horovod.config_check import check_agreement
from dgc_horovod.torch.gradients.collectives import Collectives, Pending
from dgc_horovod.torch.gradients.dense_path import ReduceSettings
from dgc_horovod.torch.nodes import transports
from dgc_horovod.torch.session.carrier import Carrier, Stock
from dgc_horovod.torch.session.passes import Result
from dgc_horovod.torch.session.session import Session
from dgc_horovod.torch.transport import WITHOUT_CUDA, HorovodCollectives, needs_host
from dgc_horovod.torch.wrapping.horovod_arguments import agreed_arguments, boundaries

STOCK = "stock Horovod"
_log = logging.getLogger("dgc_horovod")
Parameter = torch.Tensor


class HorovodCarrier(Carrier):
    """The ranks of a process set.

    Args:
        optimizer: optimizer that Horovod's constructor has gone over; its arguments are read from there.
    """

    def __init__(self, optimizer: Any) -> None:
        settings = ReduceSettings(
            optimizer.op == hvd.Average, optimizer.gradient_predivide_factor, optimizer.sparse_as_dense
        )
        super().__init__(optimizer._parameter_names, settings, optimizer.backward_passes_per_step)
        self.process_set, self.op, self._groups = optimizer.process_set, optimizer.op, optimizer._groups
        optimizer._groups = None  # their only use here is as bucket boundaries
        self.stock = StockHorovod(optimizer)

    @property
    def group_name(self) -> str:
        return f"process set {self.process_set.process_set_id}"

    def boundaries(self, parameters: Mapping[str, Parameter]) -> dict[Parameter, int]:
        return boundaries(self._groups, parameters)

    def agreed_fields(self, session: Session) -> dict[str, str]:
        return agreed_arguments(session, int(self.op))

    def agree(self, session: Session) -> None:
        check_agreement(HorovodCollectives(self.process_set, "start"), self.agreed_fields(session))

    def transports(self, session: Session) -> Mapping[str, Collectives]:
        collectives = HorovodCollectives(self.process_set, session.tag)
        return transports(collectives, session.config, self.settings.averages, session.parameters)

    def started(self, session: Session) -> None:
        if session.speaks and any(needs_host(p) for p in session.parameters.values()):
            _log.warning("dgc_horovod: %s", WITHOUT_CUDA)

    def put(self, p: Parameter, update: torch.Tensor, taken: set[int]) -> None:
        """As stock Horovod: ``p.grad`` stays the tensor that it is, and gets the memory of the update."""
        assert p.grad is not None
        if p.grad.is_sparse:
            p.grad.zero_().add_(update if update.is_sparse else update.to_sparse())
        else:
            p.grad.set_(update)  # type: ignore[call-overload]


class StockHorovod(Stock):
    """Horovod's own allreduce of each gradient.

    Args:
        optimizer: optimizer that has Horovod's attributes, and this.
    """

    name = STOCK

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)

    @property
    def on_gloo(self) -> bool:
        return bool(hvd.gloo_enabled())

    def start(self, p: Parameter) -> Result:
        optimizer = self._optimizer()
        handle, context = _DistributedOptimizer._allreduce_grad_async(optimizer, p)
        return partial(_taken, self._optimizer, p, handle, context)


def _taken(reference: weakref.ref[Any], p: Parameter, handle: Any, context: Any) -> torch.Tensor:
    """Horovod's own would wait for ever for a rank that has stopped."""
    optimizer = reference()  # which owns the session, and that this
    assert optimizer is not None
    if callable(handle):
        result = handle()
    else:
        pending = Pending(handle, p, f"allreduce.{optimizer._parameter_names[p]}")
        result = optimizer._dgc.exchange.collectives.wait(pending)
    found: torch.Tensor = optimizer._compression.decompress(result, context)
    return found
