"""Value codecs: how far they may be off, from both sides; saturation; and that their error never feeds itself."""

from __future__ import annotations

import numpy as np
import pytest

from dgc_horovod.wire.codecs import VALUE_CODECS
from tests.helpers.data import DATA

VALUES = sorted(VALUE_CODECS)
# Relative error of the whole vector on a heavy-tailed selection: (least, most). The least shows that fewer bits travel.
ERROR = {
    "fp32": (0.0, 0.0),
    "fp16": (1e-5, 3e-4),
    "bf16": (1e-4, 3e-3),
    "8bit": (1e-3, 1e-2),
    "4bit": (1e-2, 8e-2),
    "2bit": (5e-2, 0.4),
}
BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "8bit": 8.125, "4bit": 4.25, "2bit": 2.25}


def through(name, values):
    codec = VALUE_CODECS[name]
    data = np.zeros(codec.nbytes(values.size), np.uint8)
    codec.encode(values, values.size, data)
    return codec.decode(data, values.size, values.size)


def largest_of(kind, numel=400_000, k=4000):
    x = DATA[kind](numel, 0)
    return x[np.sort(np.argsort(-np.abs(x), kind="stable")[:k])]


@pytest.mark.parametrize("name", VALUES)
def test_error_bounds_from_both_sides(name):
    least, most = ERROR[name]
    x = largest_of("laplace")
    error = np.linalg.norm(through(name, x) - x) / np.linalg.norm(x)
    assert least <= error <= most


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("kind", DATA)
def test_the_error_is_smaller_than_the_value(name, kind):
    """What rounding leaves in the residual is less than what was there: error feedback cannot blow up."""
    x = DATA[kind](5000, 1)
    error = np.linalg.norm((through(name, x) - x).astype(np.float64))
    assert error <= np.linalg.norm(x.astype(np.float64)) * (1 + 1e-6)


@pytest.mark.parametrize("name", VALUES)
def test_the_error_is_smaller_over_forty_orders_of_magnitude_too(name):
    wide = (10.0 ** np.random.default_rng(2).uniform(-30, 10, 5000)).astype(np.float32)
    error = through(name, wide).astype(np.float64) - wide
    assert np.linalg.norm(error) < (1 if name == "fp16" else 0.8) * np.linalg.norm(wide.astype(np.float64))


@pytest.mark.parametrize("name", VALUES)
def test_bits_a_value(name):
    assert VALUE_CODECS[name].nbytes(2560) == BITS[name] * 2560 / 8
    assert VALUE_CODECS[name].nbytes(1) % 4 == 0


@pytest.mark.parametrize(("name", "largest"), [("fp16", 65504.0), ("bf16", 3.3895313892515355e38)])
def test_values_saturate(name, largest):
    assert through(name, np.array([3.4e38, -3.4e38, 1.0], np.float32)).tolist() == [largest, -largest, 1.0]


@pytest.mark.parametrize("name", ["8bit", "4bit", "2bit"])
def test_the_largest_floats_stay_finite(name):
    x = np.full(300, np.finfo(np.float32).max)
    x[::3] *= -1
    assert np.isfinite(through(name, x)).all() and (np.sign(through(name, x)) == np.sign(x)).all()


def test_bf16_and_fp16_round_as_torch_does():
    torch = pytest.importorskip("torch")
    floats = np.random.default_rng(0).standard_normal(100_000).astype(np.float32) * np.float32(1e-4)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        assert (through(name, floats) == torch.from_numpy(floats).to(dtype).float().numpy()).all()


def test_four_bits_keep_the_ends_of_each_block_exactly():
    x = largest_of("normal")
    got = through("4bit", x)
    for block in range(0, x.size, 256):
        ours, theirs = np.abs(got[block : block + 256]), np.abs(x[block : block + 256])
        assert (ours.min(), ours.max()) == (theirs.min(), theirs.max())
        assert np.unique(ours).size <= 8


def test_two_bits_are_a_sign_and_two_means():
    x = np.array([1, -1, 3, -5, 2], np.float32)
    assert through("2bit", x).tolist() == pytest.approx([4 / 3, -4 / 3, 4, -4, 4 / 3])
