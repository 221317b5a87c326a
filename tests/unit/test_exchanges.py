"""The promises of every exchange, with every codec and backend: a new one joins by its line in `IMPLEMENTATIONS`.

conservation: what is applied and what every rank keeps is what was accumulated; replicas have the same bits; a step
that is rolled back leaves no trace; flags and steps travel in every round; sizes depend on nothing but the form.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgc_horovod import DGCConfig
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.errors import CorruptPacket, DGCError, RankMismatch
from dgc_horovod.exchange import IMPLEMENTATIONS
from dgc_horovod.exchange.contract import INSIDE
from dgc_horovod.kernels.contract import MomentumCorrection
from dgc_horovod.wire.bucket import Bucket, Segment
from dgc_horovod.wire.codecs import VALUE_CODECS
from dgc_horovod.wire.packet import FLAG_JOINED
from tests.helpers.data import BACKENDS, as_numpy
from tests.helpers.engines import carried, compressed, reference_accumulate, stepped

WORKERS, NUMEL, DENSITY, MOMENTUM = 3, 700, 0.05, MomentumCorrection(0.9)
# name of an exchange, workers of a node: with nodes of two, that of the nodes among each other
CASES = [(name, node_size) for name in sorted(IMPLEMENTATIONS) for node_size in (1, 2)]
each_exchange = pytest.mark.parametrize(
    "name", CASES, ids=[f"{name}, nodes of {size}" if size > 1 else name for name, size in CASES]
)
each_codec = pytest.mark.parametrize("values", sorted(VALUE_CODECS))


@pytest.fixture
def engines_of(monkeypatch):
    """Makes the engines of all ranks, whose bucket takes the exchange of that name."""

    def make(name, kernels=BACKENDS[0], values="fp32"):
        kind, node_size = name
        monkeypatch.setattr("dgc_horovod.core.workspace.choose", lambda *form: IMPLEMENTATIONS[kind])
        third, workers = NUMEL // 3, node_size * WORKERS
        bucket = Bucket(0, (Segment("a", 0, third), Segment("b", third, NUMEL - third)))
        config = DGCConfig(density=DENSITY, values=values, exchange="sharded")
        return [BucketEngine(bucket, config, kernels, rank, workers, node_size) for rank in range(workers)]

    return make


def gradients_of(engines, step):
    """What enters each engine: of its worker, or its slice of the mean over its node."""
    found = []
    for engine in engines:
        of_node = [
            np.random.default_rng([step, rank]).laplace(size=engine.whole.numel).astype(np.float32)
            for rank in engine.topology.inside
        ]
        padded = np.zeros(engine.topology.node_size * engine.bucket.numel, np.float32)
        padded[: engine.whole.numel] = np.mean(of_node, axis=0)
        found.append(padded.reshape(engine.topology.node_size, -1)[engine.topology.local_rank])
    return found


def all_compressed(engines, gradients, *steps):
    """What every rank sends first."""
    each = zip(engines, gradients, steps, strict=True)
    return [compressed(engine, g, step, DENSITY, MOMENTUM).payload.copy() for engine, g, step in each]


def exchanged(engines, gradients, step):
    """One step of all ranks; the update."""
    return stepped(engines, gradients, MOMENTUM, step, DENSITY, commits=False)


def kept(engine, part="v"):
    return engine.state.full_vector(part).astype(np.float64)


def together(engines, slices):
    """The sum over nodes of what their workers have, each of its slice."""
    node_size, numel = engines[0].topology.node_size, engines[0].whole.numel
    return sum(np.concatenate(slices[i : i + node_size])[:numel] for i in range(0, len(engines), node_size))


def conserved(engines, gradients):
    """The update of each step, in all of which what is applied and what every rank keeps is what was accumulated."""
    applied, accumulated = np.zeros(NUMEL), np.zeros(NUMEL)
    for step, of_ranks in enumerate(gradients):
        accumulated += together(engines, [0.9 * kept(e, "u") + g for e, g in zip(engines, of_ranks, strict=True)])
        update = exchanged(engines, of_ranks, step)
        applied += update
        yield update
        for engine in engines:
            assert engine.outcome.finite
            engine.commit()
    residual = together(engines, [kept(engine) for engine in engines])
    assert np.allclose(applied + residual, accumulated, rtol=0, atol=1e-5 * np.abs(accumulated).max())


@each_exchange
@each_codec
def test_nothing_is_lost_and_replicas_are_identical(engines_of, name, kernels, values):
    engines = engines_of(name, kernels, values)
    for update in conserved(engines, (gradients_of(engines, step) for step in range(4))):
        most = 2 * engines[0].topology.nodes * DENSITY * NUMEL
        assert 0 < np.count_nonzero(update) <= most, "a silently dense path"


def bits(engine):
    """u, v and what an owner keeps."""
    parts = (engine.state.u, engine.state.v, engine.state.remainder)
    return [None if x is None else as_numpy(engine.kernels, x).copy() for x in parts]


@each_exchange
def test_a_step_that_is_rolled_back_leaves_no_trace(engines_of, name, kernels):
    """The gradients have entered u and v, with zeros for what is not finite, and nothing has left them."""
    engines = engines_of(name, kernels, "bf16")
    for step, bad in enumerate([0, 0, np.nan, np.inf, 0, -np.inf]):
        gradients, before = gradients_of(engines, step), [bits(engine) for engine in engines]
        gradients[1][5] = bad
        exchanged(engines, gradients, step)
        assert {engine.outcome.finite for engine in engines} == {bad == 0}, "the flag travels to every rank"
        for engine, gradient, (u, v, remainder) in zip(engines, gradients, before, strict=True):
            if bad == 0:
                engine.commit()
                continue
            engine.rollback()
            engine.rollback()  # twice is once
            reference_accumulate(u, v, np.where(np.isfinite(gradient), gradient, np.float32(0)), MOMENTUM)
            for found, expected in zip(bits(engine), (u, v, remainder), strict=True):
                np.testing.assert_array_equal(found, expected)


@each_exchange
def test_ranks_in_join_are_counted_on_every_rank(engines_of, name):
    engines = engines_of(name)
    engines[2].flags = FLAG_JOINED
    exchanged(engines, gradients_of(engines, 0), 0)
    assert [engine.outcome.ranks_in_join for engine in engines] == len(engines) * [1]


@each_exchange
def test_another_step_or_size_is_refused_and_changes_nothing(engines_of, name):
    """Their sum alone would look right to the ranks in the middle."""
    engines = engines_of(name)
    gradients = gradients_of(engines, 0)
    buffers = all_compressed(engines, gradients, 4, *[5] * (len(engines) - 2), 6)
    before = [(kept(engine), kept(engine, "u")) for engine in engines]
    *others, last = engines[0].exchange.rounds
    for collective in others:
        parts = carried(collective, buffers, engines)
        buffers = [e.receive(part).copy() for e, part in zip(engines, parts, strict=True)]
    for engine, received in zip(engines, carried(last, buffers, engines), strict=True):
        with pytest.raises(RankMismatch, match="step"):
            engine.receive(received)
        with pytest.raises(RankMismatch, match=r"densities|received \d+ values"):
            engine.receive(received[: received.size // 2])
    for engine, (v, u) in zip(engines, before, strict=True):
        assert (kept(engine) == v).all() and (kept(engine, "u") == u).all()


@each_exchange
def test_a_damaged_buffer_is_an_error_on_every_rank_in_the_same_round(engines_of, name):
    for damaged in range(len(engines_of(name)[0].spec(DENSITY).rounds)):
        engines = engines_of(name)
        buffers = all_compressed(engines, gradients_of(engines, 0), *[0] * len(engines))
        errors: list[type] = []
        for number, collective in enumerate(engines[0].exchange.rounds):
            if number == damaged:
                buffers[1].view(np.uint8)[:] = 0xFF
            parts = carried(collective, buffers, engines)
            found = [outcome_of(e, part.copy()) for e, part in zip(engines, parts, strict=True)]
            errors = [each for each in found if isinstance(each, type)]
            # other nodes do not see a buffer that is damaged inside one node
            seen = 2 if collective.group == INSIDE and damaged == number else len(engines)
            assert len(errors) in (0, seen), "a rank that goes on alone waits for ever"
            if errors:
                break
            buffers = [each.copy() for each in found if each is not None]
        assert errors and set(errors) <= {CorruptPacket, RankMismatch}


@each_exchange
def test_what_is_too_small_for_its_block_stays(engines_of, name, kernels):
    """Of magnitudes over four decades 8 bits round some to zero: those are as if they had not been selected."""
    engines = engines_of(name, kernels, "8bit")
    held_back = 0

    def drawn(step):
        decades = np.random.default_rng(step).uniform(-80, 4, engines[0].bucket.numel)
        sizes = (10 ** np.maximum(decades, -3)).astype(np.float32)
        return [gradient * sizes for gradient in gradients_of(engines, step)]

    for _ in conserved(engines, map(drawn, range(4))):
        for engine in engines:
            masked = np.flatnonzero(kept(engine, "u") == 0)
            assert masked.size and (masked == engine.sent_positions).all()
            held_back += masked.size < DENSITY * engine.bucket.numel
    assert held_back, "nothing was rounded to zero"


def outcome_of(engine, received):
    """What the next round sends, or the kind of the error."""
    try:
        return engine.receive(received)
    except DGCError as error:
        return type(error)


@each_exchange
@given(st.integers(1, 400), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_odd_sizes(name, numel, nodes, size, uncompressed):
    kind, node_size = name[0], size if name[1] > 1 else 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dgc_horovod.core.workspace.choose", lambda *form: IMPLEMENTATIONS[kind])
        config, workers = DGCConfig(density=DENSITY, values="8bit", exchange="sharded"), nodes * node_size
        bucket = Bucket(0, (Segment("a", 0, numel),), uncompressed, "8bit" if uncompressed else "")
        engines = [BucketEngine(bucket, config, BACKENDS[0], rank, workers, node_size) for rank in range(workers)]
        exchanged(engines, gradients_of(engines, 0), 0)
        assert engines[0].spec(DENSITY).rounds == engines[0].exchange.rounds
