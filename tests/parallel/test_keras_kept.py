"""What ranks of a Keras job have kept is neither lost nor applied wrongly when variables, state or steps are others."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.slow]
CASES = (
    "adam_begins_anew", "warmup_goes_on", "flushed", "loaded", "outer_momentum", "refused", "begins",
    "stock_with_a_limit", "summed",
)  # fmt: skip


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, [f"keras_kept.{case}" for case in CASES])


def test_adams_steps_stay_of_one_size_when_a_layer_is_frozen_or_moments_are_emptied(ranks):
    found = ranks[0]["keras_kept.adam_begins_anew"]
    assert found["frozen"] == pytest.approx(1, rel=0.1)
    assert 0.5 < found["cleared"] < 1.5, "ten times as large before moments knew when they began"


def test_the_warm_up_goes_on_when_a_layer_is_frozen(ranks):
    assert ranks[0]["keras_kept.warmup_goes_on"]["selected"] <= 5


def test_a_flush_is_not_clipped_not_scaled_and_keeps_constraints(ranks):
    found = ranks[0]["keras_kept.flushed"]
    assert found["clipped"] == pytest.approx(1, rel=1e-3) and found["scaled"] == pytest.approx(1, rel=1e-3)
    assert found["constraint"] >= 0


def test_what_was_loaded_counts_before_the_first_step(ranks):
    for found in (rank["keras_kept.loaded"] for rank in ranks):
        assert found["flushed"] <= 1e-6 and found["velocity"] > 0 and found["cleared"] == 0


def test_outer_momentum_of_a_checkpoint_survives_the_broadcast_of_fit(ranks):
    assert ranks[0]["keras_kept.outer_momentum"]["distance"] == 0


def test_what_would_train_wrongly_is_refused(ranks):
    for found in (rank["keras_kept.refused"] for rank in ranks):
        assert "steps in an apply() of its own" in found["own apply"]
        assert "DistributedOptimizer(LossScaleOptimizer(optimizer))" in found["scaled tape"]


def test_the_first_batch(ranks):
    one, other = (rank["keras_kept.begins"] for rank in ranks)
    assert one == other
    assert one["embedding"] == pytest.approx(400 - 0.1 * 16 / 2, abs=1e-3)


def test_a_choice_without_compression_keeps_its_limit(ranks):
    for found in (rank["keras_kept.stock_with_a_limit"] for rank in ranks):
        assert found == {"sparse": pytest.approx(0.1, rel=1e-4), "amsgrad": pytest.approx(0.1, rel=1e-4)}


def test_a_sum_is_saved_as_one(ranks):
    found = ranks[0]["keras_kept.summed"]
    assert found["velocity"] == pytest.approx(found["stock"], rel=1e-5)
