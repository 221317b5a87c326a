"""Local steps keep their promises on real ranks: averaging at density 1, replicas, resumes, faults."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests.helpers.adapters import Compression, on_adapters
from tests.helpers.errors import error_of
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.run import ALONE, UNROUNDED, distance

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
each_adapter = on_adapters("Horovod", slow=("DDP", "without DDP", "Keras"))
H = 5
ADAMW: dict[str, Any] = {"name": "AdamW", "lr": 2e-3, "weight_decay": 0.01}
WHOLE: dict[str, Any] = {"density": 1.0, "local_decay": 1.0, **UNROUNDED}


def _started(adapter: Any, seed: int = 0, optimizer: dict[str, Any] = ADAMW, wrap: Any = None, **fields: Any) -> Any:
    compression = Compression.local(**{"steps": H, "density": 0.1, "min_numel": 64, **fields})
    wrap = {"bucket_cap_mb": 0.01} if adapter.name == "DDP" and wrap is None else wrap
    return adapter.start(compression, seed=seed, wrap=wrap, **optimizer)


@each_adapter
@pytest.mark.parametrize(("momentum", "rate"), [(0.0, 1.0), (0.9, 0.7)], ids=["mean", "Nesterov"])
def test_at_density_1_the_weights_become_their_mean(adapter, momentum, rate):
    """Each rank trains alone, and every H steps the weights become their mean."""
    _check_means(adapter, _started(adapter, outer_momentum=momentum, outer_rate=rate, **WHOLE), momentum, rate)


@pytest.mark.slow
@on_adapters("DDP")
def test_at_density_1_the_weights_become_their_mean_where_losses_are_scaled(adapter):
    import torch

    run = _started(adapter, outer_momentum=0.0, outer_rate=1.0, **WHOLE)
    run.scaler = torch.amp.GradScaler("cpu")
    _check_means(adapter, run, 0.0, 1.0)


def _check_means(adapter: Any, run: Any, momentum: float, rate: float) -> None:
    alone, outer = adapter.start(ALONE, **ADAMW), np.float32(0)
    for _ in range(4):
        anchor = alone.weights
        alone.train(H)
        change = adapter.mean(anchor - alone.weights)
        outer = momentum * outer + change
        alone.weights = anchor - rate * (change + momentum * outer if momentum else change)
    run.train(4 * H)
    assert distance(alone.weights, run.weights) <= 1e-5


@each_adapter
def test_replicas_are_equal_after_each_exchange_and_only_then(adapter):
    """A run at 10%, 2 bits: learning and traffic too; then an exchange within a round, and a flush."""
    run = _started(adapter, check_every=1)
    prints, losses = [], []
    for _ in range(40 * H):
        losses += run.train()
        prints.append(run.print)
    same = [a == b for a, b in zip(*adapter.of_all_ranks(prints), strict=True)]
    assert same == [number % H == 0 for number in range(1, 40 * H + 1)]
    stats = run.optimizer.compression_stats()
    assert sum(losses[-20:]) / 20 < 0.5 * losses[0] and stats["steps"] == 40
    assert stats["bytes_dense_received"] / stats["bytes_received"] > 10 * H, "a tenth, in 2 bits, every fifth step"
    run.train(2)
    assert run.apart > 0
    run.optimizer.exchange()
    early = run.print
    run.optimizer.flush()
    assert run.print != early
    same_on_ranks(early, run.print)


@each_adapter
def test_weights_that_are_not_finite_move_nobody(adapter):
    run = _started(adapter)
    run.train(2 * H)
    before = run.print
    run.train(2)
    if adapter.rank == 1:
        run.spoil()
    run.train(H - 2)
    assert run.print == before
    assert np.isfinite(run.inner).all()
    if adapter.name == "Keras":  # empty ones: steps of several times
        assert all(np.asarray(second).any() for second in run.optimizer._velocities)
    losses = run.train(10 * H)
    assert losses[-1] < 4 and run.print != before
    same_on_ranks(run.print)


@on_adapters("Horovod", slow=("Keras",))
def test_one_gradient_that_is_not_finite_costs_one_step_of_one_rank(adapter):
    """The weights of that rank had been NaN for a round, and its running statistics for ever."""
    run = _started(adapter)
    before = run.print
    for step in range(2 * H):
        gradients = run.gradients(*run.batch())
        if adapter.rank == 1 and step == H + 2:
            gradients[0].flat[0] = np.nan
        run.apply(gradients)
        assert np.isfinite(run.weights).all()
    counts = run.exchange.counts
    assert run.apart == 0 and run.print != before and (counts.skipped, counts.left_out) == (0, adapter.rank)


@on_adapters("Horovod", slow=("Keras",))
def test_an_overflow_on_one_rank_is_over_with_the_round(adapter):
    """Adam's first moment had stayed where the second was emptied: steps of 1e24.

    One rank's gradient is beyond float32 when Adam squares it, and another weight not finite.
    """
    run = _started(adapter, optimizer={"name": "Adam", "lr": 1e-2})
    for step in range(3 * H):
        gradients = [np.ones_like(array) for array in run.arrays]
        if adapter.rank == 1 and step // H == 1:
            gradients[0].flat[1] = 1e25
        run.apply(gradients)
        if adapter.rank == 1 and step == H + 1:
            run.spoil()
    assert run.apart == 0 and np.abs(run.weights).max() < 1


@on_adapters("Horovod", slow=("Keras",))
@pytest.mark.parametrize("action", ["stop", "broadcast"])
def test_weights_that_differ_are_found_by_name_and_repaired(adapter, action):
    """At the next exchange, with the outer momentum and, in Keras, the inner state."""
    run = _started(adapter, on_mismatch=action, check_every=1, outer_momentum=0.5)
    run.train(H)
    run.spoil(0.5 + 0.01 * adapter.rank)
    if action == "stop":
        error = error_of(lambda: run.train(H))
        assert ("different weights" if adapter.name == "Keras" else "'0.weight'") in error
        assert "more" not in error.split("differ")[0], error
        return
    run.push_outer(0.01 * adapter.rank)
    run.train(H)
    moments = run.optimizer._momentums if adapter.name == "Keras" else []
    assert run.apart == 0 and all(adapter.apart(x) == 0 for x in (*run.outer, *moments))


@each_adapter
@pytest.mark.parametrize("optimizer", [ADAMW, {"name": "SGD", "lr": 0.02, "momentum": 0.9}], ids=["AdamW", "SGD"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(adapter, optimizer, tmp_path):
    """Saved in the middle of a round, which ends it; by others in the middle of theirs too."""
    runs = [_started(adapter, seed, optimizer, outer_momentum=0.5, outer_rate=0.7) for seed in range(3)]
    first, second, third = runs
    first.train(3 * H + 2)
    if adapter.name == "Keras":  # PyTorch says that an exchange is to come before
        third.train(1)
    first.save(tmp_path)
    kept = first.kept_bits
    assert first.left() > 0
    for run in (second, third):
        run.load(tmp_path)
        run.steps = first.steps
        assert run.print == first.print
        assert run.kept_bits == kept
        if adapter.name != "Keras":
            own, loaded = (each.optimizer.state_dict()["state"][0] for each in (first, run))
            assert loaded.keys() == own.keys()
    for run in runs:
        run.train(3 * H + 2)
    assert first.print == second.print == third.print
    for run in runs:
        run.optimizer.exchange()
    assert first.print == second.print == third.print
    same_on_ranks(first.print)


@each_adapter
def test_residuals_are_known_between_two_rounds(adapter):
    run = _started(adapter)
    run.train(2)
    assert "optimizer.exchange()" in error_of(run.kept)
    run.optimizer.exchange()
    run.kept()


@on_adapters("Horovod", slow=("without DDP", "Keras"))
def test_sums_are_refused(adapter):
    how = {"average": False} if adapter.kind == "ddp" else {"op": adapter.ranks.Sum}
    assert ("average" if adapter.kind == "ddp" else "hvd.Average") in error_of(lambda: _started(adapter, wrap=how))


@on_adapters("Horovod")
def test_what_the_inner_steps_have_changed_is_applied_or_waits(adapter):
    run = _started(adapter, local_decay=1.0, outer_momentum=0.0, **UNROUNDED)
    begun, last, inner = run.weights, [run.weights], [np.float32(0)]
    rounds = run.session.strategy.rounds
    send, receive = rounds.send, rounds.receive

    def sending() -> bool:
        inner[0] = inner[0] + (run.weights - last[0])
        return send()

    def receiving() -> bool:
        finite = receive()
        last[0] = run.weights
        return finite

    rounds.send, rounds.receive = sending, receiving
    run.train(10 * H)
    kept, named = run.kept(), run.model.named_parameters()
    waits = np.concatenate([kept.get(name, {}).get("v", np.zeros(p.numel(), np.float32)) for name, p in named])
    moved, made, owed = (adapter.mean(x) for x in (run.weights - begun, inner[0], waits))
    assert distance(made, moved - owed) <= 1e-4 and np.linalg.norm(owed) / np.linalg.norm(made) > 0.05
    before = run.print
    run.optimizer.flush()
    assert distance(made, run.weights - begun) <= 1e-4 and run.print != before


@on_adapters("Horovod")
def test_a_step_that_a_scaler_skips_on_one_rank_counts(adapter):
    """Rounds stay together."""
    import torch
    from torch.nn.utils import clip_grad_norm_

    from tests.helpers.regression import batches

    run = _started(adapter, optimizer={"name": "SGD", "lr": 0.02})
    model, optimizer, losses = run.model, run.optimizer, []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step, (x, y) in enumerate(batches(6 * H, adapter.rank)):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        scaler.scale(loss * (torch.inf if adapter.rank == 1 and step == 7 else 1.0)).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
    assert optimizer.compression_stats()["steps"] == 6 and losses[-1] < losses[0]
    assert all(a != b for a, b in itertools.pairwise(adapter.of_all_ranks(scaler.get_scale())))
    same_on_ranks(run.print)
