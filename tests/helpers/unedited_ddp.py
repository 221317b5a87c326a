"""DDP as scripts have it that know nothing of dgc_horovod; each case prints its name, the weights' digest and a norm.

``python -m tests.helpers.unedited_ddp FILE CASE...`` under torchrun; rank 0 saves the weights of every case in FILE.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

STEPS = 12


class Around(torch.optim.Optimizer):
    """As accelerate's wrapper: under fp16 it keeps the step that the optimizer had when it was wrapped."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
        self.optimizer, self.scaler = optimizer, scaler
        self.__setstate__({})

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the steps anew."""
        if self.scaler is not None:
            step, self.called = self.optimizer.step, False

            def patched(*args: Any, **named: Any) -> Any:
                self.called = True
                return step(*args, **named)

            self._optimizer_original_step_method, self._optimizer_patched_step_method = step, patched

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step as accelerate does."""
        if self.scaler is None:
            return self.optimizer.step(closure)
        self.optimizer.step = self._optimizer_patched_step_method  # type: ignore[method-assign]
        self.scaler.step(self.optimizer, closure)
        self.scaler.update()
        self.optimizer.step = self._optimizer_original_step_method  # type: ignore[method-assign]
        assert self.called
        self.called = False


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))


def _data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(dist.get_rank())
    xs = [torch.randn(16, 64, generator=drawn) for _ in range(STEPS)]
    return [(x, x[:, :10].argmax(1)) for x in xs]


def _train(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    for x, y in _data():
        for optimizer in optimizers:
            optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()


def _sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def plain(net: nn.Sequential) -> None:
    """One model, one optimizer, a scheduler made before."""
    model = DistributedDataParallel(net)
    optimizer = _sgd(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    for x, y in _data():
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()


def adamw(net: nn.Sequential) -> None:
    """AdamW."""
    model = DistributedDataParallel(net, static_graph=True)
    _train(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def two_models(net: nn.Sequential) -> None:
    """Two models with an optimizer each, as a GAN has them."""
    models = [DistributedDataParallel(part) for part in (net[0], net[2])]
    _train(nn.Sequential(models[0], net[1], models[1]), *map(_sgd, models))


def scaled(net: nn.Sequential) -> None:
    """Under a GradScaler, by a wrapper that keeps the step() of before."""
    model = DistributedDataParallel(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = Around(_sgd(model), scaler)
    for x, y in _data():
        optimizer.optimizer.zero_grad()
        scaler.scale(cross_entropy(model(x), y)).backward()
        optimizer.step()


def closures(net: nn.Sequential) -> None:
    """step() with a closure."""
    model = DistributedDataParallel(net)
    optimizer = _sgd(model)
    for x, y in _data():

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]


def stages(net: nn.Sequential) -> None:
    """Another optimizer after some steps, and the first is gone."""
    model = DistributedDataParallel(net)
    for _ in range(2):
        _train(model, _sgd(model))


def state_asked(net: nn.Sequential) -> None:
    """Rank 0 alone asks for the optimizer's state before there is one, which takes a step of zeros."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = DistributedDataParallel(net)
    optimizer = _sgd(model)
    if dist.get_rank() == 0:
        get_optimizer_state_dict(model, optimizer)
    _train(model, optimizer)


def two_optimizers(net: nn.Sequential) -> None:
    """Refused: two optimizers of one model."""
    _train(DistributedDataParallel(net), _sgd(net[0]), _sgd(net[2]))


def own_hook(net: nn.Sequential) -> None:
    """Refused: the script has a communication hook."""
    model = DistributedDataParallel(net)
    model.register_comm_hook(None, fp16_compress_hook)
    _train(model, _sgd(model))


def lbfgs(net: nn.Sequential) -> None:
    """Refused: a gradient several times in a step."""
    model = DistributedDataParallel(net)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2)
    x, y = _data()[0]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)  # type: ignore[arg-type]


def _ends_once(net: nn.Sequential, end: Callable[[], object]) -> None:
    """One rank ends in the middle of the first attempt."""
    model = DistributedDataParallel(net)
    optimizer = _sgd(model)
    for i, (x, y) in enumerate(_data()):
        if i == 5 and dist.get_rank() == 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            end()
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()


def ends_once_dies(net: nn.Sequential) -> None:
    """A rank that is killed, in the first attempt."""
    _ends_once(net, lambda: os.kill(os.getpid(), signal.SIGKILL))


def ends_once_raises(net: nn.Sequential) -> None:
    """A rank that raises an error, in the first attempt."""
    _ends_once(net, lambda: 1 // 0)


def no_model(net: nn.Sequential) -> None:
    """Nothing to compress: no DistributedDataParallel."""
    _train(net, _sgd(net))


CASES: dict[str, Callable[[nn.Sequential], None]] = {
    each.__name__: each
    for each in (
        plain, adamw, two_models, scaled, closures, stages, state_asked, two_optimizers, own_hook, lbfgs, no_model,
        ends_once_dies, ends_once_raises,
    )
}  # fmt: skip


def main() -> None:
    """Run the cases that the command line names."""
    file, *names = sys.argv[1:]
    dist.init_process_group("gloo")
    found = {}
    for name in names:
        net = _net()
        CASES[name](net)
        weights = torch.cat([p.detach().flatten() for p in net.parameters()])
        found[name] = weights
        digest = hashlib.blake2b(weights.numpy().tobytes(), digest_size=4).hexdigest()
        print(f"rank {dist.get_rank()} {name} {digest}\n", end="", flush=True)
    if dist.get_rank() == 0:
        torch.save(found, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
