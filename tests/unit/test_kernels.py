"""Every backend against the NumPy reference, bit for bit, at odd sizes, with ties and extreme values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgc_horovod.errors import BackendUnavailable, ConfigError
from dgc_horovod.ops import registry
from dgc_horovod.ops.reference import ReferenceKernels
from tests.helpers.data import BACKENDS, DATA, as_array, as_numpy

REFERENCE = ReferenceKernels()
SIZES = [1, 2, 63, 100, 4095, 4096, 4097, 70_001]


@pytest.fixture(params=BACKENDS, ids=lambda kernels: kernels.name)
def kernels(request):
    return request.param


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("kind", DATA)
def test_reductions_and_selection(kernels, kind, numel):
    x = DATA[kind](numel, 3)
    array = as_array(kernels, x)
    assert kernels.sums(array) == REFERENCE.sums(x)
    assert kernels.all_finite(array)
    for k in {1, max(1, numel // 100), numel // 2 + 1, numel}:
        assert (kernels.top_k(array, k) == REFERENCE.top_k(x, k)).all()
    for threshold in (0.0, float(np.abs(x).mean()), float(np.abs(x).max())):
        assert kernels.count_at_least(array, threshold) == REFERENCE.count_at_least(x, threshold)
        assert (kernels.positions_at_least(array, threshold) == REFERENCE.positions_at_least(x, threshold)).all()
    assert (kernels.sample(array, numel // 3, 7) == REFERENCE.sample(x, numel // 3, 7)).all()


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.3, 2.0**-10])
def test_accumulation(kernels, numel, nesterov, scale):
    rng = np.random.default_rng(numel)
    start = [rng.standard_normal(numel).astype(np.float32) for _ in range(3)]
    ours, theirs = [[as_array(kernels, x) for x in start], [x.copy() for x in start]]
    moments = [as_array(kernels, np.abs(start[0])), as_array(kernels, np.abs(start[1]))]
    ref_moments = [np.abs(start[0]), np.abs(start[1])]
    for step in (1, 2, 50):
        g = rng.standard_normal(numel).astype(np.float32)
        kernels.accumulate_momentum(ours[0], ours[1], as_array(kernels, g), scale, 0.9, nesterov)
        REFERENCE.accumulate_momentum(theirs[0], theirs[1], g, scale, 0.9, nesterov)
        kernels.accumulate_residual(ours[2], as_array(kernels, g), scale)
        REFERENCE.accumulate_residual(theirs[2], g, scale)
        kernels.accumulate_adam(*moments, ours[2], as_array(kernels, g), scale, (0.9, 0.999), 1e-8, step)
        REFERENCE.accumulate_adam(*ref_moments, theirs[2], g, scale, (0.9, 0.999), 1e-8, step)
    for a, b in zip([*ours, *moments], [*theirs, *ref_moments], strict=True):
        assert (as_numpy(kernels, a) == b).all()


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**31))
def test_top_k_by_definition(numel, k, seed):
    """Against a full sort, with many ties: larger first, then lower position, zeros never."""
    x = np.random.default_rng(seed).integers(-3, 4, numel).astype(np.float32)
    order = np.lexsort((np.arange(numel), -np.abs(x)))[: min(k, np.count_nonzero(x))]
    for kernels in BACKENDS:
        assert kernels.top_k(as_array(kernels, x), min(k, numel)).tolist() == sorted(order.tolist())


def test_sums_are_exact_enough_and_see_what_is_not_finite(kernels):
    x = np.full(10_000, 3e38, np.float32)
    assert np.isfinite(kernels.sums(as_array(kernels, x))[1])
    for bad in (np.nan, np.inf, -np.inf):
        y = x.copy()
        y[777] = bad
        assert not np.isfinite(kernels.sums(as_array(kernels, y))[1])
        assert not kernels.all_finite(as_array(kernels, y))


def test_put_add_and_scale(kernels):
    x = as_array(kernels, np.zeros(10, np.float32))
    positions, values = np.array([1, 4, 9]), np.array([1, 2, 3], np.float32)
    kernels.put(x, positions, values)
    kernels.add_at(x, positions, values)
    assert as_numpy(kernels, x).tolist() == [0, 2, 0, 0, 4, 0, 0, 0, 0, 6]
    y = kernels.new(10)
    kernels.copy_scaled(y, x, 0.5)
    assert kernels.take(y, positions).tolist() == [1, 2, 3]
    kernels.fill_zero(x)
    assert not as_numpy(kernels, x).any()


def test_registry(monkeypatch):
    assert registry.choose("cpu").name == "torch_eager"
    monkeypatch.setenv("DGC_BACKEND", "reference")
    assert registry.choose("cpu").name == "reference"
    with pytest.raises(BackendUnavailable, match="NumPy cannot hold cuda tensors"):
        registry.choose("cuda:0")
    monkeypatch.setenv("DGC_BACKEND", "fast")
    with pytest.raises(ConfigError, match="must be one of auto, torch_eager, reference, got 'fast'"):
        registry.choose("cpu")
