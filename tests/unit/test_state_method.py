"""What residuals hold, and who can go on from them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dgc_horovod.errors import CheckpointError
from dgc_horovod.state.parts import ADAM_UPDATES, check_kept
from dgc_horovod.state.residual_state import ResidualState


def test_residuals_of_another_method_are_refused():
    arrays = {"v": np.ones(5, np.float32), "u": np.ones(5, np.float32)}
    state = ResidualState(0, 1, True, 7, None, {"a": arrays}, method="gradients")
    assert ResidualState.from_bytes(state.to_bytes()).method == "gradients"
    for method in (ADAM_UPDATES, "changes of weights"):
        with pytest.raises(CheckpointError, match=f"hold gradients, and this optimizer's hold {method}"):
            check_kept(state, method)
    check_kept(state, "gradients")
    flushed = {"a": {"v": 0 * arrays["v"]}}
    check_kept(dataclasses.replace(state, tensors=flushed), ADAM_UPDATES)
    check_kept(dataclasses.replace(state, method=""), ADAM_UPDATES)  # of earlier versions
    old = {name: value for name, value in state.to_dict().items() if name != "method"}
    assert ResidualState.from_dict(old).method == ""
