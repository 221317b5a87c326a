"""Value codecs: how far they may be off, from both sides; saturation; and that their error never feeds itself."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.gpu.transcript import Size, transcript
from dgc_horovod import DGCConfig
from dgc_horovod.kernels.reference import ReferenceKernels
from dgc_horovod.wire.codecs import INDEX_CODECS, VALUE_CODECS, BlockValues
from tests.helpers.data import DATA, EACH

VALUES = sorted(VALUE_CODECS)
# Relative error of the whole vector on a heavy-tailed selection: (least, most). The least shows that fewer bits travel.
# A codec that has no line here must only lose less than everything.
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
    least, most = ERROR.get(name, (0.0, 0.99))
    x = largest_of("laplace")
    error = np.linalg.norm(through(name, x) - x) / np.linalg.norm(x)
    assert least <= error <= most


def test_codes_on_the_wire_are_unique():
    for codecs in (INDEX_CODECS, VALUE_CODECS):
        assert len({codec.code for codec in codecs.values()}) == len(codecs)


def turning(j):
    """One large value among others just above or below where rounding turns: the worst for a shared scale."""
    x = np.full(256, 2.0 ** (-j / 16) * 1.001, np.float32)
    x[0] = 1.0
    return x


@pytest.mark.parametrize("name", VALUES)
def test_the_error_is_smaller_than_the_value(name):
    """What rounding leaves in the residual is less than what was there: error feedback cannot blow up."""
    wide = (10.0 ** np.random.default_rng(2).uniform(-30, 10, 5000)).astype(np.float32)
    cases = [(kind, draw(5000, 1), 1 + 1e-6) for kind, draw in DATA.items()]
    cases += [(f"around 2**-{j}/16", turning(j), 1 - 1e-12) for j in range(1, 200)]
    for case, x, most in [*cases, ("forty orders of magnitude", wide, 1 - 1e-12 if name == "fp16" else 0.8)]:
        error = through(name, x).astype(np.float64) - x
        assert np.linalg.norm(error) <= most * np.linalg.norm(x.astype(np.float64)), case


@pytest.mark.parametrize("name", BITS)
def test_bits_a_value(name):
    assert VALUE_CODECS[name].nbytes(2560) == BITS[name] * 2560 / 8
    assert VALUE_CODECS[name].nbytes(1) % 4 == 0


@pytest.mark.parametrize(("name", "largest"), [("fp16", 65504.0), ("bf16", 3.3895313892515355e38)])
def test_values_saturate(name, largest):
    assert through(name, np.array([3.4e38, -3.4e38, 1.0], np.float32)).tolist() == [largest, -largest, 1.0]


@pytest.mark.parametrize("name", VALUES)
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


class Thirds(BlockValues):
    """Known to NumPy alone: sign, and whole multiples, 0 to 3, of a third of the block's largest."""

    code, name, bits, scales = 101, "thirds", 3, 1

    def encode_rows(self, x, inside):
        scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(3)
        steps = np.rint(np.divide(np.abs(x), scale, out=np.zeros_like(x), where=scale > 0)).astype(np.int64)
        return np.signbit(x).astype(np.int64) << 2 | steps, scale

    def decode_rows(self, codes, scales):
        size = (codes & 3).astype(np.float32) * scales
        return np.where(codes & 4, -size, size)


@pytest.mark.parametrize("kernels", [*EACH, pytest.param("triton", marks=pytest.mark.slow)])
def test_a_codec_that_numpy_alone_knows_works_on_every_backend(kernels, monkeypatch):
    """Native kernels had written 2-bit codes in its place."""
    codec = Thirds()
    if kernels == "triton":
        kernels = pytest.importorskip("dgc_horovod.kernels.triton.kernels").TritonKernels("cpu")
    monkeypatch.setitem(VALUE_CODECS, codec.name, codec)
    config, size = DGCConfig(density=0.1, values=codec.name), Size("cpu", (2000, 1000), steps=3, ranks=2)
    assert transcript(kernels, config, size) == transcript(ReferenceKernels(), config, size)
    x = DATA["laplace"](3000, 0)
    assert 0 < np.linalg.norm(through(codec.name, x) - x) < np.linalg.norm(x)
