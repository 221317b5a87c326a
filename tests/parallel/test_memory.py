"""Peak memory per parameter, on real ranks: u and v, b where decay and momentum meet, and little else."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks

STATED = {
    "momentum": 8,
    "momentum and decay": 12,
    "no momentum": 4,
    "tensor scope": 8,
    "gaussian, 4 bits": 8,
}


@pytest.mark.parallel
@pytest.mark.slow
def test_extra_memory_is_as_stated():
    """docs/design.md: 8 bytes a parameter (u, v), 4 more with weight decay; and a bucket's."""
    for rank in run_ranks(2, ["memory.extra_bytes"], fresh=True):
        found = rank["memory.extra_bytes"]
        assert 8 <= found["base"] < 9, "weights and gradients"
        for form, stated in STATED.items():
            assert stated - 0.2 < found[form] < stated + 0.7, f"{form}: {found[form]:.2f} bytes a parameter"
