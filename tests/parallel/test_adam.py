"""AdamW with a second moment that all ranks share: dense steps are stock's, and states go on or are refused."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import horovod.torch as hvd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, WarmupSchedule, load_checkpoint, save_checkpoint
from dgc_horovod.torch.elastic import TorchState
from tests.helpers import regression, training
from tests.helpers.errors import error_of
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.regression import UNROUNDED, batches, distance, fingerprint, smooth_model, weights
from tests.helpers.training import train

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
DENSE, BETAS = 30, (0.9, 0.95)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """As stock Horovod has it."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=BETAS, weight_decay=0.01)


def made(dense: int = 0, inner: Any = None, op: Any = hvd.Average, **settings: Any) -> tuple[Any, Any]:
    """A model, or `inner`, and its optimizer, compressed after so many dense steps."""
    warmup = WarmupSchedule(steps=dense, first_density=1.0, factor=1e-3) if dense else None
    config = Compression.dgc(**{"density": 0.05, "warmup": warmup, **settings})
    return training.made(config, adamw, inner, op=op)


def known(optimizer: Any) -> str:
    """The bits of what is known of second moments."""
    return session(optimizer).exchange.second.packed().tobytes().hex()


def _kept(optimizer: Any) -> torch.Tensor:
    """What a rank keeps of compressed tensors."""
    engines = [each for each in session(optimizer).exchange.engines if not each.bucket.uncompressed]
    return torch.cat([torch.as_tensor(each.state.v) for each in engines])


def test_dense_steps_are_those_of_stock_horovod():
    """And what is known of its second moment after them; then the others."""
    model, stock = training.made(None, adamw)
    train(model, stock, DENSE)
    ours, optimizer = made(DENSE, **UNROUNDED)
    apart: list[float] = []
    losses = train(
        ours, optimizer, DENSE + 1, after_step=lambda _: apart.append(distance(weights(model), weights(ours)))
    )
    assert apart[DENSE - 1] <= 1e-5
    theirs = stock.state[model[0].weight]["exp_avg_sq"] / (1 - BETAS[1] ** DENSE)
    found = torch.from_numpy(session(optimizer).exchange.second["0.weight"].square()).view(theirs.shape)
    for dim in (0, 1):  # rows and columns begin with stock's
        assert float((theirs.mean(dim) / found.mean(dim)).log().abs().max()) < 0.02
    losses += train(ours, optimizer, 3 * DENSE)
    assert sum(losses[-5:]) / 5 < 0.7 * losses[DENSE]
    own = hvd.allgather_object(_kept(optimizer).numpy().tobytes())
    assert own[0] != own[1]
    same_on_ranks(known(optimizer), fingerprint(ours))


def test_compressed_from_the_first_step():
    """Which moves no compressed weight: nothing is known of it yet."""
    model, optimizer = made(**UNROUNDED)
    before = [p.detach().clone() for p in model.parameters()]
    losses = train(model, optimizer, 1)
    for p, x in zip(model.parameters(), before, strict=True):
        assert p.numel() < 1024 or torch.equal(p, x * (1 - 1e-3 * 0.01)), "the first step only measures"
    losses += train(model, optimizer, 150)
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    sent = optimizer.compression_stats()
    ratio = sent["bytes_dense"] / sent["bytes_sent"]
    assert 5 < ratio < 30, "the sums of a small model at its first step are a large part"
    memory = sum(x.numel() * x.element_size() for p in model.parameters() for x in optimizer.state[p].values())
    memory += 4 * _kept(optimizer).numel()
    assert memory / sum(p.numel() for p in model.parameters()) < 4.3
    same_on_ranks(known(optimizer), fingerprint(model))


def test_what_the_ranks_share_stays_the_same_where_the_script_clips():
    """Each had multiplied it by a factor of its own, which differ much."""
    (model, optimizer), limit = made(min_numel=64), 0.1
    for i, (x, y) in enumerate(batches(6, hvd.rank())):
        optimizer.zero_grad()
        ((1 + 9 * hvd.rank()) * F.mse_loss(model(x), y)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        norm = session(optimizer).exchange.second.squares ** 0.5 / (limit * hvd.size() ** 0.5)
        assert i or norm == pytest.approx(1.0, rel=1e-3), "the mean norm of the first step is within the limit"
        same_on_ranks(known(optimizer))
    same_on_ranks(fingerprint(model))


def test_a_gradient_that_is_not_finite_and_a_residual_that_overflows():
    """In dense steps, at the first that is not, and later."""
    model, optimizer = made(DENSE)
    weight, at, seen = model[0].weight, [0], {}
    bad = (DENSE - 1, DENSE, DENSE + 3) if hvd.rank() == 1 else ()
    weight.register_hook(lambda grad: grad * float("nan") if at[0] in bad else grad)

    def before(step: int) -> None:
        at[0] = step
        seen[step] = known(optimizer)

    train(model, optimizer, DENSE + 10, before_backward=before)
    assert seen[DENSE + 3] == seen[DENSE + 4]
    steps = session(optimizer).exchange.second["0.weight"].steps
    assert steps == DENSE + 10 - 3, "a step that is skipped does not count"
    for engine in session(optimizer).exchange.engines:
        engine.clear()  # as where a residual leaves the range of fp32
    at[0] = 0
    train(model, optimizer, 5)
    assert torch.isfinite(weights(model)).all()
    same_on_ranks(fingerprint(model))


class Rare(nn.Module):
    """Rows of an embedding, and a whole layer, that have a gradient later only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.out, self.late = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, which: torch.Tensor, late: bool) -> torch.Tensor:
        """With or without the layer."""
        x = torch.tanh(self.out(self.rows(which)))
        return self.late(x) if late else x


def test_what_had_no_gradient_before_does_not_run_away():
    """How far a step moves it, in learning rates."""
    model, optimizer = made(inner=Rare(), min_numel=512)
    lr, draw = 1e-3, torch.Generator().manual_seed(hvd.rank())

    def step(first: int, late: bool) -> None:
        optimizer.zero_grad()
        model(torch.randint(first, first + 32, (16,), generator=draw), late).square().mean().backward()
        optimizer.step()

    for _ in range(DENSE):
        step(0, False)
    for p, late in ((model.rows.weight, False), (model.late.weight, True)):
        moved = []
        for _ in range(20):
            before = p.detach().clone()
            step(32, late)
            moved.append(float((p.detach() - before * (1 - 0.01 * lr)).abs().max()) / lr)
        assert 0.1 < max(moved) < 50


def test_sums_of_gradients_go_as_far_as_averages():
    """In the last dense steps and the first of the others; Adam divides a sum by a second moment of sums."""
    moved, squares = [], []
    for op in (hvd.Average, hvd.Sum):
        model, optimizer = made(DENSE, op=op, **UNROUNDED)
        at = [weights(model)]
        train(model, optimizer, DENSE + 12, after_step=lambda _, model=model, at=at: at.append(weights(model)))
        optimizer.flush()
        moved.append([float((b - a).norm()) for a, b in itertools.pairwise(at)][DENSE - 3 :])
        squares.append(float(optimizer.state[model[0].weight]["exp_avg_sq"].mean()))
    assert moved[1] == pytest.approx(moved[0], rel=1e-2)
    assert squares[1] == pytest.approx(4 * squares[0], rel=1e-2), "squares of sums of two"


def _counts(optimizer: Any) -> dict[str, list[float]]:
    """Samples and steps of each second moment."""
    return {name: values[[1, 2]].tolist() for name, values in session(optimizer).exchange.second.saved().items()}


def test_a_flush_leaves_the_second_moment_where_stock_has_it():
    model, optimizer = made()
    train(model, optimizer, 13 + 2 * DENSE)
    before = _counts(optimizer)
    square = torch.from_numpy(session(optimizer).exchange.second["0.weight"].square().copy())
    optimizer.flush()
    stock = smooth_model()
    stock.load_state_dict(model.state_dict())
    plain = adamw(stock)
    plain.load_state_dict(optimizer.state_dict())
    theirs = plain.state[stock[0].weight]
    assert int(theirs["step"]) == 13 + 2 * DENSE
    assert distance(theirs["exp_avg_sq"].flatten() / (1 - BETAS[1] ** int(theirs["step"])), square) < 1e-6
    train(model, optimizer, 1)
    after = _counts(optimizer)
    for name, (samples, steps) in before.items():
        assert after[name][1] == steps + 1 and abs(after[name][0] - samples) <= 2
    assert 0.9 < float(session(optimizer).exchange.second["0.weight"].square().sum()) / float(square.sum()) < 1.2
    optimizer.flush()
    assert float(optimizer.state[model[0].weight]["step"]) == 13 + 2 * DENSE + 1


def test_a_state_that_has_made_no_step_begins_with_nothing_once_more():
    """What was known of the second moment goes with the weights."""
    model, optimizer = training.made(Compression.dgc(0.05, min_numel=16), regression.adamw)
    begin, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 26)
    model.load_state_dict(begin)
    optimizer.load_state_dict(state)
    assert not session(optimizer).exchange.second.known
    losses = train(model, optimizer, 60)
    assert sum(losses[-5:]) < sum(losses[:5])
    same_on_ranks(fingerprint(model))


def test_a_stock_checkpoint_is_taken_over_with_its_momentum():
    """Its first moment, too, is applied in the end."""
    model, stock = training.made(None, adamw)
    train(model, stock, DENSE)
    other, optimizer = made()
    other.load_state_dict(model.state_dict())
    optimizer.load_state_dict(stock.state_dict())
    p = other[0].weight
    pull = stock.state[model[0].weight]["exp_avg"] * (0.9 / 0.1)
    optimizer.zero_grad()
    (0.0 * other(torch.zeros(4, p.shape[1])).sum()).backward()
    start = p.detach().clone()
    optimizer.step()
    optimizer.flush()
    square = stock.state[model[0].weight]["exp_avg_sq"] / (1 - BETAS[1] ** DENSE)
    rows, columns = (square.mean(dim, keepdim=True).clamp(min=float(square.mean()) / 100) for dim in (1, 0))
    sought = start * (1 - 1e-5) - 1e-3 * pull / (rows * columns / square.mean()).sqrt()
    assert distance(sought, p.detach()) / distance(start, p.detach()) < 0.1
    same_on_ranks(fingerprint(other))


def test_moments_of_each_ranks_own_are_refused():
    """A record of earlier versions."""
    _, optimizer = made()
    kept = optimizer.residual_state_dict()
    v = kept["tensors"]["0.weight"]["v"]
    kept["tensors"]["0.weight"].update(first=torch.zeros_like(v), second=torch.zeros_like(v))
    error = error_of(lambda: optimizer.load_residual_state_dict(kept))
    assert error.startswith("CheckpointError") and "'0.weight'" in error and 'residuals="ignored"' in error


def test_what_was_loaded_synced_or_left_by_a_join_is_whole(tmp_path):
    """A record that was loaded and is saved again; elastic's state; then a join, and a checkpoint after it."""
    model, optimizer = made()
    train(model, optimizer, DENSE)
    kept, saved = optimizer.residual_state_dict(), optimizer.state_dict()
    once, twice = made()[1], made()[1]
    for to in (once, twice):
        to.load_state_dict(saved)
        to.load_residual_state_dict(kept)
        kept = to.residual_state_dict()
    assert {part for parts in kept["tensors"].values() for part in parts} == {"v"}
    del once, twice, to  # a join waits for every optimizer's steps
    state = TorchState(model=model, optimizer=optimizer)
    for act in (state.sync, state.restore, state.save, state.restore):
        act()
    if hvd.rank() == 1:  # as a newcomer knows nothing
        session(optimizer).exchange.second.clear()
    state.sync()
    same_on_ranks(known(optimizer))
    train(model, optimizer, 3 + hvd.rank())
    hvd.join()
    same_on_ranks(known(optimizer))
    save_checkpoint(tmp_path, model, optimizer)
    other, resumed = made(inner=smooth_model(1))
    load_checkpoint(tmp_path, other, resumed)
    assert fingerprint(other) == fingerprint(model)
    assert sum(train(other, resumed, 30)) / 30 < 1.8, "it was about 5 at the start"
    same_on_ranks(fingerprint(other), known(resumed))
