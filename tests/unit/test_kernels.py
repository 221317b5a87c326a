"""Every backend against the NumPy reference, bit for bit, at odd sizes, with ties and extreme values."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgc_horovod import envvars
from dgc_horovod.errors import BackendUnavailable, ConfigError, UnsupportedUse
from dgc_horovod.kernels import registry
from dgc_horovod.kernels.contract import (
    CHUNK,
    Elements,
    ErrorFeedback,
    MomentumCorrection,
    Search,
    SharedMoment,
    State,
)  # fmt: skip
from dgc_horovod.kernels.native import library
from dgc_horovod.kernels.native.kernels import NativeKernels
from dgc_horovod.kernels.reference import ReferenceKernels, first_sign, summed_numel
from dgc_horovod.wire.bucket import Bucket, Segment
from tests.helpers.data import BACKENDS, DATA, EACH, as_array, as_numpy

REFERENCE = ReferenceKernels()
SIZES = [1, 2, 63, 100, 4095, 4096, 4097, 70_001]
FEEDS = [ErrorFeedback(), MomentumCorrection(0.9), MomentumCorrection(0.9, True)]
SHARED = "shared"  # as a feed: by a second moment of as many columns as `run_pass` draws


def same(a, b):
    """Elements of two backends, or one list of them, are equal to the bit."""
    return (a.positions == b.positions).all() and a.values.tobytes() == b.values.tobytes()


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("kind", DATA)
def test_looking(kernels, kind, numel):
    x = DATA[kind](numel, 3)
    array = as_array(kernels, x)
    assert kernels.sums(array) == REFERENCE.sums(x)
    assert kernels.sampled_sums(array) == REFERENCE.sampled_sums(x)
    for k in {1, max(1, numel // 100), numel // 2 + 1, numel}:
        assert same(kernels.top_k(array, k), REFERENCE.top_k(x, k))
        few = kernels.at_least(array, 0.0)
        assert same(kernels.keep_largest(few, k), REFERENCE.top_k(x, k))
        assert kernels.kth_largest(x, k) == np.sort(np.abs(x))[numel - k]
    for threshold in (0.0, float(np.abs(x).mean()), float(np.abs(x).max())):
        assert kernels.count_at_least(array, threshold) == REFERENCE.count_at_least(x, threshold)
        found = REFERENCE.at_least(x, threshold)
        assert same(kernels.at_least(array, threshold), found)
        assert same(kernels.keep_at_least(kernels.at_least(array, 0.0), threshold), found)
    assert (kernels.sample(array, numel // 3, 7) == REFERENCE.sample(x, numel // 3, 7)).all()


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**31))
def test_top_k_by_definition(numel, k, seed):
    """Against a full sort, with many ties: larger first, then lower position, zeros never."""
    x = np.random.default_rng(seed).integers(-3, 4, numel).astype(np.float32)
    order = np.lexsort((np.arange(numel), -np.abs(x)))[: min(k, np.count_nonzero(x))]
    for kernels in BACKENDS:
        assert kernels.top_k(as_array(kernels, x), min(k, numel)).positions.tolist() == sorted(order.tolist())


@given(st.integers(1, 9000), st.integers(0, 5000), st.sampled_from([1, 7, 64, 100, 3000]), st.integers(0, 99))
def test_measure_by_definition(numel, offset, width, seed):
    """Each row, each column, each product, in float64, of a run that may begin and end anywhere."""
    rng = np.random.default_rng(seed)
    x, signs = rng.standard_normal(numel).astype(np.float32), rng.choice([-1, 1], 2 * width).astype(np.float32)
    at = np.arange(offset, offset + numel)
    row, wide = at // width - offset // width, x.astype(np.float64)
    expected = [np.bincount(row, wide**2), np.bincount(at % width, wide**2, width)]
    expected = np.concatenate([*expected, np.bincount(row, wide * signs[first_sign(at // width, width) + at % width])])
    for kernels in BACKENDS:
        found = kernels.measure(as_array(kernels, x), offset, as_array(kernels, signs))
        np.testing.assert_allclose(as_numpy(kernels, found), expected, rtol=1e-5, atol=1e-5 * np.sqrt(width))


def test_sums_count_what_is_not_finite_as_zero(kernels):
    x = np.full(10_000, 3e38, np.float32)
    assert np.isfinite(kernels.sums(as_array(kernels, x))[1])
    for bad in (np.nan, np.inf, -np.inf):
        y = x.copy()
        y[777] = bad
        assert kernels.sums(as_array(kernels, y)) == REFERENCE.sums(np.where(np.arange(10_000) == 777, 0, x))


def test_sampled_sums_look_at_a_part_of_a_long_vector():
    assert [summed_numel(n) for n in (0, 1, 5000, 127 * CHUNK)] == [0, 1, 5000, 127 * CHUNK]
    assert summed_numel(513 * CHUNK - 1) == 65 * CHUNK - 1 and summed_numel(1600 * CHUNK) == 100 * CHUNK
    x = np.zeros(600 * CHUNK, np.float32)
    x[: 7 * CHUNK] = 1
    for kernels in BACKENDS:
        assert kernels.sampled_sums(as_array(kernels, x)) == (CHUNK, CHUNK)


def run_pass(kernels, sizes, feeds, threshold, room, moments, scale, seed, bad=()):
    """Two passes over a bucket of segments of `sizes`, something sent after each; all that they change or report."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    bucket = Bucket(0, tuple(Segment(str(i), start, n) for i, (start, n) in enumerate(zip(starts, sizes, strict=True))))
    rng = np.random.default_rng(seed)
    vectors = [rng.standard_normal(bucket.numel).astype(np.float32) for _ in range(2)]
    arrays = [as_array(kernels, x) for x in vectors]
    state = State(arrays[0], arrays[1])
    gradients, outcome = kernels.gradients(bucket), []
    feeds = [shared_of(kernels, n, seed + i) if feeds[i] == SHARED else feeds[i] for i, n in enumerate(sizes)]
    for step in range(2):
        g = np.random.default_rng(seed + step).standard_normal(bucket.numel).astype(np.float32)
        g[list(bad)] = [np.nan, np.inf, -np.inf][: len(bad)]
        parts = [as_array(kernels, g[segment.place]) for segment in bucket.segments]
        for i, part in enumerate(parts):
            gradients.put(i, part, feeds[i])
        outcome.append(gradients.squared_norm())
        seen = kernels.accumulate(gradients, state, scale, Search(threshold, room, moments))
        found = None if seen.candidates is None else [x.tobytes() for x in seen.candidates]
        outcome.append((seen.gradients_finite, seen.residual_finite, seen.num_candidates, found, seen.sums))
        outcome.append([as_numpy(kernels, x).tobytes() for x in arrays])
        outcome.append([as_numpy(kernels, x).tobytes() for x in parts])
        at = np.arange(seed % 7, bucket.numel, 9 + seed % 30, dtype=np.int32)
        sent = Elements(at, kernels.take(state.v, at))
        kernels.update_residual(state, sent, sent.values / 2, None)
    return outcome


def shared_of(kernels, numel, seed):
    """Factors of a tensor of which a segment of `numel` elements is a run."""
    rng = np.random.default_rng(seed)
    offset, width = int(rng.integers(0, 100)), int(rng.choice([1, 9, 64, 100, 5000]))
    rows, columns = (rng.random(size).astype(np.float32) * 9 for size in (-(-(offset + numel) // width), width))
    return SharedMoment(as_array(kernels, rows), as_array(kernels, columns), 9.0, offset)


@pytest.mark.parametrize("backend", EACH[1:])
@given(
    sizes=st.lists(st.one_of(st.integers(1, 70), st.sampled_from([4095, 4096, 4097, 9001])), min_size=1, max_size=5),
    shared=st.booleans(),
    threshold=st.sampled_from([float(np.float32(1e-3)), 1.5, 3.0, np.inf]),
    moments=st.booleans(),
    scale=st.sampled_from([1.0, 0.3, 2.0**-10]),
    bad=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_the_pass(backend, sizes, shared, threshold, moments, scale, bad, seed):
    """u, v, candidates, sums and verdicts, with segments at any offset."""
    every = [SHARED, SHARED, FEEDS[0]] if shared else FEEDS
    feeds = [every[(seed + i) % 3] for i in range(len(sizes))]
    total = sum(sizes)
    where = sorted(np.random.default_rng(seed).choice(total, min(bad, total), replace=False).tolist())
    room = total if seed % 4 else total // 50
    arguments = (sizes, feeds, threshold, room, moments, scale, seed, where)
    ours, theirs = (run_pass(each, *arguments) for each in (backend, REFERENCE))
    for ours_one, theirs_one in zip(ours, theirs, strict=True):
        assert ours_one == theirs_one
    assert ours[1][0] == (not where)


def test_a_pass_of_several_threads_without_room_for_candidates():
    """It copied no bytes between null pointers, which C++ leaves undefined; the sanitizers of `ci/sanitize` see it."""
    arguments = [300_001], FEEDS[1:2], np.inf, 0, False, 1.0, 0
    assert run_pass(NativeKernels(2), *arguments) == run_pass(REFERENCE, *arguments)


@pytest.mark.parametrize("gradient", ["float64", "float16", "int32", "too short", "too long"])
@pytest.mark.parametrize("of", ["numpy", "torch"])
def test_the_library_is_given_no_address_of_anything_else(gradient, of):
    """Eight bytes a number were read as two numbers, and what lies behind a vector as its end."""
    sizes = {"too short": 9, "too long": 11}
    torch = pytest.importorskip("torch")
    x = np.ones(sizes.get(gradient, 10), "float32" if gradient in sizes else gradient)
    gradients = NativeKernels(1).gradients(Bucket(0, (Segment("w", 0, 10),)))
    gradients.put(0, np.ones(10, np.float32), ErrorFeedback())
    with pytest.raises(UnsupportedUse, match=r"'w' has \d+ bytes of .*, expected 10 numbers of float32"):
        gradients.put(0, torch.from_numpy(x) if of == "torch" else x, ErrorFeedback())


def aimed(kernels, bucket, arrays):
    outputs = kernels.outputs(bucket)
    for i, array in enumerate(arrays):
        outputs.put(i, array)
    return outputs


def test_an_overflow_of_the_sum_is_seen(kernels):
    into = aimed(kernels, Bucket(0, (Segment("a", 0, 10),)), [kernels.new(10)])
    huge = Elements(np.array([5], np.int32), np.array([3e38], np.float32))
    assert kernels.aggregate_into(into, [huge], 1.0, True)
    assert not kernels.aggregate_into(into, [huge, huge], 1.0, True)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 10_000))
def test_an_update_is_the_sum_in_rank_order(workers, first, seed):
    """Of many magnitudes, whose bits depend on the order of addition; in one call, or `first` ranks before others."""
    rng = np.random.default_rng(seed)
    numel = int(rng.integers(1, 120_000))
    bucket = Bucket(0, (Segment("a", 0, numel // 3 + 1), Segment("b", numel // 3 + 1, numel - numel // 3)))
    ranks = []
    for _ in range(workers):
        positions = np.sort(rng.choice(bucket.numel, min(200, bucket.numel), replace=False)).astype(np.int32)
        ranks.append(
            Elements(positions, (rng.standard_normal(positions.size) * 10.0 ** rng.integers(-6, 7)).astype("f4"))
        )
    expected = np.zeros(bucket.numel, np.float32)
    for positions, values in ranks:
        expected[positions] += values * np.float32(1 / workers)
    for kernels in BACKENDS:
        outputs = [as_array(kernels, np.full(s.numel, np.nan, np.float32)) for s in bucket.segments]
        into = aimed(kernels, bucket, outputs)
        assert kernels.aggregate_into(into, ranks[:first], 1 / workers, True)
        assert kernels.aggregate_into(into, ranks[first:], 1 / workers, False)
        assert np.concatenate([as_numpy(kernels, t) for t in outputs]).tobytes() == expected.tobytes()
        assert kernels.aggregate_dense(into, as_array(kernels, expected), 0.5)
        assert np.concatenate([as_numpy(kernels, t) for t in outputs]).tobytes() == (expected / 2).tobytes()


@pytest.mark.parametrize("threshold", [2.5, 3.5])  # many candidates a chunk, and few, are noted in two ways
def test_instruction_sets_and_threads_agree_to_the_bit(threshold):
    """On a bucket long enough for several threads, with every feed: the same bits as the reference's."""
    feeds, sizes = FEEDS, [300_001, 17, 500_000]

    def passes(kernels):
        yield run_pass(kernels, sizes, feeds, threshold, 100_000, True, 0.3, 1, [5, 300_010])
        yield run_pass(kernels, sizes, [SHARED] * 3, threshold, 100_000, False, 0.3, 3)

    expected, tried = list(passes(REFERENCE)), []
    widest = NativeKernels().instructions
    try:
        for name, threads in itertools.product(("plain", "AVX2", "AVX-512"), (1, 2, 5)):
            kernels = NativeKernels(threads)
            if kernels.use_instructions(name):
                tried.append(name)
                assert list(passes(kernels)) == expected
    finally:
        NativeKernels().use_instructions(widest)
    assert "plain" in tried and not NativeKernels().use_instructions("quantum")


@pytest.mark.parametrize("numel", [0, 1, 1025, 524_287, 524_288, 3_000_001])
def test_state_begins_with_a_page_and_is_zero(numel):
    x = NativeKernels().new(numel)
    assert x.dtype == np.float32 and x.size == numel and not x.any() and x.flags.writeable
    assert numel == 0 or x.ctypes.data % 4096 == 0
    x[:] = 1  # as long as it is asked for


def test_native_shares_the_threads_of_torch():
    """The pool that runs our loops is the OpenMP runtime that torch has loaded, not a second one."""
    torch = pytest.importorskip("torch")
    assert NativeKernels().threads == torch.get_num_threads()
    if "OpenMP" in torch.__config__.parallel_info():
        assert library.openmp_of_the_process(), "torch has an OpenMP runtime, and it was not found"
    code = "import torch; from dgc_horovod.kernels.native.kernels import NativeKernels; NativeKernels(2)"
    code += "; print({l.split()[-1] for l in open('/proc/self/maps') if 'libgomp' in l or 'libiomp' in l})"
    alone = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(ast.literal_eval(alone.stdout)) <= 1, f"two OpenMP runtimes in one process: {alone.stdout}"


def test_a_stale_or_broken_library_is_named(tmp_path, monkeypatch):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    for path in (tmp_path / "missing.so", broken):
        with pytest.raises(BackendUnavailable, match="does not load"):
            library.load(path)
    monkeypatch.setattr(library, "_INTERFACE", -1)
    with pytest.raises(BackendUnavailable, match="install dgc_horovod again"):
        library.load()


def test_a_library_of_another_machine_is_passed_over(tmp_path, monkeypatch):
    """The first by name was taken, and no other tried."""
    (ours, *_) = library.library_paths()
    (tmp_path / "_native.another.so").write_bytes(b"of another machine")
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    with pytest.raises(BackendUnavailable, match=r"another\.so"):
        library.load()
    for name in (ours.name, "_native.some.so"):
        copied = tmp_path / name
        copied.symlink_to(ours)
        assert library.load().dgc_interface() == library._INTERFACE
        assert (library.library_paths()[0] == copied) == (name == ours.name)
        copied.unlink()


def test_registry(monkeypatch):
    assert registry.choose("cpu").name == "native"
    monkeypatch.setenv("DGC_BACKEND", "reference")
    assert registry.choose("cpu").name == "reference"
    with pytest.raises(BackendUnavailable, match="NumPy cannot hold cuda tensors"):
        registry.choose("cuda:0")
    monkeypatch.setenv("DGC_BACKEND", "native")
    with pytest.raises(BackendUnavailable, match="no kernels for cuda tensors"):
        registry.choose("cuda:0")
    monkeypatch.setenv("DGC_BACKEND", "fast")
    with pytest.raises(ConfigError, match="must be one of auto, native, triton, torch_eager, reference, got 'fast'"):
        registry.choose("cpu")
    assert ("auto", *registry.BACKENDS) == envvars.BACKEND.kind.choices


def test_without_the_library_it_works_and_says_once_that_it_is_slower(monkeypatch, caplog):
    monkeypatch.setattr(library, "library_paths", list)
    registry._say_once.cache_clear()
    assert [registry.choose("cpu").name for _ in range(2)] == ["torch_eager"] * 2
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and "several times slower" in said[0] and "was not built" in said[0]


def test_native_kernels_keep_denormals_whatever_the_program_asked_for():
    """torch.set_flush_denormal concerns the thread that calls it; a result must not depend on which thread it is."""
    torch = pytest.importorskip("torch")
    x = DATA["denormal"](600_001, 0)
    expected = [part.tobytes() for part in REFERENCE.at_least(x, 0.0)]
    bucket = Bucket(0, (Segment("a", 0, x.size),))
    sent = Elements(np.arange(x.size, dtype=np.int32), x)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor flushes nothing")
    try:
        for threads in (1, 2, 5):
            kernels, target = NativeKernels(threads), np.full(x.size, np.nan, np.float32)
            assert [part.tobytes() for part in kernels.at_least(x, 0.0)] == expected
            into = aimed(kernels, bucket, [target])
            assert kernels.aggregate_into(into, [sent], 1.0, True)
            torch.set_flush_denormal(False)
            assert (target == x).all(), threads
            torch.set_flush_denormal(True)
    finally:
        torch.set_flush_denormal(False)
