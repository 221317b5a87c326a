"""Triton's kernels (under the interpreter) in the torch adapter, on real ranks: the bits of the native ones."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("triton", reason="Triton is not installed (Linux only)")

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.regression import adamw
from tests.helpers.training import fingerprint, made, momentum_sgd, train

# The kernels' bits are checked one by one in tests/unit, and in the adapter on a GPU by scripts/gpu_check
pytestmark = [pytest.mark.parallel, pytest.mark.slow, pytest.mark.on_ranks(environment={"TRITON_INTERPRET": "1"})]
_DGC = partial(Compression.dgc, 0.05, min_numel=16)


@pytest.mark.parametrize(
    ("compression", "make"),
    [
        pytest.param(_DGC(), momentum_sgd, id="dgc"),
        pytest.param(_DGC(clip_norm=0.5, values="4bit"), momentum_sgd, id="clipped, 4bit"),
        pytest.param(Compression.gaussian(0.05, min_numel=16), momentum_sgd, id="gaussian"),
        pytest.param(_DGC(), adamw, id="AdamW"),
    ],
)
def test_training_is_the_same_bit_by_bit(compression, make):
    found = {}
    for backend in ("native", "triton"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DGC_BACKEND", backend)
            model, optimizer = made(compression, make)
            train(model, optimizer, 8)
        assert {engine.kernels.name for engine in session(optimizer).exchange.engines} == {backend}
        found[backend] = fingerprint(model)
    assert found["triton"] == found["native"]
    same_on_ranks(found)
