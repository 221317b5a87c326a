"""The methods that make an optimizer compress, put in place of Horovod's by ``optimizer._adopt``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.optimizer import _DistributedOptimizer

from dgc_horovod import envvars
from dgc_horovod.config import DGCConfig
from dgc_horovod.config_check import check_agreement
from dgc_horovod.torch.elastic import Membership, ResidualHandler
from dgc_horovod.torch.gradients.dense_path import ReduceSettings
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.gradients.node_exchange import exchange_of
from dgc_horovod.torch.gradients.scaling import scale_of
from dgc_horovod.torch.methods import ExchangeMethods
from dgc_horovod.torch.nodes import transports
from dgc_horovod.torch.transport import WITHOUT_CUDA, HorovodCollectives, needs_host
from dgc_horovod.torch.updates.base import PlainUpdate
from dgc_horovod.torch.wrapping.horovod_arguments import agreed_arguments, boundaries

_log = logging.getLogger("dgc_horovod")


class CompressedMethods(ExchangeMethods):
    """The methods that replace Horovod's in the class made by ``optimizer._adopt``. Never instantiated itself."""

    _dgc_handler = ResidualHandler  # what makes its handler in a ``TorchState``

    @property
    def _dgc_takes_part(self: Any) -> bool:  # type: ignore[override]
        return bool(self.process_set.included())

    def _attach(self: Any, config: DGCConfig, update: PlainUpdate, grad_scaler: Any) -> None:
        if self._dgc_takes_part and envvars.horovod_elastic():
            self._dgc_membership = Membership(self.process_set)
        ExchangeMethods._attach(self, config, update, grad_scaler)
        if self._dgc_takes_part and self._dgc.collectives.rank == 0:
            if any(needs_host(p) for p in self._dgc_parameters.values()):
                _log.warning("dgc_horovod: %s", WITHOUT_CUDA)

    def _dgc_agree(self: Any) -> None:
        self._dgc_boundaries = boundaries(self, self._dgc_parameters)
        self._groups = None  # their only use here is as bucket boundaries
        if self._dgc_membership is None:
            check_agreement(HorovodCollectives(self.process_set, "start"), self._dgc_agreed_fields())

    def _dgc_agreed_fields(self: Any) -> dict[str, str]:
        return agreed_arguments(self, self._dgc_parameters, self._dgc_boundaries, self._dgc_config)

    def _dgc_group_name(self: Any) -> str:
        return f"process set {self.process_set.process_set_id}"

    def _dgc_exchange(self: Any) -> GradientExchange:
        config, collectives = self._dgc_config, HorovodCollectives(self.process_set, self._dgc_tag)
        settings = ReduceSettings(self.op == hvd.Average, self.gradient_predivide_factor, self.sparse_as_dense)
        parameters, boundaries, scale = self._dgc_parameters, self._dgc_boundaries, scale_of(self._dgc_scaler)
        groups = transports(collectives, config, settings.averages, parameters)
        return exchange_of(parameters, boundaries, config, groups, settings, scale)

    def _dgc_ready(self: Any, p: torch.Tensor) -> None:
        self._make_hook(p)()

    def _allreduce_grad_async(self: Any, p: torch.Tensor) -> tuple[Callable[[], torch.Tensor], None]:
        """Called by Horovod's hook or synchronize when the gradient of `p` is to be exchanged."""
        return self._dgc_hand_over(p), None

    def _dgc_finish_exchange(self: Any) -> None:
        _DistributedOptimizer.synchronize(self)

    def _dgc_reset(self: Any) -> None:
        self._handles: dict[Any, Any] = {}
        self._synchronized, self._should_synchronize = False, True
        self.set_backward_passes_per_step(self.backward_passes_per_step)
