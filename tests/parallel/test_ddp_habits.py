"""Over torch.distributed: wrappers, other methods that step, what DDP leaves out, torch's trial step."""

from __future__ import annotations

import pytest

from tests.helpers.torch_ranks import run_torch_ranks

pytestmark = pytest.mark.parallel
CASES = ["wrapped_methods", "other_methods", "unused", "left_out_later"]
CASES += ["filled_state", "synchronized_again", "clipped_doubles"]
UNUSED = {
    "a layer": "'extra.weight', 'extra.bias'",
    "an output": "'right.weight', 'right.bias'",
    "a gradient": "'6.bias'",
}


@pytest.fixture(scope="module")
def ranks():
    return run_torch_ranks(2, [f"ddp_habits.{case}" for case in CASES], timeout=280)


def test_wrappers_around_methods_stay(ranks):
    """One around ``step`` was dropped without a word, others led past ours."""
    for rank in ranks:
        for name, (before, after) in rank["ddp_habits.wrapped_methods"].items():
            assert before == after, name
            assert len(set(before["seen"])) == 4, name
            assert before["calls"] == {"zero_grad": 4, "state_dict": 1} and before["rate"] == 0.05 / 4, name


def test_an_optimizer_that_is_stepped_by_another_method_is_an_error(ranks):
    """NaN of one rank got into the weights of all, replicas were not compared, and a notice said what was not so."""
    first, second = (dict(rank["ddp_habits.other_methods"]) for rank in ranks)
    assert first == second
    assert first["inside"] < 1e-5 and first["finite"] and max(first["a wrapper"]) < 1e-5
    for name in ("dgc", "local", "auto", "without DDP"):
        text = first[f"around, {name}"]
        assert text.startswith("UnsupportedUse: Sam was passed to register() or DistributedOptimizer(), but its inner")
        assert "Pass optimizer.base instead" in text and first.get(f"stays, {name}", True), (name, text)
    for name in ("zero_grad", "backward"):
        assert (
            "ByHand has applied an update without step() (its other methods: second_step())"
            in first[f"by hand, {name}"]
        )


def test_a_parameter_that_takes_no_part_in_the_loss_is_named(ranks):
    """Three causes were named, and none was the one."""
    first, second = (dict(rank["ddp_habits.unused"]) for rank in ranks)
    assert first == second
    said = {name: text for name, text in first.items() if name.endswith(("25", "0.0001"))}
    assert len(said) == 8
    for name, text in said.items():
        names = next(names for begin, names in UNUSED.items() if name.startswith(begin))
        assert f"no gradient for {names}, but DistributedDataParallel" in text, (name, text)
        assert "pass find_unused_parameters=True" in text
    for name in first.keys() - said.keys():
        assert len(first[name]) == 64, (name, first[name])  # it was trained


def test_a_parameter_that_is_left_out_later_is_told_of(ranks):
    """Three causes were named, and none was the one."""
    first, second = (dict(rank["ddp_habits.left_out_later"]) for rank in ranks)
    assert first == second
    assert "no gradient for 'right.weight', 'right.bias', but Distributed" in first["frozen, False"]
    assert "left out a parameter (find_unused_parameters=True" in first["accumulated, False"]
    assert len(first["frozen, True"]) == len(first["accumulated, True"]) == 64  # it was trained


def test_a_state_can_be_asked_for_before_the_first_step(ranks):
    """torch's trial step was an error, which left learning rates at 0; local steps counted it, on one rank alone."""
    first, second = (rank["ddp_habits.filled_state"] for rank in ranks)
    for name, found in first.items():
        assert found["rate"] == 0.01 and found["stays"], name
        assert found["ends"] == second[name]["ends"], name
        assert found["ends"][0] == found["ends"][1], name


def test_a_synchronization_with_nothing_new_does_nothing(ranks):
    """It was an error that spoke of a step() which nobody had called."""
    for rank in ranks:
        found = rank["ddp_habits.synchronized_again"]
        assert found["ends"][0] == found["ends"][1] and found["told"] == []
        assert found["added"].startswith("UnsupportedUse: backward() was called between synchronize() and step()")
        assert len(found["errors"]) == 4
        assert all("step() was called again with no backward pass" in text for text in found["errors"])


def test_gradients_in_float64_are_clipped(ranks):
    """torch has no norm of them in fp32: an error at the next step."""
    first, second = (rank["ddp_habits.clipped_doubles"] for rank in ranks)
    assert len(first) == 32
    for name, (distance, total) in first.items():
        assert total == second[name][1], name
        assert distance < (0.2 if "16" in name else 1e-3), (name, distance)
