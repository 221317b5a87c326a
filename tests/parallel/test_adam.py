"""AdamW with a second moment that all ranks share, on real ranks; its dense steps are stock's."""

from __future__ import annotations

import itertools
from typing import Any

import horovod.torch as hvd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.adam_training import BETAS, DENSE, adamw, known, made, wrapped
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.training import UNROUNDED, batches, distance, fingerprint, smooth_model, train, weights

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]


def _kept(optimizer: Any) -> torch.Tensor:
    """What a rank keeps of compressed tensors."""
    engines = [each for each in session(optimizer).exchange.engines if not each.bucket.uncompressed]
    return torch.cat([torch.as_tensor(each.state.v) for each in engines])


def test_dense_steps_are_those_of_stock_horovod():
    """And what is known of its second moment after them; then the others."""
    model = smooth_model()
    stock = hvd.DistributedOptimizer(adamw(model), named_parameters=model.named_parameters())
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
    model = Rare()
    optimizer, lr, draw = wrapped(model, min_numel=512), 1e-3, torch.Generator().manual_seed(hvd.rank())

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


def test_density_1_with_coupled_decay_is_stock_horovod():
    """Adam with weight decay in the gradient, in dense steps."""
    ends = []
    for wraps, more in (
        (hvd.DistributedOptimizer, {}),
        (DistributedOptimizer, {"compression": Compression.dgc(density=1.0, **UNROUNDED)}),
    ):
        model = smooth_model()
        adam = torch.optim.Adam(model.parameters(), lr=1e-3, betas=BETAS, weight_decay=0.1)
        train(model, wraps(adam, named_parameters=model.named_parameters(), **more), DENSE)
        ends.append(weights(model))
    assert distance(*ends) <= 1e-5


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


@pytest.mark.slow
@pytest.mark.on_ranks(4, nodes=2)
def test_on_nodes_each_worker_measures_its_part():
    """Each of a node's two workers keeps half of the residual and measures half of each gradient."""
    flat, alone = made(**UNROUNDED)
    train(flat, alone, 1)
    ours, optimizer = made(exchange="hierarchical", **UNROUNDED)
    train(ours, optimizer, 1)
    assert _kept(optimizer).numel() == 11_264 // 2
    one, other = (session(each).exchange.second.saved() for each in (alone, optimizer))
    for x, y in zip(one.values(), other.values(), strict=True):
        # squares of a node's mean are less than those of its workers, in all rows alike but for chance
        assert 0.4 < float(y[3:].mean()) / float(x[3:].mean()) <= 1
        assert float(x[0]) == pytest.approx(float(y[0]), rel=0.5)
    losses = train(ours, optimizer, 3 * DENSE)
    assert sum(losses[-5:]) < sum(losses[:5])
    same_on_ranks(fingerprint(ours), known(optimizer))
