"""A bucket's engine in the life of a job: what it undoes, refuses, moves to another bucket, and where updates go."""

from __future__ import annotations

import numpy as np
import pytest

from dgc_horovod.kernels.contract import ErrorFeedback, MomentumCorrection
from tests.helpers.data import BACKENDS, DATA, as_numpy
from tests.helpers.engines import (
    add_gradient,
    carry_all,
    compressed,
    exchange,
    make_config,
    make_engines,
    split,
    update_of,
)


def test_a_bucket_is_one_message_whatever_its_tensors():
    engine, _ = make_engines(make_config(), BACKENDS[0], 2, 60, 40)
    sizes = {compressed(engine, DATA["normal"](100, step), step, 0.1).payload.size for step in range(5)}
    assert sizes == {36 + 4 + 4 + 4 * 10}


@pytest.mark.parametrize("accumulation", [MomentumCorrection(0.9), MomentumCorrection(0.9, True)], ids=str)
def test_a_state_emptied_after_the_gradients_starts_from_zero(kernels, accumulation):
    """The library was given no momentum to write to: the process ended."""
    fresh, used = (make_engines(make_config(), kernels, 1, 300)[0] for _ in range(2))
    compressed(used, DATA["normal"](300, 0), 0, 0.1, accumulation)
    add_gradient(used, DATA["normal"](300, 1), accumulation)
    used.clear()
    expected = compressed(fresh, DATA["normal"](300, 1), 1, 0.1, accumulation)
    assert used.compress(1.0, 1, 0.1).payload.tobytes() == expected.payload.tobytes()
    for part in fresh.state.parts:
        np.testing.assert_array_equal(used.state.full_vector(part), fresh.state.full_vector(part))


def test_what_is_committed_is_not_taken_back(kernels):
    (engine,) = make_engines(make_config(), kernels, 1, 300)
    compressed(engine, DATA["normal"](300, 0), 0, 0.1, MomentumCorrection(0.9))
    engine.commit()
    before = as_numpy(kernels, engine.state.v).copy()
    engine.rollback()
    np.testing.assert_array_equal(as_numpy(kernels, engine.state.v), before)


@pytest.mark.parametrize("accumulation", [ErrorFeedback(), MomentumCorrection(0.9)], ids=str)
def test_a_segment_moves_with_all_that_is_kept_of_it(kernels, accumulation):
    (first,), (second,) = (make_engines(make_config(), kernels, 1, *sizes) for sizes in ((30, 200), (200, 7)))
    compressed(first, DATA["normal"](230, 0), 0, 0.1, accumulation)
    old, here = first.bucket.segments[0].place, second.bucket.segments[1].place  # the longest is the first of one
    expected = {part: first.state.full_vector(part)[old] for part in first.state.parts}
    second.state.move_in(1, first.state, 0)
    assert second.state.parts == list(expected)
    for part, was in expected.items():
        np.testing.assert_array_equal(second.state.full_vector(part)[here], was)
        assert not first.state.full_vector(part)[old].any()


@pytest.mark.parametrize("density", [0.01, 0.3], ids=["packets", "several groups of packets or a vector"])
def test_updates_in_the_memory_of_gradients_are_the_same_bits(kernels, density):
    config, sizes, workers = make_config(), (3000, 70, 1500), 5
    ours, plain = (make_engines(config, kernels, workers, *sizes) for _ in range(2))
    rng = np.random.default_rng(3)
    for step in range(6):
        gradients = [rng.standard_normal(sum(sizes)).astype(np.float32) for _ in range(workers)]
        expected_messages, _ = exchange(plain, gradients, MomentumCorrection(0.9), step, density)
        parts = [split(kernels, engine, g.copy()) for engine, g in zip(ours, gradients, strict=True)]
        messages = []
        for engine, own in zip(ours, parts, strict=True):
            for i, part in enumerate(own):
                engine.add_gradient(i, part, MomentumCorrection(0.9))
                engine.outputs.put(i, part)
            messages.append(engine.compress(1.0, step, density))
        payloads = [message.payload for message in messages]
        assert [p.tobytes() for p in payloads] == [m.payload.tobytes() for m in expected_messages]
        carry_all(ours, payloads)
        for engine, other, own in zip(ours, plain, parts, strict=True):
            engine.aggregate_into(0.2)
            assert engine.settle() and engine.outcome.finite
            found = np.concatenate([as_numpy(kernels, part) for part in own])
            assert found.tobytes() == update_of(other, 0.2).tobytes()
