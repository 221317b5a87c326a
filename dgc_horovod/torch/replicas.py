"""The comparison of weights between the ranks of a torch optimizer, in the shadow of the backward pass."""

from __future__ import annotations

import logging
from typing import Any

import torch

from dgc_horovod import replicas
from dgc_horovod.config import DGCConfig
from dgc_horovod.errors import ReplicaMismatch
from dgc_horovod.torch.collectives import Collectives, Pending

_log = logging.getLogger("dgc_horovod")


class Replicas:
    """The weights of one optimizer on this rank, as `ReplicaCheck` sees them.

    Args:
        parameters: by name.
        config: ``check_every`` and ``on_mismatch`` are used.
        collectives: of the optimizer.
    """

    def __init__(self, parameters: dict[str, torch.Tensor], config: DGCConfig, collectives: Collectives) -> None:
        self._parameters, self._collectives, self._stops = parameters, collectives, config.on_mismatch == "stop"
        self._check = replicas.ReplicaCheck({name: p.nbytes for name, p in parameters.items()}, config)
        self._under_way: tuple[Pending, int, list[str]] | None = None

    def begin(self, step: int) -> None:
        """After `step` steps: send this rank's checksum, if one is due."""
        names = self._check.due(step) if self._collectives.workers > 1 else []
        if names:
            found = replicas.checksum(map(self._bytes_of, names))
            sent = torch.from_numpy(replicas.record(step, found))
            self._under_way = self._collectives.allgather(sent, "replicas"), step, names

    def end(self, optimizer: Any) -> None:
        """Before the next step is applied: compare with the other ranks'.

        Raises:
            ReplicaMismatch: on every rank, if weights differ and ``on_mismatch`` is "stop".
        """
        if self._under_way is None:
            return
        pending, step, names = self._under_way
        self._under_way = None
        if replicas.same(self._collectives.wait(pending).numpy()):
            return
        found = replicas.find(self._collectives, step, names, lambda name: replicas.checksum([self._bytes_of(name)]))
        if self._stops:
            raise ReplicaMismatch(
                f"{found}. Broadcast parameters and optimizer state from rank 0 before the first step, and change "
                'weights on all ranks alike; on_mismatch="broadcast" goes on with the weights of the first rank'
            )
        if self._collectives.rank == 0:
            _log.warning("dgc_horovod: %s; all go on with those of the first rank", found)
        self._take_over_from_first(optimizer)

    def _take_over_from_first(self, optimizer: Any) -> None:
        for name, p in self._parameters.items():
            tensors = {"weight": p.detach(), **optimizer.state[p]}
            for key in sorted(tensors):
                if isinstance(tensors[key], torch.Tensor):
                    flat = tensors[key].contiguous().view(-1)
                    pending = self._collectives.broadcast(flat.view(torch.uint8).clone(), f"replicas.{name}.{key}")
                    first = self._collectives.wait(pending).view(flat.dtype)
                    tensors[key].copy_(first.view(tensors[key].shape))

    def _bytes_of(self, name: str) -> Any:
        return self._parameters[name].detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
