"""What stays with a rank under local steps: the inner optimizer's state, in a record."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from dgc_horovod.arithmetic import Adam, Local
from dgc_horovod.errors import CheckpointError
from dgc_horovod.state.residual_state import ResidualState
from dgc_horovod.torch.updates import OwnState

OWN = Local(Adam(), 1.0).own


def adamw(steps, **options):
    """AdamW on a convolution in channels_last, and its weight."""
    torch.manual_seed(0)
    p = torch.nn.Conv2d(3, 4, 3, bias=False).to(memory_format=torch.channels_last).weight
    optimizer = torch.optim.AdamW([p], lr=1e-2, **options)
    for _ in range(steps):
        p.grad = torch.randn_like(p)
        optimizer.step()
    return optimizer, p


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
def test_moments_come_back_in_the_memory_format_of_the_weights(options):
    """Contiguous ones had given a fused step each weight another weight's moments."""
    (saved, p), (loaded, other) = adamw(3, **options), adamw(1, **options)
    state = ResidualState(0, 1, True, tensors={"w": {"v": np.zeros(p.numel())}})
    OwnState(OWN, saved, {p: "w"}).put(state)
    part = OwnState(OWN, loaded, {other: "w"})
    rest = part.without(state)
    assert set(rest.tensors["w"]) == {"v"} and not rest.directions
    part.resume(state)
    for key, moment in saved.state[p].items():
        assert torch.equal(loaded.state[other][key], moment) and loaded.state[other][key].stride() == moment.stride()
    other.data.copy_(p)
    for optimizer, weight in ((saved, p), (loaded, other)):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert torch.equal(p, other)


def test_a_record_of_another_model_changes_nothing():
    optimizer, p = adamw(2)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    alien = ResidualState(0, 1, True, tensors={"w": {"first": np.zeros(5), "second": np.zeros(5)}})
    with pytest.raises(CheckpointError, match=r"'w' has \[5\] elements, the model's tensor has 108"):
        OwnState(OWN, optimizer, {p: "w"}).without(alien)
    assert all(torch.equal(before[0][key], x) for key, x in optimizer.state[p].items())
