"""AdamW with a second moment that all ranks share, on real ranks; its dense steps are stock's."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel
CASES = ["dense_steps", "first_steps", "clipped", "faults", "rare", "coupled", "summed"]
STATES = ["state", "stock_checkpoint", "looked_at", "earlier", "handed_on", "broadcast"]
DENSE = 30


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    cases = [f"adam.{case}" for case in CASES] + [f"adam_state.{case}" for case in STATES]
    return run_ranks(2, cases, folder=tmp_path_factory.mktemp("state"), timeout=300)


def alike(found, *names):
    """Whether all ranks have the same under each name."""
    return all(len({each[name] for each in found}) == 1 for name in names)


def test_dense_steps_are_those_of_stock_horovod(ranks):
    found = [rank["adam.dense_steps"] for rank in ranks]
    for each in found:
        assert each["apart"] <= 1e-5 and max(each["ratios"]) < 0.02, "rows and columns begin with stock's"
        assert each["losses"][1] < 0.7 * each["losses"][0]
    assert alike(found, "known", "replica") and not alike(found, "own")


def test_compressed_from_the_first_step(ranks):
    found = [rank["adam.first_steps"] for rank in ranks]
    assert alike(found, "known", "replica")
    for each in found:
        assert not each["moved"], "the first step only measures"
        assert sum(each["losses"][-5:]) < 0.6 * sum(each["losses"][:5])
        assert 5 < each["bytes"] < 30, "the sums of a small model at its first step are a large part"
        assert each["memory"] < 4.3


def test_what_the_ranks_share_stays_the_same_where_the_script_clips(ranks):
    """Each had multiplied it by a factor of its own."""
    found = [rank["adam.clipped"] for rank in ranks]
    assert found[0]["known"] == found[1]["known"] and alike(found, "replica")
    assert found[0]["norm"] == pytest.approx(1.0, rel=1e-3), "the mean norm of the first step is within the limit"


def test_it_goes_on_where_it_was_interrupted(ranks):
    found = [rank["adam_state.state"] for rank in ranks]
    for each in found:
        for name in ("dense", "compressed", "from the first"):
            assert each[name][0] == each[name][1], name
    assert alike(found, "replica")


def test_a_flush_leaves_the_second_moment_where_stock_has_it(ranks):
    for found in (rank["adam_state.state"] for rank in ranks):
        assert found["stock"][0] == 13 + 2 * DENSE and found["stock"][1] < 1e-6
        for name, (samples, steps) in found["before"].items():
            assert found["after"][name][1] == steps + 1 and abs(found["after"][name][0] - samples) <= 2


def test_a_stock_checkpoint_is_taken_over_with_its_momentum(ranks):
    found = [rank["adam_state.stock_checkpoint"] for rank in ranks]
    assert alike(found, "replica") and all(each["moved"] < 0.1 for each in found), found


def test_a_gradient_that_is_not_finite_and_a_residual_that_overflows(ranks):
    found = [rank["adam.faults"] for rank in ranks]
    assert alike(found, "replica")
    for each in found:
        assert each["finite"] and not each["learnt of it"]
        assert each["steps"] == DENSE + 10 - 3, "a step that is skipped does not count"


def test_a_state_that_one_rank_asks_for_changes_nothing(ranks):
    found = [rank["adam_state.looked_at"] for rank in ranks]
    assert len({fingerprint for each in found for fingerprint in each.values()}) == 1


def test_what_had_no_gradient_before_does_not_run_away(ranks):
    for found in (rank["adam.rare"] for rank in ranks):
        for name in ("rows", "late"):
            assert 0.1 < found[name] < 50, found


def test_density_1_with_coupled_decay_is_stock_horovod(ranks):
    assert all(rank["adam.coupled"] <= 1e-5 for rank in ranks)


def test_sums_of_gradients_go_as_far_as_averages(ranks):
    for averaged, summed in (rank["adam.summed"] for rank in ranks):
        assert summed[:-1] == pytest.approx(averaged[:-1], rel=1e-2)
        assert summed[-1] == pytest.approx(4 * averaged[-1], rel=1e-2), "squares of sums of two"


def test_what_was_loaded_synced_or_left_by_a_join_is_whole(ranks):
    found = [rank["adam_state.handed_on"] for rank in ranks]
    assert alike(found, "replica", "known", "synced", "joined")
    for each in found:
        assert each["parts"] == ["v"] and each["loaded"]
        assert sum(each["losses"]) / 30 < 1.8, "it was about 5 at the start"


def test_replicas_that_differed_have_the_same_again(ranks):
    assert alike([rank["adam_state.broadcast"] for rank in ranks], "replica", "known", "size")


def test_moments_of_each_ranks_own_are_refused(ranks):
    for found in (rank["adam_state.earlier"] for rank in ranks):
        assert found.startswith("CheckpointError") and "'0.weight'" in found and 'residuals="ignored"' in found


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("before", "after"), [(2, 1), *(pytest.param(*n, marks=pytest.mark.slow) for n in ((4, 2), (2, 4)))]
)
def test_another_number_of_ranks_goes_on_with_it(before, after, tmp_path):
    save, load = "adam_state.saved", "adam_state.loaded"
    saved = [rank[save] for rank in run_ranks(before, [save], folder=tmp_path)]
    found = [rank[load] for rank in run_ranks(after, [load], folder=tmp_path)]
    assert {each["before"] for each in found} == {each["replica"] for each in saved}
    assert {each["known"] for each in found} == {each["known"] for each in saved}
    assert alike(found, "replica")
    assert all(sum(each["losses"]) / 30 < 1.8 for each in found), "it was about 5 at the start"


@pytest.mark.slow
def test_on_nodes_each_worker_measures_its_part():
    found = [rank["adam.nodes"] for rank in run_ranks(4, ["adam.nodes"], "nodes", 300)]
    assert alike(found, "replica", "known")
    for each in found:
        assert each["kept"] == 11_264 // 2
        for flat, sliced, mean, same in each["levels"].values():
            assert 0.4 < sliced / flat <= 1 and mean == pytest.approx(same, rel=0.5)
        assert sum(each["losses"][-5:]) < sum(each["losses"][:5])
