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
