"""The engine's invariants: conservation and masking, with every rule on every backend.

Several ranks are several engines here, and what they exchange is handed over in memory: this tests the arithmetic.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgc_horovod.config import RULES
from dgc_horovod.kernels.contract import ErrorFeedback, MomentumCorrection, SharedMoment
from tests.helpers.data import BACKENDS, DATA, EACH, as_array, as_numpy
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


def test_overflow_of_the_residual_is_flagged_and_leaves_nothing(kernels):
    """Finite gradients whose sum is not: no infinity stays in u or v, and training goes on from there."""
    (engine,) = make_engines(make_config(), kernels, 1, 50)
    huge, small = np.full(50, 3e38, np.float32), np.ones(50, np.float32)
    for step, (g, expected) in enumerate([(small, True), (huge, False), (small, True)]):
        _, finite = exchange([engine], [g], MomentumCorrection(0.9, True), step, 0.1)
        assert finite == expected
        assert np.isfinite(as_numpy(kernels, engine.state.v)).all()
    assert engine.state.u is not None and np.isfinite(as_numpy(kernels, engine.state.u)).all()


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
