"""The objects of accelerate, Lightning's Fabric and transformers: `register` takes what is inside of them."""

from __future__ import annotations

import pytest

from tests.helpers.torch_ranks import run_torch_ranks

pytestmark = pytest.mark.parallel


def test_objects_of_the_shapes_that_they_have(tmp_path):
    """Fabric's were refused; under fp16 accelerate stepped by the method of before, which was refused too."""
    for rank in run_torch_ranks(2, ["ddp_frameworks.stand_ins"], folder=tmp_path):
        for name, (inside, wrapped, steps) in rank["ddp_frameworks.stand_ins"].items():
            assert inside == wrapped and steps == 4, name


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
