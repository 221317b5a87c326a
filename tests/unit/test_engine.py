"""The engine's invariants: conservation, masking, rollback, the hand-computed table; every rule on every backend.

Several ranks are several engines here, and what they exchange is handed over in memory: this tests the
arithmetic. The same table runs on real Horovod ranks in tests/parallel.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgc_horovod import DGCConfig
from dgc_horovod.config import MOMENTUM_DTYPES
from dgc_horovod.core.bucketing import TensorSpec, plan
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.errors import CorruptPacket, RankMismatch
from dgc_horovod.exchange.in_process import carry
from dgc_horovod.kernels.contract import AdamCorrection, ErrorFeedback, MomentumCorrection
from dgc_horovod.rules import RULES
from dgc_horovod.wire.bucket import Bucket, Segment
from tests.helpers import hand_table
from tests.helpers.data import BACKENDS, DATA, as_array, as_numpy

FEEDS = {"residual": ErrorFeedback(), "momentum": MomentumCorrection(0.9), "nesterov": MomentumCorrection(0.9, True)}


def make_config(rule="exact", **fields):
    extra = {"threshold": 0.5, "max_density": fields.get("density", 0.1)} if rule == "threshold" else {}
    common = {"density": 0.1, "min_numel": 1, "compress_1d": True, "values": "fp32"}
    return DGCConfig(**{"rule": rule, **common, **extra, **fields})


def make_bucket(*sizes):
    (bucket,) = plan([TensorSpec(f"p{i}", (n,)) for i, n in enumerate(sizes)], make_config()).buckets
    return bucket


def make_engines(config, kernels, workers, *sizes):
    return [BucketEngine(make_bucket(*sizes), config, kernels, rank, workers) for rank in range(workers)]


def split(kernels, engine, g):
    return [as_array(kernels, g[s.start : s.start + s.numel]) for s in engine.bucket.segments]


def add_gradient(engine, g, accumulation):
    for i, part in enumerate(split(engine.kernels, engine, g)):
        engine.add_gradient(i, part, accumulation)


def update_of(engine, scale=1.0):
    """The update of the whole bucket, put together in poisoned memory."""
    kernels = engine.kernels
    outputs = [as_array(kernels, np.full(s.numel, np.nan, np.float32)) for s in engine.bucket.segments]
    for i, target in enumerate(outputs):
        engine.outputs.put(i, target)
    finite = engine.aggregate_into(scale)
    update = np.concatenate([as_numpy(kernels, target) for target in outputs])
    assert finite == np.isfinite(update).all()
    return update


def exchange(engines, gradients, accumulation, step, density):
    """One step of all ranks; returns what each sent, and whether all gradients were finite."""
    messages = []
    for engine, g in zip(engines, gradients, strict=True):
        add_gradient(engine, g, accumulation)
        messages.append(engine.compress(1.0, step, density))
    payloads = [message.payload for message in messages]
    for engine, received in zip(engines, carry(messages[0].round, payloads), strict=True):
        assert engine.receive(received.copy()) is None
    finite = {engine.outcome.finite for engine in engines}
    assert len(finite) == 1
    return messages, finite.pop()


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda k: k.name)
@pytest.mark.parametrize("rule", sorted(RULES))
@settings(max_examples=12, deadline=None)
@given(
    accumulation=st.sampled_from(sorted(FEEDS)),
    kind=st.sampled_from(sorted(DATA)),
    sizes=st.lists(st.sampled_from([1, 2, 63, 100, 4097]), min_size=1, max_size=3),
    density=st.sampled_from([0.001, 0.05, 0.6, 1.0]),
    scope=st.sampled_from(["bucket", "tensor"]),
    workers=st.sampled_from([1, 2, 3, 8]),
    dtype=st.sampled_from(MOMENTUM_DTYPES),
    seed=st.integers(0, 1000),
)
def test_conservation_and_equal_replicas(
    rule, backend, accumulation, kind, sizes, density, scope, workers, dtype, seed
):
    """v_old + accumulated == sent + v_new, bit for bit in fp32, at every one of 12 steps."""
    config = make_config(rule, density=density, scope=scope, momentum_dtype=dtype)
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
            if dtype == "bf16":
                u[:] = torch.from_numpy(u).bfloat16().float().numpy()
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


def reference_accumulate(u, v, g, accumulation):
    """The equations of docs/algorithm.md, written out once more."""
    if isinstance(accumulation, ErrorFeedback):
        v += g
        return
    m = np.float32(accumulation.momentum)
    u *= m
    u += g
    v += g + 0 if accumulation.nesterov else u
    if accumulation.nesterov:
        v += m * u


@pytest.mark.parametrize("values", ["fp16", "bf16"])
@pytest.mark.parametrize("kernels", BACKENDS, ids=lambda k: k.name)
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


@pytest.mark.parametrize("kernels", BACKENDS, ids=lambda k: k.name)
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


@pytest.mark.parametrize("kernels", BACKENDS, ids=lambda k: k.name)
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


def test_adam_direction_is_torchs():
    torch = pytest.importorskip("torch")
    w = torch.nn.Parameter(torch.zeros(50))
    adam = torch.optim.Adam([w], lr=1.0, betas=(0.8, 0.99), eps=1e-6)
    (engine,) = make_engines(make_config(density=1.0), BACKENDS[1], 1, 50)
    for step in range(5):
        g = DATA["normal"](50, step)
        before = w.detach().clone()
        w.grad = torch.from_numpy(g)
        adam.step()
        exchange([engine], [g], AdamCorrection((0.8, 0.99), 1e-6, step + 1), step, 1.0)
        np.testing.assert_allclose(update_of(engine), (before - w.detach()).numpy(), rtol=2e-5, atol=1e-6)


def test_scale_and_random_source():
    g = DATA["normal"](100, 0)
    drawn = []
    for kernels in BACKENDS:
        (engine,) = make_engines(make_config("random"), kernels, 1, 100)
        gradient = as_array(kernels, g)
        engine.add_gradient(0, gradient, ErrorFeedback())
        assert engine.compress(0.25, 0, 0.1).count == 10
        assert (as_numpy(kernels, gradient) == g).all(), "the gradient was written to"
        drawn.append(engine._sent.elements.positions.tolist())
        engine.rollback()
        assert (as_numpy(kernels, engine.state.v) == g * np.float32(0.25)).all()
    assert all(one == drawn[0] for one in drawn), "the draw depends on the backend"


def compressed(engine, g, step, density):
    add_gradient(engine, g, ErrorFeedback())
    return engine.compress(1.0, step, density)


def test_messages_that_do_not_fit_change_nothing():
    engines = make_engines(make_config(), BACKENDS[0], 2, 100)
    g = DATA["normal"](100, 0)
    a, b = (compressed(engine, g, step, 0.1).payload.copy() for step, engine in enumerate(engines))
    with pytest.raises(RankMismatch, match="rank 1 sent a packet with step 1, here it is 0"):
        engines[0].receive(np.concatenate([a, b]))
    with pytest.raises(RankMismatch, match="different densities"):
        engines[0].receive(a)
    b[50] ^= 1
    with pytest.raises(CorruptPacket, match="packet of rank 1 is damaged"):
        engines[0].receive(np.concatenate([a, b]))
    densified = make_engines(make_config(density=0.5), BACKENDS[0], 4, 100)
    with pytest.raises(RankMismatch, match="values came back"):
        compressed(densified[0], g, 0, 0.5)
        densified[0].receive(np.zeros(102, np.float32))
    for steps in ((3, 3, 4, 3), (4, 5, 5, 6)):  # in the second the sum alone would look right to the middle ranks
        messages = [compressed(engine, g, step, 0.5) for engine, step in zip(densified, steps, strict=True)]
        summed = sum(message.payload for message in messages)
        for engine in densified:
            with pytest.raises(RankMismatch, match="different steps"):
                engine.receive(summed)


@pytest.mark.parametrize("kernels", BACKENDS, ids=lambda k: k.name)
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


@pytest.mark.parametrize("kernels", BACKENDS, ids=lambda k: k.name)
def test_what_is_committed_is_not_taken_back(kernels):
    (engine,) = make_engines(make_config(), kernels, 1, 300)
    add_gradient(engine, DATA["normal"](300, 0), MomentumCorrection(0.9))
    engine.compress(1.0, 0, 0.1)
    engine.commit()
    before = as_numpy(kernels, engine.state.v).copy()
    engine.rollback()
    np.testing.assert_array_equal(as_numpy(kernels, engine.state.v), before)


@pytest.mark.parametrize("kernels", BACKENDS, ids=lambda k: k.name)
@pytest.mark.parametrize(
    "accumulation", [ErrorFeedback(), MomentumCorrection(0.9), AdamCorrection((0.9, 0.999), 1e-8, 1)], ids=str
)
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
    states = [first.state.v, first.state.u, *(first.state.moments or ())]
    expected = [None if x is None else as_numpy(kernels, x)[old].copy() for x in states]
    second.state.move_in(names[1].index("p0"), first.state, names[0].index("p1"))
    moved = [second.state.v, second.state.u, *(second.state.moments or ())]
    for x, was, left in zip(moved, expected, states, strict=True):
        assert (x is None) == (was is None)
        if x is not None:
            np.testing.assert_array_equal(as_numpy(kernels, x)[here], was)
            assert not as_numpy(kernels, left)[old].any()


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda k: k.name)
@pytest.mark.parametrize("density", [0.01, 0.3], ids=["packets", "several groups of packets or a vector"])
def test_in_place_gives_the_same_bits(backend, density):
    """Gradients offered in place in some steps and apart in others: as with engines that never do it."""
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
                in_place = (step + i) % 3 > 0
                engine.add_gradient(i, part, MomentumCorrection(0.9), in_place)
                if not in_place:
                    engine.outputs.put(i, part)
            messages.append(engine.compress(1.0, step, density))
        payloads = [message.payload for message in messages]
        assert [p.tobytes() for p in payloads] == [m.payload.tobytes() for m in expected_messages]
        combined = carry(messages[0].round, payloads)[0]
        for engine, other, own in zip(ours, plain, parts, strict=True):
            assert engine.receive(combined.copy()) is None and engine.outcome.finite and engine.aggregate_into(0.2)
            found = np.concatenate([as_numpy(backend, part) for part in own])
            assert found.tobytes() == update_of(other, 0.2).tobytes()
