"""Steps that are not applied although every gradient was finite: on all ranks alike, and not for ever."""

from __future__ import annotations

import numpy as np
import pytest

from dgc_horovod import DGCConfig
from dgc_horovod.core.bucketing import TensorSpec
from dgc_horovod.core.ending import IN_A_ROW
from dgc_horovod.exchange import IMPLEMENTATIONS
from dgc_horovod.kernels.contract import ErrorFeedback
from dgc_horovod.kernels.native.kernels import NativeKernels
from dgc_horovod.notices import not_finite
from dgc_horovod.wire.bucket import PADDING
from tests.helpers.engines import carry_all, make_exchange

WORKERS, NUMEL, LARGE = 4, 600, 20
each_exchange = pytest.mark.parametrize(
    ("kind", "node_size"), [(kind, size) for kind in sorted(IMPLEMENTATIONS) for size in (1, 2)]
)
pytestmark = pytest.mark.filterwarnings("ignore:overflow")


@pytest.fixture
def ranks_of(monkeypatch):
    """Makes what all ranks have, whose bucket takes the exchange of that name."""

    def make(kind, node_size=1, density=0.05):
        monkeypatch.setattr("dgc_horovod.core.workspace.choose", lambda *form: IMPLEMENTATIONS[kind])
        config = DGCConfig(
            density=density, min_numel=1, exchange="sharded", momentum_correction=False, factor_masking=False
        )
        specs, kernels = [TensorSpec("w", (20, 30))], NativeKernels(1)
        return [make_exchange(specs, config, kernels, rank, WORKERS, False, node_size) for rank in range(WORKERS)]

    return make


def stepped(ranks, gradient, scale=1.0, nan_on=None):
    """One step of all ranks with the same gradient; whether it was applied, and the update."""
    engines, buffers = [each.engines[0] for each in ranks], []
    for each, engine in zip(ranks, engines, strict=True):
        place, padded = engine.topology, np.zeros(engine.topology.node_size * engine.bucket.numel, np.float32)
        padded[:NUMEL] = gradient
        if nan_on == each.rank:
            padded[:] = np.nan
        mine = padded.reshape(place.node_size, -1)[place.local_rank]
        for i, segment in enumerate(engine.bucket.segments):
            assert segment.name != PADDING
            engine.add_gradient(i, mine[segment.place].copy(), ErrorFeedback())
        buffers.append(each.compress(engine, 1.0, scale).payload.copy())
    carry_all(engines, buffers, lambda engine, part: ranks[engine.rank].receive(engine, part))
    applied, updates = [], []
    for each, engine in zip(ranks, engines, strict=True):
        updates.append(np.empty(NUMEL, np.float32))
        engine.outputs.put(0, updates[-1])
        each.aggregate(engine, scale)
        finite = each.settle(engine)
        applied.append(each.ending.judge(finite, True, lambda: scale))
        each.close(applied[-1])
    assert len(set(applied)) == 1 and len({update.tobytes() for update in updates}) == 1
    return applied[0], updates[0]


def gradient_with(large, count=LARGE):
    gradient = np.full(NUMEL, 1e-3, np.float32)
    gradient[:: NUMEL // count][:count] = large
    return gradient


@each_exchange
def test_an_update_that_is_too_large_is_left_out_once(ranks_of, kind, node_size):
    """The same elements were sent at every step, and no step was applied any more, without a word."""
    ranks = ranks_of(kind, node_size)
    assert not stepped(ranks, gradient_with(3e38))[0]
    words = {each.ending.where() for each in ranks}
    assert len(words) == 1 and words.pop().startswith("no rank")
    for _ in range(IN_A_ROW - 2):  # what owners had no room for may be as large
        if (found := stepped(ranks, gradient_with(1e-3)))[0]:
            break
    applied, update = stepped(ranks, gradient_with(1e-3)) if not found[0] else found
    assert applied and np.isfinite(update).all() and update.any()
    assert all(each.counts.skipped == ranks[0].counts.skipped for each in ranks)
    assert ranks[0].counts.skips[0] == (0, "no rank: an update was too large")


@each_exchange
def test_a_gradient_that_is_not_finite_is_still_taken_back(ranks_of, kind, node_size):
    """Also where an update is too large in the same step."""
    ranks = ranks_of(kind, node_size)
    for large in (1.0, 3e38):
        before = [each.engines[0].state.v.copy() for each in ranks]
        assert not stepped(ranks, gradient_with(large), nan_on=3)[0]
        assert not any(each.ending.leaves_out for each in ranks)
        for each, v in list(zip(ranks, before, strict=True))[:3]:
            assert np.abs(each.engines[0].state.v).max() > np.abs(v).max(), "it waits"
    assert "no rank" not in ranks[0].ending.where()


def test_where_all_that_waits_is_too_large_it_is_left_out_too(ranks_of):
    """k elements a step would take as many steps as there are elements, divided by k."""
    ranks = ranks_of("allgather", density=0.01)
    waiting = np.full(NUMEL, 3e38, np.float32)
    assert [stepped(ranks, waiting * (i == 0))[0] for i in range(IN_A_ROW)] == [False] * IN_A_ROW
    assert not any(each.engines[0].state.v.any() for each in ranks)
    assert stepped(ranks, gradient_with(1.0))[0]


def test_a_loss_scale_that_falls_lets_it_fit(ranks_of):
    """Nothing is lost to a scaler that looks for the largest scale; one that never moves is no reason to wait."""
    ranks = ranks_of("allgather")
    first = gradient_with(1e36)
    found = [stepped(ranks, first * (i == 0) * scale, scale) for i, scale in enumerate((256.0, 128.0, 64.0))]
    assert [applied for applied, _ in found] == [False, False, True]
    np.testing.assert_allclose(found[-1][1].max() / 64 / WORKERS, 1e36, rtol=0.01)
    assert ranks[0].counts.skips[0][1] == "no rank: an update times the loss scale was too large"
    ranks = ranks_of("allgather")
    found = [stepped(ranks, first * (i == 0) * 256, 256.0)[0] for i in range(3)]
    assert found == [False, False, True]
    assert [where.count("scale") for _, where in ranks[0].counts.skips] == [1, 0]


def test_after_an_error_what_was_sent_is_taken_back(ranks_of):
    """Whatever had become of the step before."""
    ranks = ranks_of("allgather")
    stepped(ranks, gradient_with(3e38))
    assert ranks[0].ending.leaves_out
    engine = ranks[0].engines[0]
    expected = engine.state.v + gradient_with(1.0)
    engine.add_gradient(0, gradient_with(1.0), ErrorFeedback())
    ranks[0].compress(engine)
    ranks[0].close(False)
    np.testing.assert_array_equal(engine.state.v, expected)


def test_weights_that_are_not_finite_are_said_to_be(ranks_of):
    """Gradients were, which could not be anything else; the weights are looked at in no other step."""
    ranks, looks = ranks_of("allgather"), []
    for each in ranks:
        each.ending.spoilt = lambda: looks.append(1) or "dense/kernel"
    assert stepped(ranks, gradient_with(1.0))[0] and not looks
    assert not stepped(ranks, gradient_with(1.0), nan_on=1)[0] and len(looks) == WORKERS
    where = ranks[0].ending.where()
    assert where == ranks[0].counts.skips[0][1] == "the weights of 'dense/kernel'"
    assert "step 1: the weights of 'dense/kernel' are not finite, and so gradients are not" in not_finite(1, where)
    assert stepped(ranks, gradient_with(1.0))[0] and "the weights" not in ranks[0].ending.where()


def test_it_is_told_in_its_own_words(ranks_of):
    ranks = ranks_of("allgather")
    stepped(ranks, gradient_with(3e38))
    where = ranks[0].ending.where()
    assert "step 3: an update was too large" in (text := not_finite(3, where)) and "gradient was not finite" not in text
    assert "clip_norm" in text and "float32" in text
    assert not_finite(3, where, rounds=True).startswith("exchange 3: an update was too large")
    assert not_finite(3, "rank 1, among 'w'") == (
        "step 3: a gradient was not finite on rank 1, among 'w'; every rank skips the step"
    )
