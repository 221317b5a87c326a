"""Over torch.distributed: parameters of TensorDicts are plain ones; where a rank holds parts, that is refused."""

from __future__ import annotations

import pytest

from tests.helpers.torch_ranks import run_torch_ranks

pytestmark = pytest.mark.parallel
SHARDED = "is sharded over the ranks (FSDP, DTensor, tensor parallel)"
REFUSED = {
    "FSDP": "UnsupportedUse: the model is sharded (FSDP)",
    "FSDP, original parameters": "UnsupportedUse: the model is sharded (FSDP)",
    "FSDP without register": f"UnsupportedUse: '_fsdp_wrapped_module.0.weight' {SHARDED}",
    "FSDP within DDP": f"UnsupportedUse: '0._fsdp_wrapped_module._flat_param' {SHARDED}",
    "FSDP2": "UnsupportedUse: the model is sharded (FSDP)",
    "DTensor within DDP": f"UnsupportedUse: '0.weight' {SHARDED}",
    "tensor parallel within DDP": f"UnsupportedUse: '0.weight' {SHARDED}",
}


def test_parameters_of_tensordicts():
    pytest.importorskip("tensordict")
    ranks = run_torch_ranks(2, ["ddp_parameters.tensordict"], timeout=240)
    for name, found in ranks[0]["ddp_parameters.tensordict"].items():
        assert found["distance"] <= 1e-5 < 1e-3 < found["moved"], (name, found)
        assert found["resumed"] == found["weights"], name
        assert ranks[1]["ddp_parameters.tensordict"][name]["weights"] == found["weights"], name


@pytest.mark.slow
def test_models_of_which_a_rank_holds_parts():
    for rank in run_torch_ranks(2, ["ddp_parameters.parts"], fresh=True):
        found = rank["ddp_parameters.parts"]
        assert {name: text for name, text in found.items() if REFUSED[name] not in text} == {}
        assert found.keys() == REFUSED.keys()
