"""Momentum in bfloat16: how it is rounded, what that costs, and where it is refused."""

from __future__ import annotations

import numpy as np
import pytest

from dgc_horovod import DGCConfig
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.kernels.contract import MomentumCorrection
from dgc_horovod.wire.bucket import Bucket, Segment
from dgc_horovod.wire.codecs import rounded, widened
from tests.helpers.data import BACKENDS, DATA, as_array, as_numpy, each_backend


@each_backend
def test_bfloat16_is_rounded_as_torch_rounds_it(kernels):
    torch = pytest.importorskip("torch")
    bits = np.concatenate([np.arange(2**16, dtype=np.uint32) << 16 | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001)])
    x = bits.view(np.float32)
    x = x[~np.isnan(x)]
    kept = kernels.new(x.size, "bf16")
    kernels.write(kept, x)
    rounded_by_torch = torch.from_numpy(x).bfloat16().float().numpy()
    beyond = np.isfinite(x) & np.isinf(rounded_by_torch)  # of which torch makes infinity, and no file takes that
    rounded_by_torch[beyond] = np.copysign(np.float32(3.3895314e38), x[beyond])
    assert beyond.any() and as_numpy(kernels, kept).tobytes() == rounded_by_torch.tobytes()
    kernels.write(kept, np.full(x.size, np.nan, np.float32))
    assert np.isnan(as_numpy(kernels, kept)).all()


@each_backend
def test_a_momentum_that_is_finite_stays_finite(kernels):
    """It became infinite in a step that was finite, and the checkpoint could not be loaded."""
    g = np.linspace(3.38e38, 3.4e38, 64, dtype=np.float32)
    g[::2] *= -1
    config = DGCConfig(density=0.1, min_numel=1, compress_1d=True, momentum_dtype="bf16", factor_masking=False)
    engine = BucketEngine(Bucket(0, (Segment("p", 0, 64),)), config, kernels, 0, 1)
    engine.add_gradient(0, as_array(kernels, g), MomentumCorrection(0.9))
    engine.receive(engine.compress(1.0, 0, 0.1).payload)
    assert engine.exchange.outcome.finite
    u = as_numpy(kernels, engine.state.u)
    assert np.isfinite(u).all() and u.tobytes() == widened(rounded(g)).tobytes()


@pytest.mark.parametrize(("momentum", "low"), [(0.9, 0.03), (0.99, 0.24)])
def test_the_momentum_of_a_gradient_that_never_changes_comes_out_low(momentum, low):
    """The figures of docs/algorithm.md."""
    g, u = np.float32(1e-3), np.zeros(1, np.float32)
    for _ in range(2000):
        u = widened(rounded(np.float32(momentum) * u + g))
    assert 1 - float(u[0]) * (1 - momentum) / float(g) == pytest.approx(low, abs=0.005)


def test_a_momentum_that_bfloat16_has_no_digits_for_is_refused():
    """At 0.997 and above u * m is rounded back to u: it would push for ever."""
    config = DGCConfig(density=0.1, min_numel=1, compress_1d=True, values="fp32", momentum_dtype="bf16")
    for momentum in (0.99, 0.9901, 0.999):
        engine = BucketEngine(Bucket(0, (Segment("p", 0, 64),)), config, BACKENDS[0], 0, 1)
        if momentum > 0.99:
            with pytest.raises(
                UnsupportedUse, match=f"too few digits for a momentum of {momentum}, which would hardly fade"
            ):
                engine.add_gradient(0, np.ones(64, np.float32), MomentumCorrection(momentum))
            continue
        for step in range(1500):
            g = DATA["normal"](64, 0) if step == 0 else np.zeros(64, np.float32)
            engine.add_gradient(0, g, MomentumCorrection(momentum))
            engine.receive(engine.compress(1.0, step, 0.1).payload)
        left = np.abs(as_numpy(BACKENDS[0], engine.state.u)).max()
        assert left < 1e-4, "it fades"
