"""Triton's kernels (under the interpreter) in the torch adapter, on real ranks: the bits of the native ones."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed (Linux only)")

from tests.helpers.ranks import run_ranks

# The kernels' bits are checked one by one in tests/unit, and in the adapter on a GPU by scripts/gpu_check
pytestmark = [pytest.mark.parallel, pytest.mark.slow]


def test_training_is_the_same_bit_by_bit():
    ranks = run_ranks(2, ["triton.same_as_native"], environment={"TRITON_INTERPRET": "1"})
    found = [rank["triton.same_as_native"] for rank in ranks]
    assert found[0] == found[1] and len(found[0]) == 4
    for name, weights in found[0].items():
        assert weights["triton"] == weights["native"], name
