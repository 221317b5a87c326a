"""The comparison of weights between the ranks of a torch optimizer, overlapped with the backward pass."""

from __future__ import annotations

import json
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dgc_horovod.config import DGCConfig
from dgc_horovod.config_check import shared_from
from dgc_horovod.session import replicas
from dgc_horovod.torch.gradients.collectives import Collectives, Pending
from dgc_horovod.torch.optimizer_state import group_options

if TYPE_CHECKING:
    from dgc_horovod.torch.session.session import Session


class Replicas:
    """The weights of one optimizer on this rank, for `ReplicaCheck`.

    Args:
        parameters: parameters of the optimizer, by name.
        config: compression settings.
        collectives: transport of this optimizer's group.
    """

    def __init__(self, parameters: dict[str, torch.Tensor], config: DGCConfig, collectives: Collectives) -> None:
        self._parameters, self._weights, self._collectives = parameters, list(parameters.values()), collectives
        sizes = [p.nbytes for p in self._weights]
        self._check = replicas.ReplicaCheck(list(parameters), sizes, config, collectives)
        self._under_way: tuple[Pending, int, int] | None = None

    def begin(self, step: int) -> None:
        """Send this rank's checksums after `step` steps, if they are due."""
        part = self._check.due(step)
        if part >= 0:
            with suppress(*self._collectives.failures):  # another rank may have ended after its last step
                self._under_way = self._sent(step, part), step, part

    def _sent(self, step: int, part: int) -> Pending:
        record = replicas.record(step, (_flat_bytes(self._weights[i]) for i in self._check.parts[part]))
        return self._collectives.allgather(torch.from_numpy(record), "replicas")

    def end(self, session: Session) -> None:
        """Compare the checksums with the other ranks', before the next step is applied.

        Raises:
            ReplicaMismatch: on every rank, if weights differ and ``on_mismatch`` is "stop".
        """
        if self._under_way is None:
            return
        pending, step, part = self._under_way
        self._under_way = None
        received = self._collectives.wait(pending).numpy()
        if not self._check.alike(received):  # the script may have repaired the weights in the meantime
            received = self._collectives.wait(self._sent(step, part)).numpy()
        if not self._check.judge(part, received):
            self.take_over(session)

    def take_over(self, session: Session, root: int = 0) -> None:
        """Copy weights and optimizer state of rank `root` to all ranks; `root` says which entries there are."""
        optimizer, second = session.optimizer, session.exchange.second
        own = {
            name: {key: _described(x) for key, x in optimizer.state[p].items()} for name, p in self._parameters.items()
        }
        there_is = json.loads(shared_from(self._collectives, json.dumps(own).encode(), "replicas.state", root))
        for name, p in self._parameters.items():
            state = optimizer.state[p]
            self._broadcast(p.detach(), f"{name}.weight", root)
            for key, (dtype, shape, value) in sorted(there_is[name].items()):
                if not dtype:
                    state[key] = value
                    continue
                there = state.get(key)
                if not isinstance(there, torch.Tensor) or _described(there) != [dtype, shape, None]:
                    device = p.device if shape else None
                    state[key] = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
                self._broadcast(state[key], f"{name}.{key}", root)
            for key in set(state) - set(there_is[name]):
                del state[key]
        for i, x in enumerate(session.strategy.outer()):
            self._broadcast(x, f"{i}.outer", root)
        values = torch.from_numpy(second.packed())
        self._broadcast(values, "second moments", root)
        second.unpack(values.numpy())

    def fingerprint(self, optimizer: torch.optim.Optimizer) -> int:
        """Return a checksum of all weights and of the optimizer's state and options."""
        found = replicas.checksum(map(_flat_bytes, self._parameters.values()))
        for name, p in self._parameters.items():
            for key, x in sorted(optimizer.state.get(p, {}).items()):
                found = zlib.crc32(repr((name, key, _described(x))).encode(), found)
                if isinstance(x, torch.Tensor):
                    found = zlib.crc32(_flat_bytes(x).data, found)
        return zlib.crc32(repr(group_options(optimizer)).encode(), found)

    def _broadcast(self, x: torch.Tensor, name: str, root: int) -> None:
        flat = x.contiguous().view(-1)
        pending = self._collectives.broadcast(flat.view(torch.uint8).clone(), f"replicas.{name}", root)
        x.copy_(self._collectives.wait(pending).view(flat.dtype).view(x.shape))


def _flat_bytes(x: torch.Tensor) -> np.ndarray:
    return x.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()


def _described(x: object) -> list[Any]:
    """Describe an entry of an optimizer's state: dtype and shape of a tensor, or "", None and the value."""
    if isinstance(x, torch.Tensor):
        return [str(x.dtype).removeprefix("torch."), list(x.shape), None]
    return ["", None, x]
