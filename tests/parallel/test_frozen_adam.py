"""AdamW with a frozen second moment on real ranks: dense steps are stock's, what is frozen is the same everywhere."""

from __future__ import annotations

import pytest

from dgc_horovod import DGCConfig, WarmupSchedule
from dgc_horovod.errors import ConfigError
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel
CASES = ["dense_steps", "faults", "rare", "coupled", "summed", "skipped"]
STATES = ["state", "looked_at", "misuse", "handed_on"]
SETTLED = ["ends", "limits", "resumed", "handed_on"]
DENSE = 30


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    cases = [f"frozen_adam.{case}" for case in CASES] + [f"frozen_adam_state.{case}" for case in STATES]
    cases += [f"settled_adam.{case}" for case in SETTLED]
    return run_ranks(2, cases, folder=tmp_path_factory.mktemp("state"), timeout=300)


def test_dense_steps_are_those_of_stock_horovod(ranks):
    for found in (rank["frozen_adam.dense_steps"] for rank in ranks):
        assert found["apart"] <= 1e-5 and found["second"] <= 1e-4
        assert found["losses"][1] < 0.7 * found["losses"][0]


def test_the_second_moment_is_the_same_on_every_rank_the_first_is_not(ranks):
    found = [rank["frozen_adam.dense_steps"] for rank in ranks]
    assert len({each["of second"] for each in found}) == 1 == len({each["replica"] for each in found})
    assert len({each["of first"] for each in found}) == 2


def test_it_goes_on_where_it_was_interrupted(ranks):
    for found in (rank["frozen_adam_state.state"] for rank in ranks):
        for name in ("dense", "frozen"):
            assert found[name][0] == found[name][1], name


def test_a_flush_leaves_the_moments_where_stock_has_them(ranks):
    for found in (rank["frozen_adam_state.state"] for rank in ranks):
        assert found["steps"] == [95]
        assert found["after flush"] == pytest.approx(1, rel=1e-4)
        assert 0.99 < found["second"] <= 1.0001, "but for what was too small"


def test_it_needs_dense_steps():
    for warmup in (None, WarmupSchedule(steps=5)):
        with pytest.raises(ConfigError, match="first_density"):
            DGCConfig(second_moment="frozen", warmup=warmup)


def test_a_gradient_that_is_not_finite_and_a_residual_that_overflows_leave_the_second_moment(ranks):
    found = [rank["frozen_adam.faults"] for rank in ranks]
    assert len({each["replica"] for each in found}) == 1 and all(each["finite"] and each["same"] for each in found)
    assert {each["steps"] for each in found} == {DENSE - 1}, "a dense step that was skipped must not count"


def test_a_state_that_one_rank_asks_for_changes_nothing(ranks):
    found = [rank["frozen_adam_state.looked_at"] for rank in ranks]
    assert len({fingerprint for each in found for fingerprint in each.values()}) == 1


def test_what_had_no_gradient_in_the_dense_steps_does_not_run_away(ranks):
    for found in (rank["frozen_adam.rare"] for rank in ranks):
        assert 0.1 < found["rows"] < 100, found
        assert "'late.weight' has a gradient now" in found["late"], "and not silently none"


def test_dense_steps_with_coupled_decay_are_those_of_stock_horovod(ranks):
    assert all(rank["frozen_adam.coupled"] <= 1e-5 for rank in ranks)


def test_sums_of_gradients_go_as_far_as_averages(ranks):
    for averaged, summed in (rank["frozen_adam.summed"] for rank in ranks):
        assert summed[:-1] == pytest.approx(averaged[:-1], rel=1e-3)
        assert summed[-1] == pytest.approx(2 * averaged[-1], rel=1e-2), "as stock's first moment of sums"


def test_a_dense_step_that_is_skipped_leaves_nothing(ranks):
    assert all(rank["frozen_adam.skipped"] == pytest.approx(1, rel=1e-2) for rank in ranks)


def test_what_was_loaded_synced_or_left_by_a_join_is_whole(ranks):
    found = [rank["frozen_adam_state.handed_on"] for rank in ranks]
    assert len({each["replica"] for each in found}) == 1 == len({each["second"] for each in found})
    for each in found:
        assert each["parts"] == ["first", "v"] and each["loaded"]
        assert sum(each["losses"]) / 20 < 1.5, "it was about 5 at the start"


def test_a_second_moment_that_is_not_there_is_an_error_on_every_rank(ranks):
    for found in (rank["frozen_adam_state.misuse"] for rank in ranks):
        assert "no second moment that could stay" in found["no state"]
        assert "second_moment='frozen'" in found["own"] and found["own"].startswith("CheckpointError")


@pytest.mark.parametrize(("before", "after"), [(4, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_another_number_of_ranks_goes_on_with_it(before, after, tmp_path):
    save, load = "frozen_adam_state.saved", "frozen_adam_state.loaded"
    saved = [rank[save] for rank in run_ranks(before, [save], folder=tmp_path)]
    found = [rank[load] for rank in run_ranks(after, [load], folder=tmp_path)]
    assert {each["before"] for each in found} == {each["replica"] for each in saved}
    assert {each["second"] for each in found} == {each["second"] for each in saved}
    assert len({each["replica"] for each in found}) == 1
    assert all(sum(each["losses"]) / 20 < 1.5 for each in found), "it was about 5 at the start"


@pytest.mark.slow
def test_on_nodes_each_worker_keeps_its_part(tmp_path):
    found = [rank["frozen_adam.nodes"] for rank in run_ranks(4, ["frozen_adam.nodes"], "nodes", 300)]
    assert len({each["replica"] for each in found}) == 1
    for each in found:
        assert each["apart"] <= 1e-5 and each["kept"] == 11_264 // 2
        assert sum(each["losses"][-5:]) < 0.9 * sum(each["losses"][:5])


def test_dense_steps_that_end_when_settled_are_the_same_as_so_many_by_number(ranks):
    for found in (rank["settled_adam.ends"] for rank in ranks):
        assert 2 * 20 < found["steps"] < 150 and found["replica"] == found["by number"]
    assert len({rank["settled_adam.ends"]["replica"] for rank in ranks}) == 1


def test_when_a_second_moment_may_have_settled(ranks):
    for found in (rank["settled_adam.limits"] for rank in ranks):
        assert found["any"] == 40, "two windows of 1/(1-b2)"
        assert found["none"] == 100, "the longest that was allowed"
        assert found["skipped"] == 50, "three skipped steps are none"
        assert found["ramp"] == 80, "a window after the rate has stopped rising"
        assert found["own norm"] == 40, "what the first rank says, whatever the others have"


def test_it_settles_where_it_would_have_however_it_was_interrupted(ranks):
    for found in (rank["settled_adam.resumed"] for rank in ranks):
        assert len(found) == 5
        for at, (whole, interrupted) in found.items():
            assert whole == interrupted, at


def test_where_it_has_settled_is_restored_joined_and_loaded(ranks):
    for found in (rank["settled_adam.handed_on"] for rank in ranks):
        assert found["settled"] == 40 and found["restored"] == [None, True]
        assert found["joined"] is None, "not while a rank is in join"
        assert found["after"][0] == found["required"] == found["ignored"] == 50
    assert len({rank["settled_adam.handed_on"]["after"][1] for rank in ranks}) == 1


def test_another_number_of_ranks_knows_where_it_has_settled(tmp_path):
    saved = [rank["settled_adam.saved"] for rank in run_ranks(4, ["settled_adam.saved"], folder=tmp_path)]
    found = [rank["settled_adam.loaded"] for rank in run_ranks(2, ["settled_adam.loaded"], folder=tmp_path)]
    assert saved == [40] * 4 and found == [[40, 0.1, True]] * 2
