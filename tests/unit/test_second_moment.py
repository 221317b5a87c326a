"""Adam's second moment by rows and columns: what ranks tell each other of it, and what comes of that."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgc_horovod.arithmetic import Adam, Options
from dgc_horovod.config import DGCConfig
from dgc_horovod.core.adam import SecondMoments
from dgc_horovod.core.bucketing import TensorSpec
from dgc_horovod.core.second_moment import FLOOR, GAIN, INTERVAL, Moment, matrix_of
from dgc_horovod.errors import CheckpointError
from dgc_horovod.exchange.hierarchical import Topology
from dgc_horovod.kernels.contract import ErrorFeedback, SharedMoment
from dgc_horovod.stats import Traffic
from tests.helpers.data import BACKENDS, DATA, as_array, as_numpy
from tests.helpers.engines import make_exchange

SHAPES = {
    "linear": (40, 50),
    "conv": (12, 3, 3, 3),
    "kernel of Keras": (3, 3, 24, 48),
    "vector": (1500,),
    "one": (1, 1),
}
B2, EPS = 0.9, 1e-8


def gradients(ranks, step=0):
    """Of every rank and tensor, with much in common; rows of very different size."""
    common = np.random.default_rng([step, 99])
    found = [{} for _ in range(ranks)]
    for name, shape in SHAPES.items():
        a, b = matrix_of(shape)
        shared = common.standard_normal(a * b)
        for rank, of_rank in enumerate(found):
            own = np.random.default_rng([step, rank, len(name)]).standard_normal(a * b)
            whole = (own + shared) * np.repeat(10.0 ** (np.arange(a) % 4 - 2), b)
            of_rank[name] = whole[: int(np.prod(shape))].astype(np.float32)
    return found


def step_of(every, of_ranks, kernels, step=0, scale=1.0, in_join=0, b2=B2):
    """One step of all ranks' `SecondMoments`, as an exchange makes it."""
    messages = []
    for second, of_rank in zip(every, of_ranks, strict=True):
        second.step, second.scale = step, scale
        for name, gradient in of_rank.items():
            second.measure(name, as_array(kernels, gradient), second.feed(name, b2, EPS, 1.0))
        messages.append(second.message())
    for second in every:
        second.receive(sum(messages))
        second.close(True, in_join)


def made(ranks=1, averages=True, kernels=BACKENDS[0], node_size=1, offset=0):
    """Of every rank, whose engines have the tensors from index `offset` on."""
    bucket = SimpleNamespace(segments=[SimpleNamespace(offset=offset)])
    engine = SimpleNamespace(kernels=kernels, bucket=bucket)
    place = dict.fromkeys(SHAPES, (engine, 0))
    places = [Topology(rank, ranks, node_size) for rank in range(ranks)]
    return [SecondMoments(SHAPES, 5, place, each, averages, Traffic()) for each in places]


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [((40, 50), (40, 50)), ((64, 3, 7, 7), (64, 147)), ((3, 3, 64, 128), (576, 128)), ((1000, 4), (250, 16)),
     ((1500,), (1, 1500)), ((1, 1), (1, 1)), ((5,), (1, 5)), ((50_000, 768), (50_000, 768)), ((7, 9), (4, 18))],
)  # fmt: skip
def test_a_tensor_as_a_matrix(shape, matrix):
    assert matrix_of(shape) == matrix


def test_rows_and_columns_are_means_of_squares(kernels):
    """Of what every rank has, by the definition; all ranks know the same bits."""
    every, of_ranks = made(3, kernels=kernels), gradients(3)
    step_of(every, of_ranks, kernels, scale=0.5)
    assert len({second.packed().tobytes() for second in every}) == 1
    for name, shape in SHAPES.items():
        moment, (a, b) = every[0][name], matrix_of(shape)
        whole = np.full((3, a * b), np.nan)
        whole[:, : int(np.prod(shape))] = [0.5 * of_rank[name] for of_rank in of_ranks]
        square = np.mean(whole**2, axis=0).reshape(a, b)
        np.testing.assert_allclose(moment.rows, np.nanmean(square, axis=1), rtol=1e-4)
        np.testing.assert_allclose(moment.columns, np.nanmean(square, axis=0), rtol=1e-4)


def test_the_level_is_that_of_the_mean_gradient():
    """Ranks that have half of their squares in common: over many steps, and neither more nor 1/N."""
    every = made(4)
    shared = []
    for step in range(200):
        of_ranks = gradients(4, step)
        step_of(every, of_ranks, BACKENDS[0], step, b2=0.99)
        shared.append(np.mean(np.mean([of_rank["linear"] for of_rank in of_ranks], axis=0) ** 2))
    assert float(every[0]["linear"].square().mean()) == pytest.approx(np.mean(shared), rel=0.3)
    own = np.mean([of_rank["linear"] ** 2 for of_rank in of_ranks])
    assert 0.5 < np.mean(shared) / own < 0.75, "5/8 of it"


def test_what_enters_is_adams_direction_without_momentum():
    """Where squares are of rank one, rows and columns are all there is to know."""
    rng = np.random.default_rng(0)
    rows, columns = np.exp(rng.standard_normal(40)), np.exp(rng.standard_normal(50))
    square = np.outer(rows, columns)
    (second,) = made()
    second["linear"].take(square.ravel(), 30, B2)
    g = rng.standard_normal((40, 50)).astype(np.float32)
    for kernels in BACKENDS:
        (other,) = made(kernels=kernels)
        other.load(second.saved())
        feed = other.feed("linear", B2, EPS, 1.0)
        found = g * as_numpy(kernels, feed.rows)[:, None] * as_numpy(kernels, feed.columns)
        floor = np.maximum(rows / rows.mean(), FLOOR)[:, None] * np.maximum(columns / columns.mean(), FLOOR)
        np.testing.assert_allclose(found, GAIN * g / np.sqrt(square.mean() * floor), rtol=1e-5)
    np.testing.assert_allclose(second["linear"].square().reshape(40, 50), square, rtol=1e-5)
    assert (second["linear"].steps, second["linear"].known) == (30, True)


@given(st.integers(1, 40), st.integers(16, 40), st.integers(1, 9000))
@settings(deadline=None)
def test_what_stock_adam_knows_is_known_again(a, b, steps):
    moment = Moment((a, b), 3, True)
    square = np.random.default_rng(a).random(a * b) + 0.1
    moment.take(square, steps, 0.99)
    before = moment.values.copy()
    moment.take(moment.square().astype(float), steps, 0.99)
    np.testing.assert_allclose(moment.values, before, rtol=1e-5)


def test_sums_are_of_so_many_directions():
    for averages, square, factor in ((True, 1.0, GAIN), (False, 16.0, GAIN / 4)):  # a quarter of the sum's
        second = made(4, averages)[0]
        second["linear"].take(np.full(2000, square), 30, B2)
        rows, columns = second["linear"].factors(EPS)
        assert rows[0] * columns[0] == pytest.approx(factor)
        assert float(second["linear"].square().mean()) == pytest.approx(square)


def test_all_are_measured_at_the_first_step_and_then_in_turn():
    every, sizes = made(2), []
    assert not every[0].known
    for step in range(2 * INTERVAL):
        of_ranks = gradients(2, step)
        every[0].step = every[1].step = step
        assert every[0].due == every[1].due
        sizes.append(len(every[0].due))
        step_of(every, of_ranks, BACKENDS[0], step)
    assert sizes[0] == len(SHAPES) and sum(sizes[1 : 1 + INTERVAL]) == len(SHAPES) and max(sizes[1:]) == 2
    assert {second[name].steps for second in every for name in SHAPES} == {2 * INTERVAL}


def test_what_is_not_finite_or_of_nobody_is_not_learnt():
    every = made(2)
    step_of(every, gradients(2), BACKENDS[0])
    before = every[0].packed()
    of_ranks = gradients(2, 1)
    of_ranks[0]["linear"][7] = np.nan
    step_of(every, of_ranks, BACKENDS[0])
    after = every[0]
    (size,) = {second["linear"].values.size for second in every}
    assert (after.packed()[3:size] == before[3:size]).all() and np.isfinite(after.packed()).all()
    step_of(every, gradients(2, 2), BACKENDS[0], in_join=2)
    assert np.isfinite(every[0].packed()).all()


def test_slices_of_a_node_add_up():
    """Two workers that keep halves of a tensor tell what one would that keeps all of it."""
    at, gradient = 777, gradients(1)[0]["linear"]
    (whole,), first, other = made(1), made(2, node_size=2)[0], made(2, node_size=2, offset=at)[1]
    for second, part in ((whole, gradient), (first, gradient[:at]), (other, gradient[at:])):
        second.scale = 2.0
        second.measure("linear", part, second.feed("linear", B2, EPS, 1.0))
    messages = [second.message() for second in (whole, first, other)]
    np.testing.assert_allclose(messages[1] + messages[2], messages[0], rtol=1e-4, atol=1e-4)


def test_nothing_is_known_at_first_and_nothing_enters():
    (second,) = made()
    feed = second.feed("linear", B2, EPS, 1.0)
    assert isinstance(feed, SharedMoment) and not isinstance(feed, ErrorFeedback)
    assert not feed.rows.any() and not feed.columns.any() and second.saved() == {}


def test_what_is_kept_is_loaded_cleared_and_rescaled():
    (second,) = made()
    step_of([second], gradients(1), BACKENDS[0])
    saved, (other,) = second.saved(), made()
    other.load(saved)
    assert other.packed().tobytes() == second.packed().tobytes()
    (third,) = made()
    third.unpack(second.packed())
    assert third.packed().tobytes() == second.packed().tobytes()
    rows = second["linear"].factors(EPS)[0]
    second.rescale(3.0)
    np.testing.assert_allclose(second["linear"].factors(EPS)[0], rows / 3, rtol=1e-6)
    assert second["linear"].steps == 1
    second.forget("linear")
    assert not second["linear"].known and second["conv"].known
    second.clear()
    assert not second.known
    with pytest.raises(CheckpointError, match="second moment of 'conv' has 5 numbers in the checkpoint"):
        second.check_fits({"conv": np.ones(5)})
    second.load({"of another model": np.ones(5)})
    assert not second.known


def test_a_gradient_keeps_the_rate_that_it_came_with_while_the_rate_rises(kernels):
    """What is applied, and what the residual still owes at the last rate, is what each step's own rate gives."""
    spec = TensorSpec("w", (40, 50))
    config = DGCConfig(density=0.02, min_numel=1, values="fp32")
    exchange = make_exchange([spec], config, kernels)
    arithmetic, (engine,) = Adam(), exchange.engines
    applied, owed = np.zeros(spec.numel), np.zeros(spec.numel)
    for step, rate in enumerate([0.0, 0.1, 0.2, 0.2, 0.5, 1.0, 1.0]):
        g = DATA["normal"](spec.numel, step)
        exchange.begin()
        options = Options(b2=B2, eps=EPS, rate=rate)
        exchange.accumulations = {"w": arithmetic.accumulation(options, exchange, "w")}
        before = as_numpy(kernels, engine.state.v).astype(np.float64)
        exchange.add_gradient(engine, 0, as_array(kernels, g))
        message = exchange.compress(engine)
        exchange.receive(engine, message.payload)
        sent = np.zeros(spec.numel)
        for positions, values in engine.exchange.contributions:
            sent[positions] += values
        owed += rate * (as_numpy(kernels, engine.state.v) + sent - before)
        applied += rate * sent
        exchange.second.receive(exchange.second.message())
        exchange.end(True)
    left = rate * as_numpy(kernels, engine.state.v).astype(np.float64)
    assert np.abs(owed).max() > 1 and np.allclose(applied + left, owed, atol=1e-4)


def test_moments_that_were_saved_without_a_rate_load():
    """Those of earlier versions: the residual does not fade at the next step, whatever its rate."""
    first, second = made(2)
    first["linear"].take(np.ones(2000), 30, B2)

    def fading(second, rate):
        return second["linear"].begin(B2, EPS, rate)

    assert fading(first, 0.5) == 1 and fading(first, 1.0) == 0.5 and fading(first, 0.5) == 1
    saved = first.saved()
    second.load({name: np.delete(values, 3) for name, values in saved.items()})
    assert fading(second, 2.0) == 1 and second["linear"].steps == 30
    second.load(saved)
    assert fading(second, 2.0) == 0.25 and fading(second, 0.0) == 1
    assert fading(second, 1.0) < 1e-300, "what comes at a rate of 0 has no effect in stock Adam either"
    with pytest.raises(CheckpointError, match="of another model"):
        second.check_fits({"linear": np.zeros(7)})
