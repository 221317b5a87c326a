"""Owners of elements: who owns what, what fits into a slot, what an owner keeps, and what comes of it."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgc_horovod.config import DGCConfig
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.core.workspace import message_spec
from dgc_horovod.exchange import IMPLEMENTATIONS
from dgc_horovod.exchange.hierarchical import Topology
from dgc_horovod.exchange.sharded import CHUNK, ShardedExchange, Shards
from dgc_horovod.kernels.contract import ErrorFeedback
from dgc_horovod.wire.bucket import Bucket, Segment
from tests.helpers.data import BACKENDS, as_numpy
from tests.helpers.engines import make_engines
from tests.helpers.engines import stepped as engines_stepped

SHARDED = DGCConfig(density=0.01, exchange="sharded", values="fp32")


def engines_of(workers, numel, kernels=BACKENDS[0]):
    third = numel // 3
    return make_engines(SHARDED, kernels, workers, third, third, numel - 2 * third)


stepped = partial(engines_stepped, accumulation=ErrorFeedback(), density=0.01)


def drawn(engines, step):
    numel = engines[0].whole.numel
    return [np.random.default_rng([step, e.rank]).laplace(size=numel).astype(np.float32) for e in engines]


@given(st.integers(1, 200_000), st.integers(1, 40))
def test_every_element_has_one_owner(numel, workers):
    shards, positions = Shards(numel, workers), np.arange(numel, dtype=np.int32)
    owners, places = shards.dealt(positions)
    assert owners.min() >= 0 and owners.max() < workers and places.max() < shards.size
    for owner in range(workers):
        mine = owners == owner
        assert (np.diff(places[mine]) > 0).all()
        assert (shards.in_bucket(owner, places[mine]) == positions[mine]).all()
    # nobody has more than his share, and a chunk
    assert np.bincount(owners, minlength=workers).max() <= numel / workers + CHUNK
    assert shards.size <= numel / workers + CHUNK


def test_an_owner_sends_on_the_largest_sums_and_keeps_the_rest(kernels):
    """Two steps beside the equations, on the whole vector, in NumPy."""
    workers, numel = 4, 50_000
    engines = engines_of(workers, numel, kernels)
    assert engines[0].spec(0.01).exchange is ShardedExchange
    shards = Shards(numel, workers)
    owners, _ = shards.dealt(np.arange(numel, dtype=np.int32))
    residuals, remainder = [np.zeros(numel, np.float32) for _ in engines], np.zeros(numel, np.float32)
    for step in range(2):
        gradients = drawn(engines, step)
        update = stepped(engines, gradients, step=step)
        expected = np.zeros(numel, np.float32)
        for v, gradient in zip(residuals, gradients, strict=True):
            v += gradient
            chosen = np.sort(np.argsort(-np.abs(v), kind="stable")[:500])
            remainder[chosen] += v[chosen]
            v[chosen] = 0
        for owner in range(workers):
            mine = np.flatnonzero(owners == owner)
            sent = mine[np.argsort(-np.abs(remainder[mine]), kind="stable")[:125]]
            expected[sent], remainder[sent] = remainder[sent], 0
        assert np.count_nonzero(update) == 500
        np.testing.assert_array_equal(update, expected)
    for engine, v in zip(engines, residuals, strict=True):
        np.testing.assert_array_equal(as_numpy(kernels, engine.state.v), v)
    for owner, engine in enumerate(engines):
        places = shards.in_bucket(owner, np.arange(shards.size, dtype=np.int32))
        kept = as_numpy(kernels, engine.state.remainder)
        np.testing.assert_array_equal(kept[places < numel], remainder[places[places < numel]])


def test_what_does_not_fit_into_a_slot_stays_in_the_residual(kernels):
    engines = engines_of(4, 64_000, kernels)
    gradients = drawn(engines, 0)
    owners, _ = Shards(64_000, 4).dealt(np.arange(64_000, dtype=np.int32))
    for gradient in gradients:
        gradient[owners == 0] *= 1000  # whatever is selected is the first owner's
    before = sum(gradient.astype(np.float64) for gradient in gradients)
    update = stepped(engines, gradients, commits=False)
    assert all(100 < engine.sent.values.size < 300 for engine in engines), "a slot has no more room"
    owed = sum(engine.state.full_vector("v").astype(np.float64) for engine in engines)
    np.testing.assert_allclose(update + owed, before, rtol=0, atol=1e-3)
    # nothing that was left is larger than what was sent
    assert np.abs(as_numpy(kernels, engines[0].state.v)).max() <= np.abs(engines[0].sent.values).min()


@pytest.mark.parametrize("workers", [8, 64, 1024])
def test_bytes_do_not_grow_with_the_number_of_workers(workers):
    bucket = Bucket(0, (Segment("a", 0, 2**24),))
    config = DGCConfig(density=0.01, exchange="sharded")
    flat = message_spec(bucket, config.replace(exchange="flat"), 0.01, Topology(0, workers))
    sharded = message_spec(bucket, config, 0.01, Topology(0, workers))
    received = sum(collective.received(workers) for collective in sharded.rounds)
    assert 1.5 * flat.wire.nbytes < received < 2.5 * flat.wire.nbytes
    assert received < sum(collective.received(workers) for collective in flat.rounds)
    if workers == 8:
        assert received <= 2.1 * flat.wire.nbytes


def test_a_bucket_takes_what_brings_the_fewest_bytes():
    def kind(workers, density, numel=2**20, exchange="sharded"):
        bucket = Bucket(0, (Segment("a", 0, numel),))
        config = DGCConfig(density=density, exchange=exchange)
        return message_spec(bucket, config, density, Topology(0, workers)).exchange

    assert kind(2, 0.01) is IMPLEMENTATIONS["allgather"] and kind(3, 0.01) is IMPLEMENTATIONS["sharded"]
    assert kind(64, 0.01, exchange="flat") is IMPLEMENTATIONS["allgather"]
    assert kind(64, 0.25) is IMPLEMENTATIONS["sharded"] and kind(64, 1.0) is IMPLEMENTATIONS["densified"]
    assert kind(4, 0.01, numel=1000) is IMPLEMENTATIONS["allgather"], "heads weigh more than elements"


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_remainder_beyond_fp32_starts_again_and_the_step_is_skipped(kernels):
    engines = engines_of(4, 50_000, kernels)
    gradients = drawn(engines, 0)
    for gradient in gradients:
        gradient[7] = 3e38
    stepped(engines, gradients, commits=False)
    assert {(engine.outcome.finite, engine.outcome.overflowed) for engine in engines} == {(True, True)}
    for engine in engines:
        engine.rollback()
    assert [np.count_nonzero(as_numpy(kernels, engine.state.remainder)) for engine in engines] == [0] * 4
    for engine in engines:
        engine.clear()
    stepped(engines, drawn(engines, 1), step=1)
    assert {engine.outcome.finite for engine in engines} == {True}


def test_an_exchange_without_owners_takes_over_what_they_owe(kernels):
    """As when the density rises, or a checkpoint is loaded with other settings."""
    engines = engines_of(4, 50_000, kernels)
    stepped(engines, drawn(engines, 0))
    owed = [engine.state.full_vector("v") for engine in engines]
    zeros = [np.zeros(50_000, np.float32)] * 4
    update = stepped(engines, zeros, step=1, density=1.0)
    assert all(engine.state.remainder is None for engine in engines)
    np.testing.assert_allclose(update, np.sum(owed, axis=0, dtype=np.float64), rtol=1e-5, atol=1e-5)


def test_what_is_kept_is_read_written_and_faded_by_segment(kernels):
    ours, others = engines_of(3, 30_011, kernels), engines_of(3, 30_011, kernels)
    for step in range(3):
        stepped(ours, drawn(ours, step), step=step)
    for one, other in zip(ours, others, strict=True):
        for i in range(3):
            other.state.write(i, one.state.read(i))
    after = [stepped(engines, drawn(ours, 3), step=3) for engines in (ours, others)]
    np.testing.assert_array_equal(*after)
    one, flat = ours[1], BucketEngine(ours[1].whole, SHARDED.replace(exchange="flat"), kernels, 1, 3)
    for i in range(3):  # where nobody owns anything it is residual
        flat.state.write(i, one.state.read(i))
    np.testing.assert_array_equal(flat.state.full_vector("v"), one.state.full_vector("v"))
    whole, place = one.state.full_vector("v"), one.bucket.segments[1].place
    one.state.fade(1, 0.5)
    whole[place] *= 0.5
    np.testing.assert_allclose(one.state.full_vector("v"), whole, rtol=1e-6)
    one.state.write(1, {})
    whole[place] = 0
    np.testing.assert_allclose(one.state.full_vector("v"), whole, rtol=1e-6)
