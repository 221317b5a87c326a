"""Candidates change how long a selection takes, never what it selects; and in a steady run one pass is enough."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from dgc_horovod import DGCConfig
from dgc_horovod.config import RULES
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.core.selection import ResidualView, ThresholdPredictor, accepted_counts, select
from dgc_horovod.kernels.contract import MomentumCorrection
from dgc_horovod.kernels.native.kernels import NativeKernels
from dgc_horovod.wire.bucket import Bucket, Segment
from tests.helpers.data import DATA, as_array

NUMEL = 200_000


@pytest.mark.parametrize("kind", ["normal", "log-normal scaled", "ties"])
@pytest.mark.parametrize("rule", RULES)
def test_the_selection_is_the_same_for_every_threshold(rule, kind, kernels):
    x, k = DATA[kind](NUMEL, 3), 400
    array = as_array(kernels, x)

    def generator():
        return np.random.default_rng(5)

    plain = select(rule, ResidualView(kernels, array), k, generator)
    sizes = np.sort(np.abs(x))[::-1]
    for rank in (k // 4, k - 1, k + 50, 4 * k, NUMEL - 1):  # a threshold too high, just right, too low
        candidate_threshold = max(float(sizes[rank]), 1e-30)
        candidates = kernels.at_least(array, candidate_threshold)
        chosen = select(rule, ResidualView(kernels, array, candidates, candidate_threshold), k, generator)
        if rule == "gaussian":  # the threshold is a bracket of its search, which may end at another accepted count
            least, _ = accepted_counts(k)
            assert least <= chosen.values.size <= k
            exact = ResidualView(kernels, array).largest(chosen.values.size)
            assert (np.abs(chosen.values).sum() == np.abs(exact.values).sum()).all()
        else:
            assert (chosen.positions == plain.positions).all() and (chosen.values == plain.values).all()
        assert (chosen.values == x[chosen.positions]).all()


class _Counting(NativeKernels):
    """Counts how often the bucket is read beyond the pass."""

    extra = 0

    def at_least(self, x, threshold):
        self.extra += 1
        return super().at_least(x, threshold)

    def top_k(self, x, k):
        self.extra += 1
        return super().top_k(x, k)

    def count_at_least(self, x, threshold):
        self.extra += x.size == NUMEL
        return super().count_at_least(x, threshold)


def run(engine, steps, scales, factor=lambda step: 1.0):
    """Steps of one engine on gradients of fixed scales; candidates per selected element at each."""
    rng, ratios = np.random.default_rng(1), []
    for step in range(steps):
        g = (rng.standard_normal(NUMEL) * scales * factor(step)).astype(np.float32)
        engine.add_gradient(0, g, MomentumCorrection(0.9))
        engine.compress(1.0, step, 0.002)
        ratios.append(engine.gradients.scratch.count / 400)
    return ratios


def make_engine(kernels, **fields):
    return BucketEngine(Bucket(0, (Segment("a", 0, NUMEL),)), DGCConfig(density=0.002, **fields), kernels, 0, 1)


@pytest.mark.parametrize("rule", ["exact", "sampled", "gaussian"])
@pytest.mark.parametrize("spread", [0.0, 1.0], ids=["iid", "log-normal"])
def test_a_steady_run_reads_the_bucket_once_a_step(rule, spread):
    kernels = _Counting()
    engine = make_engine(kernels, rule=rule)
    scales = np.exp(spread * np.random.default_rng(0).standard_normal(NUMEL))
    run(engine, 40, scales)
    kernels.extra = 0
    ratios = run(engine, 60, scales)
    assert kernels.extra <= (9 if rule == "sampled" else 6), f"{kernels.extra} more reads in 60 steps"
    assert 1 <= np.median(ratios) < 2.5


def test_prediction_recovers_from_gradients_that_jump():
    kernels = _Counting()
    engine = make_engine(kernels)
    scales = np.exp(np.random.default_rng(0).standard_normal(NUMEL))
    run(engine, 120, scales, lambda step: 10.0 if 40 <= step < 80 else 1.0)
    kernels.extra = 0
    run(engine, 40, scales)
    assert kernels.extra <= 6


def test_nothing_the_size_of_a_bucket_is_allocated_after_the_first_steps():
    engine = make_engine(NativeKernels())
    scales = np.ones(NUMEL)
    run(engine, 20, scales)
    gradients = [np.random.default_rng(s).standard_normal(NUMEL).astype(np.float32) for s in range(5)]
    tracemalloc.start()
    try:
        for step, g in enumerate(gradients):
            engine.add_gradient(0, g, MomentumCorrection(0.9))
            engine.compress(1.0, 100 + step, 0.002)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * NUMEL / 10, f"{peak} bytes at once, for a bucket of {4 * NUMEL}"


def test_predictor_alone():
    predictor, half = ThresholdPredictor(1000, 10), ThresholdPredictor(1000, 500)
    assert predictor.threshold == half.threshold == np.inf
    assert (predictor.max_candidates, half.max_candidates) == (1000, 0)
    predictor.learn(10, 1.0, 0)
    assert 0.9 < predictor.threshold < 1
    before = predictor.threshold
    predictor.learn(10, 1.0, 5)  # too few: it looks further down
    assert predictor.threshold < before
    half.learn(500, 1.0, 0)
    assert half.threshold == np.inf, "where half of everything is sent, candidates save nothing"
    predictor.learn(2, 1.0, 0)
    assert predictor.threshold == np.inf, "after a step that sent little, nothing is guessed"
