"""What stays with each rank under local steps: the inner optimizer and its state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from dgc_horovod.state.residual_state import FIRST, MOMENTUM, RESIDUAL, SECOND, ResidualState
from dgc_horovod.torch.updates.base import Compressed, Left, Parameter, PlainUpdate

# entries of an inner optimizer's state that go into a rank's record, by the kind of the optimizer
_KEPT = {"sgd": {"momentum_buffer": MOMENTUM}, "adam": {"exp_avg": FIRST, "exp_avg_sq": SECOND}}


class LocalUpdate(PlainUpdate):
    """The inner optimizer takes its own gradients.

    Args:
        kind: see `PlainUpdate`; the state of "sgd" and "adam" is kept of every rank, of others that of the first.
        rate: outer learning rate, > 0.
    """

    def __init__(self, kind: str, rate: float) -> None:
        super().__init__(kind)
        self.notice, self._rate = "", rate

    def add_own(self, optimizer: Any, state: ResidualState) -> None:
        for p, name in optimizer._dgc.names.items():
            own = optimizer.state.get(p, {})
            kept = {part: own.get(key) for key, part in _KEPT.get(self.kind, {}).items()}
            if not all(bool(torch.isfinite(x).all()) for x in kept.values() if x is not None):
                continue  # no file takes others
            for part, x in kept.items():
                if x is not None:
                    state.tensors.setdefault(name, {})[part] = x.detach().reshape(-1).float().cpu().numpy().copy()
            if "step" in own and name in state.tensors:
                state.directions[name] = int(own["step"])

    def take_own(self, optimizer: Any, state: ResidualState) -> ResidualState:
        parts, tensors = _KEPT.get(self.kind, {}), {}
        of_name = {name: p for p, name in optimizer._dgc.names.items()}
        for name, arrays in state.tensors.items():
            p, own = of_name.get(name), {key: arrays[part] for key, part in parts.items() if part in arrays}
            if p is not None:
                for key, x in own.items():
                    optimizer.state[p][key] = torch.from_numpy(x).view(p.shape).to(p.device, p.dtype, copy=True)
                if name in state.directions:
                    optimizer.state[p]["step"] = torch.tensor(float(state.directions[name]))
            kept = {part: x for part, x in arrays.items() if part not in parts.values()}
            if kept:
                tensors[name] = kept
        return dataclasses.replace(state, tensors=tensors, directions={})

    @torch.no_grad()
    def flush(self, optimizer: Any, left: Mapping[Parameter, Left], is_compressed: Compressed) -> dict[Parameter, Any]:
        """Apply what all ranks together had kept: it is a change of weights, of which nothing is left."""
        for p, parts in left.items():
            if RESIDUAL in parts:
                p.sub_(parts[RESIDUAL].to(p.dtype), alpha=self._rate)
        return {}
