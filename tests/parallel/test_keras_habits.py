"""Habits of scripts that had once trained wrongly, leaked or crashed under the TensorFlow adapter."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel
CASES = [
    "subsets",
    "empty",
    "reloaded",
    "after_a_failure",
    "frozen",
    "tapes_again",
    "eager_scaling",
    "local_variables",
    "passes_are_no_state",
    "models_and_optimizers",
    "own_methods",
]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, [f"keras_habits.{case}" for case in CASES])


def test_any_set_of_variables_in_any_order(ranks):
    found = dict(ranks[0]["keras_habits.subsets"])
    assert all(found.pop(name) > 0.1 for name in list(found) if name.endswith("moved"))
    assert {name: value for name, value in found.items() if not value < 1e-5} == {}


def test_variables_without_an_element(ranks):
    """The comparison of weights had an IndexError where the first one has none."""
    for found in (found["keras_habits.empty"] for found in ranks):
        for name, moved in {"first": 0.1, "between": 0.1, "alone": 0.0}.items():
            assert max(found[name]) < 1e-5 and found[f"{name}: moved"] >= moved


def test_a_loaded_checkpoint_empties_all_sets(ranks):
    for found in (found["keras_habits.reloaded"] for found in ranks):
        assert len(found) == 5 and all(found.values()), found


def test_a_failed_step_changes_nothing(ranks):
    for found in (found["keras_habits.after_a_failure"] for found in ranks):
        assert found["failures"] == 1 and found["lost"] < 1e-4


def test_a_frozen_layer_stays_where_it_is(ranks):
    """What waited for it had moved it on for a hundred steps, or all at once when it was trained again."""
    for found in (found["keras_habits.frozen"] for found in ranks):
        assert len(found) == 7 and {name: moved for name, moved in found.items() if moved != [0.0, 0.0]} == {}


def test_a_tape_that_is_used_again(ranks):
    found = dict(ranks[0]["keras_habits.tapes_again"])
    assert "has no jacobian" in found.pop("jacobian")
    assert found == {"sets": 1, "steps": 5, "after": 0, "freed": True}


def test_eager_everything(ranks):
    first, second = (found["keras_habits.eager_scaling"] for found in ranks)
    assert first == second
    # two steps of momentum SGD with gradient 1, the third is skipped
    assert first["weights"] == pytest.approx(1 - 0.05 * (1 + 1.9)) and first["scale"] == 2.0**14


def test_local_variables_are_treated_like_the_others(ranks):
    for rank, found in enumerate(found["keras_habits.local_variables"] for found in ranks):
        for name in ("none", "topk"):
            own = [0.0] * 12
            own[2 * rank : 2 * rank + 2] = [(4.0 + rank) / 2] * 2
            assert found[f"{name} {{}}"] == own
            assert sum(x**2 for x in found[f"{name} {{'clipnorm': 1.0}}"]) == pytest.approx(1.0, abs=1e-3)
            assert max(found[f"{name} {{'clipvalue': 0.1}}"]) == pytest.approx(0.1)
            assert found[f"{name} passes"] == [0.0, -1.0], "the local one is divided by N"
        assert found["of other shapes"] == [0.5 + rank, []], "they differ on purpose: nothing is to be said"


def test_passes_leave_a_stock_file(ranks):
    for found in (found["keras_habits.passes_are_no_state"] for found in ranks):
        assert found["new"] == found["built"] == [True, None, 10] and found["said"] == []
        assert found["variables"] == 2 and found["summed"] == -3.0


def test_models_and_optimizers(ranks):
    first, second = (dict(found["keras_habits.models_and_optimizers"]) for found in ranks)
    # the first time only: the second, no wrapped optimizer is left
    assert len(first.pop("compiled with another")) == 1 and second.pop("compiled with another") == []
    assert first == second
    for said, rank in zip(first["compiled with what was given"], (1, 0), strict=True):
        assert said.startswith(f"UnsupportedUse: the model of rank {rank} is compiled with the optimizer that"), said
    assert first["own"] == "Own"
    for name in ("copy", "deepcopy", "pickle", "copy of a scaler"):
        assert "would train undistributed" in first[name]
    assert "compile the model again" in first["not compiled again"]
    assert first["warm-up of a second model"][0] == first["warm-up of a second model"][1]
    assert first["half"] == pytest.approx(-3.0 * (1 + 1.9 + 2.71 + 3.439), rel=1e-2)
    assert "metrics: rank 0 has mape, rank 1 has mae" in first["other metrics"]
    assert first["one optimizer, twice"] == first["two optimizers"], "they had shared their variables"


def test_methods_that_a_script_has_put_on_the_object(ranks):
    """They went on calling the optimizer from before: nothing was exchanged, without a word."""
    for found in (dict(found["keras_habits.own_methods"]) for found in ranks):
        assert found.pop("kept") and found.pop("apply_gradients afterwards") == found.pop("apply afterwards") == -2.0
        assert len(found) == 9
        for name, said in found.items():
            assert said.startswith("UnsupportedUse: ") and f"has {name.split()[-1]} of its own" in said, said


@pytest.mark.slow
def test_slow_steps_and_caught_errors_do_not_end_a_job():
    for found in run_ranks(2, ["keras_habits.slow_and_caught"], environment={"DGC_TIMEOUT": "4"}, fresh=True):
        found = found["keras_habits.slow_and_caught"]
        assert found["slow"] == "" and found["afterwards"] == ""
        assert "check that every rank sets the same epoch" in found["mismatch"]
