"""A bucket's engine in the life of a job: what it undoes, refuses, moves to another bucket, and where updates go."""

from __future__ import annotations

import numpy as np
import pytest

from dgc_horovod.config import RULES
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.errors import CorruptPacket, RankMismatch
from dgc_horovod.exchange.contract import carry
from dgc_horovod.kernels.contract import ErrorFeedback, MomentumCorrection
from dgc_horovod.wire.bucket import Bucket, Segment
from tests.helpers.data import BACKENDS, DATA, EACH, as_numpy, each_backend
from tests.helpers.engines import (
    add_gradient,
    compressed,
    exchange,
    make_bucket,
    make_config,
    make_engines,
    reference_accumulate,
    split,
    update_of,
)


@each_backend
def test_restore_is_bit_exact(kernels):
    (engine,) = make_engines(make_config(values="bf16"), kernels, 1, 500, 300)
    (twin,) = make_engines(make_config(values="bf16"), kernels, 1, 500, 300)
    for step in range(5):
        g = DATA["log-normal scaled"](800, step)
        exchange([engine], [g], MomentumCorrection(0.9), step, 0.1)
        if step < 4:
            exchange([twin], [g], MomentumCorrection(0.9), step, 0.1)
    engine.rollback()
    reference = [as_numpy(kernels, twin.state.u).copy(), as_numpy(kernels, twin.state.v).copy()]
    reference_accumulate(*reference, g, MomentumCorrection(0.9))
    assert (as_numpy(kernels, engine.state.u) == reference[0]).all()
    assert (as_numpy(kernels, engine.state.v) == reference[1]).all()


def test_messages_that_do_not_fit_change_nothing():
    engines = make_engines(make_config(), BACKENDS[0], 2, 100)
    g = DATA["normal"](100, 0)
    a, b = (compressed(engine, g, step, 0.1).payload.copy() for step, engine in enumerate(engines))
    with pytest.raises(RankMismatch, match="rank 1 sent a packet with step 1, expected 0"):
        engines[0].receive(np.concatenate([a, b]))
    with pytest.raises(RankMismatch, match="different densities"):
        engines[0].receive(a)
    b[50] ^= 1
    with pytest.raises(CorruptPacket, match="packet of rank 1 is damaged"):
        engines[0].receive(np.concatenate([a, b]))
    densified = make_engines(make_config(density=0.5), BACKENDS[0], 4, 100)
    with pytest.raises(RankMismatch, match="received 102 values, expected 103"):
        compressed(densified[0], g, 0, 0.5)
        densified[0].receive(np.zeros(102, np.float32))
    for steps in ((3, 3, 4, 3), (4, 5, 5, 6)):  # in the second the sum alone would look right to the middle ranks
        messages = [compressed(engine, g, step, 0.5) for engine, step in zip(densified, steps, strict=True)]
        summed = sum(message.payload for message in messages)
        for engine in densified:
            with pytest.raises(RankMismatch, match="different steps"):
                engine.receive(summed)


@each_backend
@pytest.mark.parametrize("rule", sorted(RULES))
def test_nothing_is_read_from_output_buffers(kernels, rule):
    """Poisoned outputs (0xFF in the packet, NaN in what is decoded) change nothing that comes out."""
    clean, poisoned = (
        make_engines(make_config(rule), kernels, 1, 300)[0],
        make_engines(make_config(rule), kernels, 1, 300)[0],
    )
    for step in range(3):
        g = DATA["normal"](300, step)
        outputs = []
        for engine in (clean, poisoned):
            if engine is poisoned and engine._workspace is not None:
                exchange_ = engine.exchange
                exchange_._packet.fill(0xFF)
                received = [e.values for e in exchange_._decoded]
                for memory in (exchange_._writer._values, engine._workspace.masked, *received):
                    memory.fill(np.nan)
            messages, _ = exchange([engine], [g], MomentumCorrection(0.9), step, 0.1)
            outputs.append((messages[0].payload.tobytes(), update_of(engine).tobytes()))
        assert outputs[0] == outputs[1]


def test_a_bucket_is_one_message_whatever_its_tensors():
    bucket = Bucket(0, (Segment("a", 0, 60), Segment("b", 60, 40)))
    engine = BucketEngine(bucket, make_config(), BACKENDS[0], 0, 2)
    sizes = set()
    for step in range(5):
        g = DATA["normal"](100, step)
        sizes.add(compressed(engine, g, step, 0.1).payload.size)
    assert sizes == {36 + 4 + 4 + 4 * 10}


@each_backend
@pytest.mark.parametrize("accumulation", [MomentumCorrection(0.9), MomentumCorrection(0.9, True)], ids=str)
def test_a_state_emptied_after_the_gradients_starts_from_zero(kernels, accumulation):
    """The library was given no momentum to write to: the process ended."""
    fresh, used = (make_engines(make_config(), kernels, 1, 300)[0] for _ in range(2))
    add_gradient(used, DATA["normal"](300, 0), accumulation)
    used.compress(1.0, 0, 0.1)
    add_gradient(used, DATA["normal"](300, 1), accumulation)
    used.clear()
    add_gradient(fresh, DATA["normal"](300, 1), accumulation)
    assert used.compress(1.0, 1, 0.1).payload.tobytes() == fresh.compress(1.0, 1, 0.1).payload.tobytes()
    for part in fresh.state.parts:
        np.testing.assert_array_equal(used.state.full_vector(part), fresh.state.full_vector(part))


@each_backend
def test_what_is_committed_is_not_taken_back(kernels):
    (engine,) = make_engines(make_config(), kernels, 1, 300)
    add_gradient(engine, DATA["normal"](300, 0), MomentumCorrection(0.9))
    engine.compress(1.0, 0, 0.1)
    engine.commit()
    before = as_numpy(kernels, engine.state.v).copy()
    engine.rollback()
    np.testing.assert_array_equal(as_numpy(kernels, engine.state.v), before)


@each_backend
@pytest.mark.parametrize("accumulation", [ErrorFeedback(), MomentumCorrection(0.9)], ids=str)
def test_a_segment_moves_with_all_that_is_kept_of_it(kernels, accumulation):
    config = make_config()
    first, second = (
        BucketEngine(make_bucket(30, 200), config, kernels, 0, 1),
        BucketEngine(make_bucket(200, 7), config, kernels, 0, 1),
    )
    add_gradient(first, DATA["normal"](230, 0), accumulation)
    first.compress(1.0, 0, 0.1)
    old = {s.name: slice(s.start, s.start + s.numel) for s in first.bucket.segments}["p1"]
    here = {s.name: slice(s.start, s.start + s.numel) for s in second.bucket.segments}["p0"]
    names = [s.name for s in first.bucket.segments], [s.name for s in second.bucket.segments]
    states = [first.state.v, first.state.u]
    expected = [None if x is None else as_numpy(kernels, x)[old].copy() for x in states]
    second.state.move_in(names[1].index("p0"), first.state, names[0].index("p1"))
    moved = [second.state.v, second.state.u]
    for x, was, left in zip(moved, expected, states, strict=True):
        assert (x is None) == (was is None)
        if x is not None:
            np.testing.assert_array_equal(as_numpy(kernels, x)[here], was)
            assert not as_numpy(kernels, left)[old].any()


@pytest.mark.parametrize("backend", EACH)
@pytest.mark.parametrize("density", [0.01, 0.3], ids=["packets", "several groups of packets or a vector"])
def test_updates_in_the_memory_of_gradients_are_the_same_bits(backend, density):
    config, sizes, workers = make_config(), (3000, 70, 1500), 5
    ours, plain = (make_engines(config, backend, workers, *sizes) for _ in range(2))
    rng = np.random.default_rng(3)
    for step in range(6):
        gradients = [rng.standard_normal(sum(sizes)).astype(np.float32) for _ in range(workers)]
        expected_messages, _ = exchange(plain, gradients, MomentumCorrection(0.9), step, density)
        parts = [split(backend, engine, g.copy()) for engine, g in zip(ours, gradients, strict=True)]
        messages = []
        for engine, own in zip(ours, parts, strict=True):
            for i, part in enumerate(own):
                engine.add_gradient(i, part, MomentumCorrection(0.9))
                engine.outputs.put(i, part)
            messages.append(engine.compress(1.0, step, density))
        payloads = [message.payload for message in messages]
        assert [p.tobytes() for p in payloads] == [m.payload.tobytes() for m in expected_messages]
        combined = carry(messages[0].round, payloads)[0]
        for engine, other, own in zip(ours, plain, parts, strict=True):
            assert engine.receive(combined.copy()) is None
            engine.aggregate_into(0.2)
            assert engine.settle() and engine.outcome.finite
            found = np.concatenate([as_numpy(backend, part) for part in own])
            assert found.tobytes() == update_of(other, 0.2).tobytes()
