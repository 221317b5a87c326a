"""The engine's invariants: conservation, masking, rollback, the hand-computed table; every rule on every backend.

Several ranks are several engines here, and what they exchange is handed over in memory: this tests the
arithmetic. The same table runs on real Horovod ranks in tests/parallel.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgc_horovod.config import RULES
from dgc_horovod.kernels.contract import ErrorFeedback, MomentumCorrection, SharedMoment
from tests.helpers import hand_table
from tests.helpers.data import BACKENDS, DATA, EACH, as_array, as_numpy, each_backend
from tests.helpers.engines import (
    exchange,
    make_config,
    make_engines,
    reference_accumulate,
    update_of,
)

FEEDS = {"residual": ErrorFeedback(), "momentum": MomentumCorrection(0.9), "nesterov": MomentumCorrection(0.9, True)}


@pytest.mark.parametrize("backend", EACH)
@pytest.mark.parametrize("rule", sorted(RULES))
@settings(max_examples=6)
@given(
    accumulation=st.sampled_from(sorted(FEEDS)),
    kind=st.sampled_from(sorted(DATA)),
    sizes=st.lists(st.sampled_from([1, 2, 63, 100, 4097]), min_size=1, max_size=3),
    density=st.sampled_from([0.001, 0.05, 0.6, 1.0]),
    workers=st.sampled_from([1, 2, 3, 8]),
    seed=st.integers(0, 1000),
)
def test_conservation_and_equal_replicas(rule, backend, accumulation, kind, sizes, density, workers, seed):
    """v_old + accumulated == sent + v_new, bit for bit in fp32, at every one of 12 steps."""
    config = make_config(rule, density=density)
    engines = make_engines(config, backend, workers, *sizes)
    numel = sum(sizes)
    shadow = [[np.zeros(numel, np.float32), np.zeros(numel, np.float32)] for _ in engines]
    for step in range(12):
        gradients = [DATA[kind](numel, 100 * seed + 10 * step + rank) for rank in range(workers)]
        messages, finite = exchange(engines, gradients, FEEDS[accumulation], step, density)
        assert finite
        total = np.zeros(numel, np.float32)
        for rank, engine in enumerate(engines):
            u, v = shadow[rank]
            reference_accumulate(u, v, gradients[rank], FEEDS[accumulation])
            kept = as_numpy(backend, engine.state.v)
            sent = v - kept
            touched = np.flatnonzero(sent)
            assert (v == sent + kept).all()
            assert (kept[touched] == 0).all(), "something was sent in part"
            assert touched.size == messages[rank].count
            if messages[rank].round.kind == "allgather":
                positions, values = engine.exchange.contributions[rank]
                assert (positions == touched).all() and (values == sent[touched]).all(), "received is not what was sent"
            v[:] = kept
            u[touched] = 0
            if engine.state.u is not None:
                assert (as_numpy(backend, engine.state.u) == u).all(), "masking"
            total = total + sent * np.float32(1 / workers)
        updates = [update_of(engine, 1 / workers) for engine in engines]
        assert all((update == updates[0]).all() for update in updates)
        largest = max(float(np.abs(g).max()) for g in gradients) * 20  # terms may cancel
        np.testing.assert_allclose(updates[0], total, rtol=3e-6, atol=3e-7 * largest + 1e-42)


@pytest.mark.parametrize("values", ["fp16", "bf16"])
@each_backend
def test_quantisation_error_stays_in_the_residual(kernels, values):
    (engine,) = make_engines(make_config(values=values), kernels, 1, 1000)
    rng = np.random.default_rng(0)
    owed = np.zeros(1000, np.float64)
    arrived = np.zeros(1000, np.float64)
    for step in range(50):
        g = (rng.standard_normal(1000) * 1e3).astype(np.float32)
        exchange([engine], [g], ErrorFeedback(), step, 0.1)
        owed += g
        arrived += update_of(engine)
    left = as_numpy(kernels, engine.state.v)
    sent_exactly = np.count_nonzero(left == 0)
    assert sent_exactly < 500, "nothing was rounded: fp32 went out as " + values
    np.testing.assert_allclose(arrived + left, owed, rtol=1e-5, atol=1e-2)


@each_backend
def test_overflow_of_the_residual_is_flagged_and_leaves_nothing(kernels):
    """Finite gradients whose sum is not: no infinity stays in u or v, and training goes on from there."""
    (engine,) = make_engines(make_config(), kernels, 1, 50)
    huge, small = np.full(50, 3e38, np.float32), np.ones(50, np.float32)
    for step, (g, expected) in enumerate([(small, True), (huge, False), (small, True)]):
        _, finite = exchange([engine], [g], MomentumCorrection(0.9, True), step, 0.1)
        assert finite == expected
        assert np.isfinite(as_numpy(kernels, engine.state.v)).all()
    assert engine.state.u is not None and np.isfinite(as_numpy(kernels, engine.state.u)).all()


def test_what_rounds_to_zero_is_not_sent():
    """fp16 drops 1e-9: it stays in v, its momentum is not masked, and it does not count as selected."""
    (engine,) = make_engines(make_config(values="fp16", density=1.0), BACKENDS[0], 1, 3)
    messages, _ = exchange([engine], [np.array([1e-9, 0.5, -1e-9], np.float32)], MomentumCorrection(0.9), 0, 1.0)
    assert messages[0].count == 1
    assert engine.state.u.tolist() == [np.float32(1e-9), 0, np.float32(-1e-9)] == engine.state.v.tolist()


def test_fp16_overflow_is_sent_later(kernels=BACKENDS[0]):
    (engine,) = make_engines(make_config(values="fp16", density=1.0), kernels, 1, 4)
    g = np.array([1e5, 0, 0, 0], np.float32)
    exchange([engine], [g], ErrorFeedback(), 0, 1.0)
    assert update_of(engine)[0] == 65504 and engine.state.v[0] == np.float32(1e5) - np.float32(65504)


@pytest.mark.parametrize("kernels", BACKENDS, ids=lambda k: k.name)
@pytest.mark.parametrize(
    ("gradients", "table", "nesterov"),
    [
        (hand_table.GRADIENTS, hand_table.MOMENTUM_TABLE, False),
        (hand_table.GRADIENTS, hand_table.NESTEROV_TABLE, True),
        (hand_table.GRADIENTS_WITH_NAN, hand_table.NAN_TABLE, False),
    ],
    ids=["momentum", "nesterov", "nan"],
)
def test_hand_computed_table(kernels, gradients, table, nesterov):
    engines = make_engines(make_config(), kernels, 2, 6)
    accumulation = MomentumCorrection(hand_table.MOMENTUM, nesterov)
    for step, row in enumerate(table):
        arrays = [np.array(g, np.float32) for g in gradients[step]]
        _, finite = exchange(engines, arrays, accumulation, step, hand_table.DENSITY)
        assert finite == (row["mean"] is not None)
        for rank, engine in enumerate(engines):
            packet_sent = dict(zip(*(x.tolist() for x in engine.exchange.contributions[rank]), strict=True))
            assert packet_sent == row["sent"][rank]
            if finite:
                assert update_of(engine, 0.5).tolist() == row["mean"]
            else:
                engine.rollback()
            assert as_numpy(kernels, engine.state.v).tolist() == row["v"][rank]
            assert as_numpy(kernels, engine.state.u).tolist() == row["u"][rank]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("workers", [2, 8])
def test_nothing_that_is_not_finite_enters(bad, workers):
    """On the bad rank such elements enter as 0; all ranks see the flag, by packet or by scattered sum."""
    density = 0.5 if workers == 8 else 0.1
    engines = make_engines(make_config(density=density), BACKENDS[0], workers, 40)
    g = [DATA["normal"](40, rank) for rank in range(workers)]
    messages, finite = exchange(engines, g, MomentumCorrection(0.9), 0, density)
    assert finite and (messages[0].round.kind == "allreduce") == (workers == 8)
    before = [(e.state.u.copy(), e.state.v.copy()) for e in engines]
    g[1][3] = bad
    _, finite = exchange(engines, g, MomentumCorrection(0.9), 1, density)
    assert not finite
    for rank, engine in enumerate(engines):
        engine.rollback()
        u, v = before[rank]
        reference_accumulate(u, v, np.where(np.isfinite(g[rank]), g[rank], np.float32(0)), MomentumCorrection(0.9))
        assert (engine.state.u == u).all() and (engine.state.v == v).all()


def test_momentum_that_starts_later():
    """With momentum 0 no u is kept; when a schedule raises it, u starts from there as torch's buffer does."""
    (engine,) = make_engines(make_config(density=1.0, factor_masking=False), BACKENDS[0], 1, 8)
    g = DATA["normal"](8, 0)
    exchange([engine], [g], MomentumCorrection(0.0), 0, 1.0)
    assert engine.state.u is None
    for step, expected in ((1, g), (2, g + np.float32(0.5) * g)):
        exchange([engine], [g], MomentumCorrection(0.5), step, 1.0)
        assert (update_of(engine) == expected).all()
    exchange([engine], [g], MomentumCorrection(0.0), 3, 1.0)
    assert (update_of(engine) == g).all()
    u = engine.state.u.copy()
    exchange([engine], [g], MomentumCorrection(0.5), 4, 1.0)
    assert (update_of(engine) == g + np.float32(0.5) * u).all(), "at momentum 0 torch leaves its buffer alone"


def test_a_direction_by_a_shared_second_moment():
    """``g * rows * columns`` within the bound, whatever the scale is made of."""
    g, rows, columns = DATA["normal"](60, 0), np.float32([1, 2, 0.5]), np.arange(20, dtype=np.float32)
    expected = np.clip(g.reshape(3, 20) * rows[:, None] * columns, -9, 9).reshape(-1)
    for kernels in BACKENDS:
        (engine,) = make_engines(make_config(density=1.0), kernels, 1, 60)
        feed = SharedMoment(kernels.from_host(rows), kernels.from_host(columns), 9.0)
        exchange([engine], [g], feed, 0, 1.0)
        np.testing.assert_allclose(update_of(engine), expected, rtol=1e-6)
        assert (np.abs(expected) == 9).any()


def test_scale_and_random_source():
    g = DATA["normal"](4096, 0)
    drawn = []
    for kernels in BACKENDS:
        (engine,) = make_engines(make_config("sampled"), kernels, 1, 4096)  # large enough that it does take a sample
        gradient = as_array(kernels, g)
        engine.add_gradient(0, gradient, ErrorFeedback())
        assert 328 <= engine.compress(0.25, 0, 0.1).count <= 410
        assert (as_numpy(kernels, gradient) == g).all(), "the gradient was written to"
        drawn.append(engine._sent.elements.positions.tolist())
        engine.rollback()
        assert (as_numpy(kernels, engine.state.v) == g * np.float32(0.25)).all()
    assert all(one == drawn[0] for one in drawn), "the draw depends on the backend"
