"""A model of PyTorch in training, on Horovod, on DDP or on torch.distributed alone."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import numpy as np
import torch

from dgc_horovod.testing import torch as testing
from dgc_horovod.torch.session.session import session_of
from tests.helpers.adapters import Adapter
from tests.helpers.ddp_training import step
from tests.helpers.regression import Dividing, smooth_model
from tests.helpers.run import ALONE, INPUTS, RATES, Run


class TorchRun(Run):
    """See `Run`; the arguments are those of `Adapter.start`."""

    def __init__(
        self,
        adapter: Adapter,
        compression: Any,
        name: str,
        seed: int,
        wrap: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(adapter)

        def make(model: torch.nn.Module) -> torch.optim.Optimizer:
            kind = Dividing if name == "Dividing" else getattr(torch.optim, name)
            found: torch.optim.Optimizer = kind(model.parameters(), **options)
            return found

        options, self._make = {"lr": RATES[name], **options}, make
        self.scaler: Any = None
        self.clip: float | None = None  # norm to which the script clips gradients
        self.model = smooth_model(seed)
        if compression == ALONE:
            self.optimizer = make(self.model)
        else:
            self.model, self.optimizer = adapter.made(compression, make, self.model, **(wrap or {}))

    def on(self, x: np.ndarray, y: np.ndarray) -> float:
        batch = torch.from_numpy(x), torch.from_numpy(y)
        return step(self.model, self.optimizer, *batch, self.scaler, None if self.clip is None else self._clips)

    def _clips(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)

    def _loss(self, x: np.ndarray, y: np.ndarray) -> torch.Tensor:
        inner = getattr(self.model, "module", self.model)
        return torch.nn.functional.mse_loss(inner(torch.from_numpy(x)), torch.from_numpy(y))

    def loss(self, x: np.ndarray, y: np.ndarray) -> float:
        return float(self._loss(x, y))

    def gradients(self, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
        return [each.numpy() for each in torch.autograd.grad(self._loss(x, y), list(self.model.parameters()))]

    def apply(self, gradients: list[np.ndarray]) -> None:
        self.optimizer.zero_grad()
        pairs = zip(self.model.parameters(), gradients, strict=True)
        loss = torch.stack([(p * torch.from_numpy(gradient)).sum() for p, gradient in pairs]).sum()
        if self.adapter.name == "DDP":  # which counts on the gradients of its last forward pass
            loss = loss + 0 * self.model(torch.zeros(1, INPUTS)).sum()
        loss.backward()
        self.optimizer.step()

    @property
    def rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]  # type: ignore[no-any-return]

    @rate.setter
    def rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    @property
    def names(self) -> list[str]:
        return [name.removeprefix("module.") for name, _ in self.model.named_parameters()]

    @property
    def arrays(self) -> list[np.ndarray]:
        return [p.detach().numpy().copy() for p in self.model.parameters()]

    def assign(self, arrays: list[np.ndarray]) -> None:
        for p, array in zip(self.model.parameters(), arrays, strict=True):
            p.data.copy_(torch.from_numpy(array))

    @property
    def inner(self) -> list[float]:
        states = [self.optimizer.state.get(p, {}) for p in self.model.parameters()]
        return [float(x.double().sum()) for state in states for x in state.values() if x is not None]

    def slots(self) -> list[np.ndarray]:
        plain = self._make(self.model)
        plain.load_state_dict(self.optimizer.state_dict())
        every = [plain.state[p] for p in self.model.parameters()]
        return [state.get("momentum_buffer", state.get("exp_avg_sq")).numpy() for state in every]

    @property
    def session(self) -> Any:
        return testing.session(self.optimizer)

    @property
    def choice(self) -> Any:
        return self.session.strategy.choice

    def take(self, mode: str) -> None:
        testing.take(self.optimizer, mode)

    @property
    def of_round(self) -> int:
        return self.session.exchange.counts.pending  # type: ignore[no-any-return]

    def left_of_round(self, length: int) -> int:
        return length - self.of_round

    @property
    def copied(self) -> dict[str, dict[str, np.ndarray]]:
        return testing.copied(self.optimizer).tensors

    @property
    def exchange(self) -> Any:
        return self.session.exchange

    @property
    def counted(self) -> int:
        return self.exchanged

    @property
    def outer(self) -> list[np.ndarray]:
        return [x.numpy().copy() for x in self.session.strategy.rounds.momentum.values()]

    def push_outer(self, element: float) -> None:
        self.session.strategy.rounds.momentum.update({p: torch.full_like(p, element) for p in self.model.parameters()})

    def state(self, **options: Any) -> Any:
        """Horovod's own class, unless it is to flush."""
        if not options:
            return self.adapter.ranks.elastic.TorchState(self.model, self.optimizer, batch=0)
        return self.adapter.module.elastic.TorchState(self.model, self.optimizer, batch=0, **options)

    def renew(self, state: Any) -> None:
        from dgc_horovod.torch import elastic

        found = session_of(self.optimizer)
        assert found is not None
        elastic.renew(found, found.kept.record(own=False))

    def failing(self, error: Exception) -> AbstractContextManager[Any]:
        return mock.patch.object(self.session.exchange, "finish", side_effect=error)
