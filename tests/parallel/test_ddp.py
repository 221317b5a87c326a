"""The adapter over torch.distributed, on ranks that know no Horovod: stock DDP at density 1; what works, what not."""

from __future__ import annotations

import pytest

from tests.helpers.torch_ranks import run_torch_ranks

pytestmark = pytest.mark.parallel
SAME = 1e-5
CASES = ["as_stock", "unused", "scaler", "without_ddp", "replicas", "schedulers_and_hooks", "registered_again"]
CASES += ["shared_memory", "frozen_since", "step_of_before", "begun_anew"]
REFUSED = {
    "plain model": "ConfigError: model must be a DistributedDataParallel, got Sequential",
    "mixed_precision": "UnsupportedUse: this DistributedDataParallel has mixed_precision; use torch.autocast",
    "half": "UnsupportedUse: 6 parameters are in the model but not in the optimizer ('2.weight' is the first)",
    "more": "UnsupportedUse: 1 parameters of the optimizer",
    "hook": "UnsupportedUse: this DistributedDataParallel has a communication hook already",
    "DistributedOptimizer of DDP": "belongs to a model in DistributedDataParallel",
    "FSDP": "UnsupportedUse: the model is sharded (FSDP)",
    "DTensor": "UnsupportedUse: '0.weight' is sharded over the ranks",
    "ZeRO": "UnsupportedUse: ZeroRedundancyOptimizer is a distributed optimizer: it shards its state",
    "post-local": "UnsupportedUse: PostLocalSGDOptimizer is a distributed optimizer",
    "in backward": "UnsupportedUse: '0.weight' is stepped by an optimizer in the backward pass",
    "inside of DDP": "got Sequential; a DistributedDataParallel is around it already: pass that. transformers.Trainer",
    "sparse": "UnsupportedUse: 'module' has sparse gradients",
    "join": "UnsupportedUse: Join does not work with a compressed model",
    "no exchange": "UnsupportedUse: step() without gradients that have been exchanged",
    "not in the group": "is not in the given process_group",
    "accumulated": "UnsupportedUse: backward() was called again before step()",
}


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(request):
    return run_torch_ranks(request.param, [f"ddp.{case}" for case in CASES], timeout=240)


def test_density_1_is_stock_ddp(ranks):
    found = dict(ranks[0]["ddp.as_stock"])
    assert found.pop("wrong on purpose") > 1e-3, "a compressed run equals a dense one: it was silently dense"
    assert found.pop("bf16 autocast") < 5e-3  # a difference in the last bit may round another way
    assert {name: value for name, value in found.items() if not value <= SAME} == {}


def test_gradients_that_share_memory_get_an_update_each(ranks):
    for rank in ranks:
        assert max(rank["ddp.shared_memory"].values()) <= SAME


def test_a_step_that_was_taken_before_is_refused(ranks):
    """As accelerate takes it under fp16: it had applied momentum a second time."""
    for rank in ranks:
        assert rank["ddp.step_of_before"].startswith("UnsupportedUse: this step() was taken")


def test_layers_that_were_frozen_since_ddp_was_made_stay(ranks):
    for rank in ranks:
        stayed, trained = rank["ddp.frozen_since"]
        assert stayed == 0 < trained


def test_parameters_that_some_ranks_leave_out(ranks):
    assert {name: value for name, value in ranks[0]["ddp.unused"].items() if not value <= SAME} == {}


def test_a_grad_scaler_skips_the_same_steps(ranks):
    for rank in ranks:
        found = rank["ddp.scaler"]
        assert found["distance"] <= SAME and found["skipped"]
        assert found["scale"][0] == found["scale"][1] and found["weights"] == ranks[0]["ddp.scaler"]["weights"]


def test_without_ddp(ranks):
    assert all(value <= SAME for value in ranks[0]["ddp.without_ddp"].values())


def test_replicas_are_the_same_bits_and_little_is_sent(ranks):
    for name, (weights, steps, ratio) in ranks[0]["ddp.replicas"].items():
        assert steps == 6 and ratio > 20, (name, ratio)
        assert all(rank["ddp.replicas"][name][0] == weights for rank in ranks), name


def test_schedulers_and_step_hooks(ranks):
    assert ranks[0]["ddp.schedulers_and_hooks"] == {"lr": 0.05 / 8, "hooks": 3, "is": True}


def test_registering_again(ranks):
    found = ranks[0]["ddp.registered_again"]
    assert found["steps"] == 2 and "wrapped by another one since" in found["first"]


def test_what_a_message_says_to_do_works(ranks):
    found = [rank["ddp.begun_anew"] for rank in ranks]
    assert all(rank == found[0] for rank in found) and found[0]["steps"] == 2
    assert "make a new DistributedDataParallel and register it with a new optimizer" in found[0]["accumulated"]
    assert "or the model has been put into another DistributedDataParallel" in found[0]["another DDP"]


def test_refusals():
    for rank in run_torch_ranks(2, ["ddp.refusals"]):
        found = rank["ddp.refusals"]
        assert {name: text for name, text in found.items() if REFUSED[name] not in text} == {}
        assert found.keys() == REFUSED.keys()


def test_compiled_models():
    for rank in run_torch_ranks(2, ["ddp.compiled"], timeout=240):
        assert all(value <= SAME for value in rank["ddp.compiled"].values()), rank
