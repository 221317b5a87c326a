"""An optimizer's arithmetic, for arrays of any framework: what is taken over comes back, and a flush loses nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dgc_horovod import DGCConfig
from dgc_horovod.arithmetic import SGD, Adam, Arithmetic, Local, Options, choose, without_own
from dgc_horovod.core.bucketing import TensorSpec
from dgc_horovod.state.residual_state import FIRST, MOMENTUM, RESIDUAL, SECOND, ResidualState
from tests.helpers.engines import make_exchange

SHAPE = (40, 50)
ARRAYS = {"numpy": np.array, "torch": torch.tensor}
HEAVY, AHEAD = Options(momentum=0.9), Options(momentum=0.9, nesterov=True)
ADAMS = Options(b1=0.9, b2=0.99, eps=1e-8)


def buckets_of():
    return make_exchange([TensorSpec("w", SHAPE)], DGCConfig(density=0.1, min_numel=16))


def drawn(seed):
    return np.random.default_rng(seed).standard_normal(SHAPE, np.float32).reshape(-1)


def test_a_velocity_that_is_taken_over_comes_back():
    buckets, velocity = buckets_of(), drawn(0)
    assert SGD().give_back(buckets, "w", HEAVY, 3) == {}
    SGD().take_over(buckets, "w", {MOMENTUM: velocity}, HEAVY, 3)
    np.testing.assert_array_equal(SGD().give_back(buckets, "w", HEAVY, 3)[MOMENTUM], velocity)


def test_a_second_moment_that_is_taken_over_comes_back_and_the_first_waits():
    buckets, bias = buckets_of(), 1 - 0.99**7
    square = np.outer(np.arange(1, 41), np.arange(1, 51)).astype(np.float32).reshape(-1)
    assert Adam().give_back(buckets, "w", ADAMS, 7) == {}
    owed = Adam().owes(ADAMS) * drawn(0)
    Adam().take_over(buckets, "w", {FIRST: owed, SECOND: square * np.float32(bias)}, ADAMS, 7)
    found = Adam().give_back(buckets, "w", ADAMS, 7)
    assert not found[FIRST].any()
    np.testing.assert_allclose(found[SECOND], square * bias, rtol=1e-5)
    np.testing.assert_allclose(buckets.state_arrays()["w"][RESIDUAL], 9 * drawn(0) / np.sqrt(square), rtol=1e-4)


@pytest.mark.parametrize("made", ARRAYS.values(), ids=ARRAYS)
def test_a_flush(made):
    """Updates are applied, and momentum goes on; a gradient waits for the next step, or is a step with its momentum."""
    left = {RESIDUAL: made([1.0, -2.0]), MOMENTUM: made([3.0, 4.0]), SECOND: made([5.0, 6.0])}
    change = SGD().flushed(left, AHEAD, is_gradient=False, ends=False)
    assert (change.step, change.ahead, change.momentum, change.kept) == (left[RESIDUAL], 1.0, left[MOMENTUM], None)
    assert SGD().flushed(left, Options(), False, False).momentum is None
    for kind in (SGD(), Adam(), Arithmetic()):
        change = kind.flushed(left, AHEAD, is_gradient=True, ends=False)
        assert change.kept is left[RESIDUAL] and change.step is None and not change.slots
    change = SGD().flushed(left, AHEAD, is_gradient=True, ends=True)
    assert (change.step, change.momentum, change.ahead) == (left[RESIDUAL], left[RESIDUAL], 1.9)
    change = Adam().flushed(left, ADAMS, is_gradient=False, ends=True)
    assert change.slots[FIRST].tolist() == [0.0, 0.0] and change.slots[SECOND] is left[SECOND]
    assert Local(SGD(), 0.7).flushed(left, Options(), False, True)[:3] == (left[RESIDUAL], 1.0, 0.7)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_what_ranks_share_is_a_step_of_stock_without_a_gradient(nesterov, decay):
    p = torch.nn.Parameter(torch.tensor(drawn(0)))
    stock = torch.optim.SGD([p], 1.0, 0.9, weight_decay=decay, nesterov=nesterov)
    velocity = drawn(1)
    stock.state[p]["momentum_buffer"] = torch.tensor(velocity)
    weights, p.grad = p.detach().numpy().copy(), torch.zeros_like(p)
    step = SGD().shared(weights, velocity, Options(momentum=0.9, nesterov=nesterov, decay=decay))
    stock.step()
    np.testing.assert_allclose(weights - step, p.detach().numpy(), atol=1e-6)
    np.testing.assert_allclose(velocity, stock.state[p]["momentum_buffer"].numpy(), atol=1e-6)


def test_what_is_exchanged_by_the_settings():
    dgc, topk = DGCConfig(), DGCConfig(momentum_correction=False, factor_masking=False)
    local = DGCConfig(local_steps=4, momentum_correction=False, factor_masking=False, outer_rate=0.5)
    sgd, adam, other = SGD(), Adam(), Arithmetic()
    for stock, config, expected in [
        (sgd, dgc, SGD), (adam, dgc, Adam), (other, dgc, Arithmetic), (sgd, topk, Arithmetic), (adam, topk, Arithmetic),
        (adam, local, Local),
    ]:  # fmt: skip
        assert type(choose(stock, object, [Options()], config)[0]) is expected
    assert choose(adam, object, [], local)[0].own == (FIRST, SECOND)


def test_a_rank_keeps_its_own_slots_apart():
    arrays = {RESIDUAL: np.zeros(3, np.float32), MOMENTUM: np.ones(3, np.float32)}
    state = ResidualState(0, 1, True, tensors={"w": arrays, "gone": {MOMENTUM: np.ones(2, np.float32)}})
    rest = without_own(state, (MOMENTUM,), {"w": 3})
    assert list(rest.tensors) == ["w"] and list(rest.tensors["w"]) == [RESIDUAL]
    assert state.tensors["w"] is arrays and list(arrays) == [RESIDUAL, MOMENTUM]


def test_optimizers_that_lost_in_trials_say_so():
    config = DGCConfig(density=0.01, momentum_correction=False)
    for kind in (torch.optim.Muon, type("Lion", (torch.optim.Optimizer,), {}), type("OwnLion", (), {})):
        told = choose(Arithmetic(), kind, [Options()], config)[1]
        assert told == ([] if kind.__name__ == "OwnLion" else [told[0]])
        assert all(f"{kind.__name__} learned less" in each for each in told)
    assert choose(Arithmetic(), torch.optim.RMSprop, [Options()], config)[1] == []
