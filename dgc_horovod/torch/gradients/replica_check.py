"""The comparison of weights between the ranks of a torch optimizer, overlapped with the backward pass."""

from __future__ import annotations

import gc
import json
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from dgc_horovod.config import DGCConfig
from dgc_horovod.config_check import shared_from
from dgc_horovod.session import replicas
from dgc_horovod.torch.gradients.collectives import Collectives, Pending
from dgc_horovod.torch.optimizer_state import group_options

if TYPE_CHECKING:
    from dgc_horovod.torch.session.session import Session

_RENORMALIZES = (
    "{name!r} belongs to an Embedding with max_norm: in the forward pass each rank scales down only the rows that it "
    "looks up. Remove max_norm, and scale the rows after the step, the same on every rank"
)


class Replicas:
    """The weights of one optimizer on this rank, for `ReplicaCheck`.

    Args:
        parameters: parameters of the optimizer, by name.
        config: compression settings.
        collectives: transport of this optimizer's group.
    """

    def __init__(self, parameters: dict[str, torch.Tensor], config: DGCConfig, collectives: Collectives) -> None:
        self._parameters, self._names, self._collectives = parameters, list(parameters), collectives
        self._check = replicas.ReplicaCheck([p.nbytes for p in parameters.values()], config, collectives)
        self._under_way: tuple[Pending, int, int] | None = None
        self._before: dict[str, int] | None = None  # checksums, before the first step, of the weights compared after it

    def begin(self, step: int) -> None:
        """Send this rank's checksum after `step` steps, if one is due."""
        part = self._check.due(step)
        if part >= 0:
            found = replicas.checksum(_flat_bytes(self._parameters[name]) for name in self._names_in(part))
            sent = torch.from_numpy(replicas.record(step, found))
            with suppress(*self._collectives.failures):  # another rank may have ended after its last step
                self._under_way = self._collectives.allgather(sent, "replicas"), step, part

    def end(self, session: Session) -> None:
        """Compare the checksum with the other ranks', before the next step is applied.

        Raises:
            ReplicaMismatch: on every rank, if weights differ and ``on_mismatch`` is "stop".
        """
        if self._before is None:
            unused = self._check.own_options or self._under_way is not None
            self._before = {} if unused else self._checksums(self._names_in(self._check.due(1)))
        if self._under_way is None:
            return
        pending, step, part = self._under_way
        self._under_way = None
        if self._check.note(part, step, replicas.same(self._collectives.wait(pending).numpy())):
            return
        names = self._names_in(part)
        told = replicas.ask(self._collectives, self._circumstances(session, step, part))
        found = replicas.compared(step, names, [each.record for each in told])
        if found is not None:  # None: the script has repaired the weights in the meantime
            self._check.stop_or_tell(found, told)
            self.take_over(session)

    def _circumstances(self, session: Session, step: int, part: int) -> replicas.Circumstances:
        options = {
            f"{key} of parameter group {i}": _plain(value)
            for i, group in enumerate(group_options(session.optimizer))
            for key, value in group.items()
            if key != "param_names"
        }
        options["loss scale"] = _plain(session.exchange.loss_scale())
        names, scaled = self._names_in(part), _renormalized()
        writers = {name: _RENORMALIZES.format(name=name) for name in names if id(self._parameters[name]) in scaled}
        return replicas.Circumstances(
            {} if self._check.own_options else options,
            writers,
            self._before or {},
            self._check.alike_after.get(part, 0),
            [step, *self._checksums(names).values()],
        )

    def _names_in(self, part: int) -> list[str]:
        return [] if part < 0 else [self._names[i] for i in self._check.parts[part]]

    def _checksums(self, names: list[str]) -> dict[str, int]:
        return {name: replicas.checksum([_flat_bytes(self._parameters[name])]) for name in names}

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


def _plain(value: object) -> str:
    """Return a text that is the same for equal numbers on any device."""
    return repr(value.tolist() if isinstance(value, torch.Tensor) else value)


def _renormalized() -> set[int]:
    """Return the ids of the weights of all embeddings with ``max_norm`` in the process."""
    modules = [x for x in gc.get_objects() if issubclass(type(x), (nn.Embedding, nn.EmbeddingBag))]
    return {id(module.weight) for module in modules if module.max_norm is not None}
