"""The objects of accelerate, Lightning's Fabric and transformers: `register` takes what is inside of them."""

from __future__ import annotations

import pytest

from tests.helpers.torch_ranks import run_torch_ranks

pytestmark = pytest.mark.parallel


CASES = ["ddp_frameworks.stand_ins", "ddp_frameworks.patched_class"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_torch_ranks(2, CASES, folder=tmp_path_factory.mktemp("frameworks"))


def test_objects_of_the_shapes_that_they_have(ranks):
    """Fabric's were refused; under fp16 accelerate stepped by the method of before, which was refused too."""
    for rank in ranks:
        for name, (inside, wrapped, steps) in rank["ddp_frameworks.stand_ins"].items():
            assert inside == wrapped and steps == 4, name


def test_a_function_around_a_method_of_the_class_stays(ranks):
    """One made with functools.wraps was taken for torch's own, and left out."""
    first, second = (rank["ddp_frameworks.patched_class"] for rank in ranks)
    assert first == second and {name: count for name, (count, _) in first.items()} == {"dgc": 4, "local": 4}


@pytest.mark.slow
def test_fabric():
    pytest.importorskip("lightning")
    for rank in run_torch_ranks(2, ["ddp_frameworks.fabric"], fresh=True, timeout=240):
        inside, wrapped = rank["ddp_frameworks.fabric"]["ends"]
        assert inside == wrapped and rank["ddp_frameworks.fabric"]["steps"] == 4


@pytest.mark.slow
def test_trainer_with_a_scaler():
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    for rank in run_torch_ranks(2, ["ddp_frameworks.trainer"], fresh=True, timeout=240):
        found = rank["ddp_frameworks.trainer"]
        assert found["distance"] < 1e-6 and found["steps"] == 5
        assert "got GPT2LMHeadModel; a DistributedDataParallel is around it already" in found["said"]
        assert "trainer.model_wrapped" in found["said"]


LIBRARIES = {"accelerate": ["accelerate"], "lightning": ["lightning"], "trainer": ["transformers", "accelerate"]}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "accelerate")) for name in LIBRARIES]
)
def test_resumed_from_its_own_checkpoint_bit_for_bit(name, tmp_path):
    for library in LIBRARIES[name]:
        pytest.importorskip(library)
    case = f"ddp_frameworks.{name}_resumed"
    for rank in run_torch_ranks(2, [case], fresh=True, timeout=240, folder=tmp_path):
        found = rank[case]
        assert found["ends"][0] == found["ends"][1] and found["steps"] == 4, found
        assert found.get("kept", [True, False]) == [True, False]
        assert not found.get("said"), "its users lose nothing, and are told nothing"
