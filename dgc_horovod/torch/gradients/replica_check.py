"""The comparison of weights between the ranks of a torch optimizer, in the shadow of the backward pass."""

from __future__ import annotations

import gc
import json
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dgc_horovod import replica_check
from dgc_horovod.config import DGCConfig
from dgc_horovod.config_check import shared_from
from dgc_horovod.stats import replica_checks
from dgc_horovod.torch.gradients.collectives import Collectives, Pending
from dgc_horovod.torch.gradients.scaling import scale_of

if TYPE_CHECKING:
    from dgc_horovod.torch.session.session import Session

_RENORMALIZES = (
    "An Embedding with max_norm has {name!r}: in the forward pass each rank scales down the rows that it looks up "
    "itself. Leave max_norm out, and scale the rows on every rank alike, after the step"
)


class Replicas:
    """The weights of one optimizer on this rank, as `ReplicaCheck` sees them.

    Args:
        parameters: parameters of the optimizer, by name.
        config: compression settings; ``check_every`` and ``on_mismatch`` are used.
        collectives: transport of this optimizer's group.
    """

    def __init__(self, parameters: dict[str, torch.Tensor], config: DGCConfig, collectives: Collectives) -> None:
        self._parameters, self._collectives, self._stops = parameters, collectives, config.on_mismatch == "stop"
        self._check = replica_check.ReplicaCheck({name: p.nbytes for name, p in parameters.items()}, config)
        self._under_way: tuple[Pending, int, list[str]] | None = None
        self._rounds = config.exchanges_weights
        self._before: dict[str, int] | None = None  # checksums before the first step, of what is compared after it
        self._alike_after: dict[str, int] = {}  # number of steps, by tensor

    def begin(self, step: int) -> None:
        """After `step` steps: send this rank's checksum, if one is due."""
        names = self._check.due(step) if self._collectives.workers > 1 else []
        if names:
            found = replica_check.checksum(map(self._bytes_of, names))
            sent = torch.from_numpy(replica_check.record(step, found))
            with suppress(*self._collectives.failures):  # another rank may have ended after its last step
                self._under_way = self._collectives.allgather(sent, "replicas"), step, names

    def end(self, session: Session) -> None:
        """Before the next step is applied: compare with the other ranks'.

        Raises:
            ReplicaMismatch: on every rank, if weights differ and ``on_mismatch`` is "stop".
        """
        if self._before is None:
            unused = self._rounds or self._collectives.workers == 1 or self._under_way is not None
            first = [] if unused else self._check.due(1)
            self._before = {name: self._checksum_of(name) for name in first}
        if self._under_way is None:
            return
        pending, step, names = self._under_way
        self._under_way = None
        same = replica_check.same(self._collectives.wait(pending).numpy())
        replica_checks.count(same)
        if same:
            self._alike_after |= dict.fromkeys(names, step)
            return
        found = replica_check.find(self._collectives, step, names, self._checksum_of)
        if found is None:  # the script has set it right in the meantime
            return
        told = replica_check.ask(self._collectives, self._circumstances(session, found.names))
        replica_check.stop_or_tell(found, self._stops, self._collectives.rank, told)
        self.take_over(session)

    def _circumstances(self, session: Session, names: list[str]) -> replica_check.Circumstances:
        options = {
            f"{key} of parameter group {i}": _plain(value)
            for i, group in enumerate(session.optimizer.param_groups)
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        options["loss scale"] = _plain(scale_of(session.scaler)())
        if self._rounds:  # the inner optimizer is each rank's own
            options.clear()
        alike_after = min(self._alike_after.get(name, 0) for name in names)
        writers = {name: _RENORMALIZES.format(name=name) for name in names if _is_renormalized(self._parameters[name])}
        return replica_check.Circumstances(options, writers, self._before or {}, alike_after)

    def take_over(self, session: Session, root: int = 0) -> None:
        """Weights and optimizer state of rank `root`, which says what there is: others may have something else."""
        optimizer, second = session.optimizer, session.exchange.buckets.second
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
        """A checksum of all weights and of the optimizer's state and options."""
        found = replica_check.checksum(map(self._bytes_of, self._parameters))
        for name, p in self._parameters.items():
            for key, x in sorted(optimizer.state.get(p, {}).items()):
                described = repr((name, key, _described(x))).encode()
                found = zlib.crc32(_flat_bytes(x) if isinstance(x, torch.Tensor) else b"", zlib.crc32(described, found))
        options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        return zlib.crc32(repr(options).encode(), found)

    def _broadcast(self, x: torch.Tensor, name: str, root: int) -> None:
        flat = x.contiguous().view(-1)
        pending = self._collectives.broadcast(flat.view(torch.uint8).clone(), f"replicas.{name}", root)
        x.copy_(self._collectives.wait(pending).view(flat.dtype).view(x.shape))

    def _checksum_of(self, name: str) -> int:
        return replica_check.checksum([self._bytes_of(name)])

    def _bytes_of(self, name: str) -> Any:
        return _flat_bytes(self._parameters[name])


def _flat_bytes(x: torch.Tensor) -> Any:
    return x.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()


def _described(x: Any) -> list[Any]:
    """Of an entry of an optimizer's state: dtype and shape of a tensor, or "", None and its value."""
    if isinstance(x, torch.Tensor):
        return [str(x.dtype).removeprefix("torch."), list(x.shape), None]
    return ["", None, x]


def _plain(value: Any) -> str:
    """A text that is the same for the same number, on whatever device it is."""
    return repr(value.tolist() if isinstance(value, torch.Tensor) else value)


def _is_renormalized(p: torch.Tensor) -> bool:
    """Whether `p` is of an embedding that scales rows down when they are looked up; of all objects that there are."""
    modules = [x for x in gc.get_objects() if issubclass(type(x), (nn.Embedding, nn.EmbeddingBag))]
    return any(module.max_norm is not None and module.weight is p for module in modules)
