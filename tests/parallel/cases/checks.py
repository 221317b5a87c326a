"""Replicas that drift apart are found out, on real ranks."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from dgc_horovod.errors import ReplicaMismatch
from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.errors import error_of
from tests.helpers.training import batches, fingerprint, momentum_sgd, smooth_model, train


def _made(**fields: Any) -> tuple[Any, Any]:
    model = smooth_model()
    compression = Compression.dgc(0.05, min_numel=16, **fields)
    return model, DistributedOptimizer(momentum_sgd(model), model.named_parameters(), compression)


def drifting() -> dict[str, Any]:
    """One rank's weights are changed behind the others' backs."""
    hvd.init()
    found: dict[str, Any] = {}
    for action in ("stop", "broadcast"):
        model, optimizer = _made(check_every=4, on_mismatch=action)
        steps = []

        def spoil(step: int, model: Any = model, steps: list[int] = steps) -> None:
            steps.append(step)
            if step == 6 and hvd.rank() == 1:
                with torch.no_grad():
                    model[2].weight[3, 4] += 1e-6

        try:
            train(model, optimizer, 12, after_step=spoil)
            found[action] = {"fingerprint": fingerprint(model), "steps": len(steps)}
        except ReplicaMismatch as error:
            found[action] = {"error": str(error), "steps": len(steps)}
    return found


def sound() -> dict[str, Any]:
    """Nothing is found where nothing is wrong; and it can be switched off."""
    hvd.init()
    found = {}
    for every in (0, 1):
        model, optimizer = _made(check_every=every)
        train(model, optimizer, 10)
        found[str(every)] = fingerprint(model)
    return found


def other_weights_from_the_start() -> dict[str, Any]:
    """Nobody has broadcast the weights."""
    hvd.init()
    model = smooth_model(seed=hvd.rank())
    optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.05))
    try:
        train(model, optimizer, 5)
    except ReplicaMismatch as error:
        return {"error": str(error)}
    return {"error": ""}


class _Words(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(50, 40, max_norm=1.0)
        self.rest = torch.nn.Linear(40, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of four rows, which are chosen by the signs of `x`."""
        return self.rest(self.table((x[:, :4] > 0).long() + 2 * torch.arange(4) + 10 * hvd.rank()).sum(1))


def why_different() -> dict[str, str]:
    """What makes replicas drift apart is named: another option on one rank, another loss scale, an embedding."""
    hvd.init()
    found = {}
    compression = Compression.dgc(0.05, min_numel=16, check_every=2)

    def drift(model: Any, scaler: Any = None, rate_of_last: float = 0.1) -> None:
        optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), compression, grad_scaler=scaler)
        for step, (x, y) in enumerate(batches(8, hvd.rank())):
            if step == 3 and hvd.rank() == 2:
                optimizer.param_groups[0]["lr"] = rate_of_last
            optimizer.zero_grad()
            loss = model(x)[:, :1].sub(y[:, :1]).square().mean()
            if scaler is None:
                loss.backward()
                optimizer.step()
                continue
            scaler.scale(loss).backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()

    found["rate"] = error_of(lambda: drift(smooth_model(), rate_of_last=0.025))
    scale = 1000.0 if hvd.rank() == 1 else 3.0
    found["scale"] = error_of(lambda: drift(smooth_model(), torch.amp.GradScaler("cpu", init_scale=scale)))
    found["embedding"] = error_of(lambda: drift(_Words()))
    return found


def repaired_in_time() -> dict[str, Any]:
    """The script broadcasts after its first step: what was different when the checksums were sent is not any more."""
    hvd.init()
    model = smooth_model(seed=hvd.rank())
    optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.05))
    train(model, optimizer, 1)
    hvd.broadcast_parameters(model.state_dict(), 0)
    train(model, optimizer, 3)
    return {"fingerprint": fingerprint(model)}


def another_state_on_rank_zero() -> dict[str, Any]:
    """Rank 0 alone has loaded a checkpoint, and nobody broadcasts: the ranks do not even have the same entries."""
    hvd.init()
    found = {}
    for name, make in {"SGD": momentum_sgd, "Adam": lambda model: torch.optim.Adam(model.parameters(), 1e-3)}.items():
        model = smooth_model()
        optimizer = DistributedOptimizer(
            make(model), model.named_parameters(), Compression.dgc(0.05, min_numel=16, on_mismatch="broadcast")
        )
        if hvd.rank() == 0:
            other = smooth_model(seed=1)
            stock = make(other)
            x, y = next(iter(batches(1, 0)))
            torch.nn.functional.mse_loss(other(x), y).backward()
            stock.step()
            model.load_state_dict(other.state_dict())
            optimizer.load_state_dict(stock.state_dict())
        train(model, optimizer, 6)
        shared = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
        found[name] = {"fingerprint": fingerprint(model), "state": [float(x.double().sum()) for x in shared]}
    return found


def elastic_script_of_fixed_ranks() -> dict[str, Any]:
    """A script for Horovod Elastic, started without it, as Horovod allows."""
    hvd.init()
    model, optimizer = _made()

    @hvd.elastic.run
    def work(state: Any) -> None:
        for _ in range(3):
            train(model, optimizer, 2)
            state.commit()
            state.batch += 2

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
    work(state)
    at_commit = fingerprint(model)
    train(model, optimizer, 2)
    state.restore()
    return {"fingerprint": fingerprint(model), "restored": fingerprint(model) == at_commit, "batch": state.batch}
