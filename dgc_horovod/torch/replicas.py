"""The comparison of weights between the ranks of a torch optimizer, in the shadow of the backward pass."""

from __future__ import annotations

import json
from typing import Any

import torch

from dgc_horovod import replicas
from dgc_horovod.agreement import shared_from_first
from dgc_horovod.config import DGCConfig
from dgc_horovod.torch.collectives import Collectives, Pending


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
        if found is None:  # the script has set it right in the meantime
            return
        replicas.stop_or_tell(found, self._stops, self._collectives.rank)
        self._take_over_from_first(optimizer)

    def _take_over_from_first(self, optimizer: Any) -> None:
        """Weights and optimizer state of the first rank, which says what there is: others may have something else."""
        own = {
            name: {key: _described(x) for key, x in optimizer.state[p].items()} for name, p in self._parameters.items()
        }
        first = json.loads(shared_from_first(self._collectives, json.dumps(own).encode(), "replicas.state"))
        for name, p in self._parameters.items():
            state = optimizer.state[p]
            self._broadcast(p.detach(), f"{name}.weight")
            for key, (dtype, shape, value) in sorted(first[name].items()):
                if not dtype:
                    state[key] = value
                    continue
                there = state.get(key)
                if not isinstance(there, torch.Tensor) or _described(there) != [dtype, shape, None]:
                    device = p.device if shape else None
                    state[key] = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
                self._broadcast(state[key], f"{name}.{key}")
            for key in set(state) - set(first[name]):
                del state[key]

    def _broadcast(self, x: torch.Tensor, name: str) -> None:
        flat = x.contiguous().view(-1)
        pending = self._collectives.broadcast(flat.view(torch.uint8).clone(), f"replicas.{name}")
        x.copy_(self._collectives.wait(pending).view(flat.dtype).view(x.shape))

    def _bytes_of(self, name: str) -> Any:
        return self._parameters[name].detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()


def _described(x: Any) -> list[Any]:
    """Of an entry of an optimizer's state: dtype and shape of a tensor, or "", None and its value."""
    if isinstance(x, torch.Tensor):
        return [str(x.dtype).removeprefix("torch."), list(x.shape), None]
    return ["", None, x]
