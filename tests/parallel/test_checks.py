"""The ranks compare their weights, and find out the one that differs."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import torch

from dgc_horovod.errors import ReplicaMismatch
from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.training import batches, fingerprint, momentum_sgd, smooth_model, train

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(3)]


def _made(model: Any = None, **fields: Any) -> tuple[Any, Any]:
    model = smooth_model() if model is None else model
    compression = Compression.dgc(0.05, **{"min_numel": 16, **fields})
    return model, DistributedOptimizer(momentum_sgd(model), model.named_parameters(), compression)


def _drift(action: str, steps: list[int]) -> Any:
    """Train 12 steps, noted in `steps`; a weight of rank 1 is changed behind the others' backs after six."""
    model, optimizer = _made(check_every=4, on_mismatch=action)

    def spoil(step: int) -> None:
        steps.append(step)
        if step == 6 and hvd.rank() == 1:
            with torch.no_grad():
                model[2].weight[3, 4] += 1e-6

    train(model, optimizer, 12, after_step=spoil)
    return model


def test_a_drifting_replica_stops_all_ranks_with_its_name():
    steps = []
    with pytest.raises(ReplicaMismatch) as caught:
        _drift("stop", steps)
    assert len(steps) == 8, "it is found before the step after the comparison is applied"
    error = str(caught.value)
    assert error.startswith("after step 8 rank 1 has other weights than the others: '2.weight'. ")
    assert "They were equal after step 4. The optimizer's options (learning rate, ...) are the same" in error
    assert "max_norm" in error and "Broadcast" not in error


def test_or_all_go_on_with_the_first_rank():
    steps = []
    same_on_ranks(fingerprint(_drift("broadcast", steps)))
    assert len(steps) == 12


def test_sound_replicas_are_not_disturbed():
    found = []
    for every in (0, 1):
        model, optimizer = _made(check_every=every)
        train(model, optimizer, 10)
        found.append(fingerprint(model))
    assert found[0] == found[1]
    same_on_ranks(found)


def test_weights_that_nobody_has_broadcast_are_found_at_once():
    model, optimizer = _made(smooth_model(seed=hvd.rank()))
    with pytest.raises(ReplicaMismatch, match="after step 1 rank") as caught:
        train(model, optimizer, 5)
    error = str(caught.value)
    assert "differed before the first step was applied. Broadcast weights" in error and "max_norm" not in error


class _Words(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(50, 40, max_norm=1.0)
        self.rest = torch.nn.Linear(40, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of four rows, which are chosen by the signs of `x`."""
        return self.rest(self.table((x[:, :4] > 0).long() + 2 * torch.arange(4) + 10 * hvd.rank()).sum(1))


@pytest.mark.parametrize("cause", ["rate", "scale", "embedding"])
def test_the_cause_of_a_difference_is_named_where_it_can_be_known(cause):
    """Every message said that weights were to be broadcast, which cures none of these."""
    scale = 1000.0 if hvd.rank() == 1 else 3.0
    scaler = torch.amp.GradScaler("cpu", init_scale=scale) if cause == "scale" else None
    model = _Words() if cause == "embedding" else smooth_model()
    compression = Compression.dgc(0.05, min_numel=16, check_every=2)
    optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), compression, grad_scaler=scaler)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = model(x)[:, :1].sub(y[:, :1]).square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
            return
        scaler.scale(loss).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()

    with pytest.raises(ReplicaMismatch) as caught:
        for number, batch in enumerate(batches(8, hvd.rank())):
            if number == 3 and hvd.rank() == 2 and cause == "rate":
                optimizer.param_groups[0]["lr"] = 0.025
            step(*batch)
    said = {
        "rate": "The lr of parameter group 0 is 0.1 on rank 0 and 0.025 on rank 2. Give",
        "scale": "The loss scale is 3.0 on rank 0 and 1000.0 on rank 1. Give",
        "embedding": "'table.weight'. 'table.weight' belongs to an Embedding with max_norm",
    }[cause]
    error = str(caught.value)
    assert said in error and "Broadcast" not in error
    same_on_ranks(error)


def test_weights_that_the_script_has_set_right_are_right():
    """The script broadcasts after its first step: what differed when the checksums were sent does not any more."""
    model, optimizer = _made(smooth_model(seed=hvd.rank()))
    train(model, optimizer, 1)
    hvd.broadcast_parameters(model.state_dict(), 0)
    train(model, optimizer, 3)
    same_on_ranks(fingerprint(model))


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_the_first_rank_gives_its_optimizer_state_too(kind):
    """Rank 0 alone has loaded a checkpoint, and nobody broadcasts: the ranks do not even have the same entries."""

    def stock(model: torch.nn.Module) -> torch.optim.Optimizer:
        return momentum_sgd(model) if kind == "SGD" else torch.optim.Adam(model.parameters(), 1e-3)

    model = smooth_model()
    compression = Compression.dgc(0.05, min_numel=16, on_mismatch="broadcast")
    optimizer = DistributedOptimizer(stock(model), model.named_parameters(), compression)
    if hvd.rank() == 0:
        other = smooth_model(seed=1)
        inner = stock(other)
        x, y = next(iter(batches(1, 0)))
        torch.nn.functional.mse_loss(other(x), y).backward()
        inner.step()
        model.load_state_dict(other.state_dict())
        optimizer.load_state_dict(inner.state_dict())
    train(model, optimizer, 6)
    state = [x for each in optimizer.state.values() for x in each.values() if isinstance(x, torch.Tensor)]
    same_on_ranks(fingerprint(model), [float(x.double().sum()) for x in state])


def test_an_elastic_script_runs_with_a_fixed_number_of_ranks():
    """A script for Horovod Elastic, started without it, as Horovod allows."""
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
    assert fingerprint(model) == at_commit
    assert state.batch == 4, "what was committed before the last increment"
    same_on_ranks(at_commit)
