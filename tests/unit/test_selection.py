"""The rules: how many they select, which, and that position plays no part."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dgc_horovod import DGCConfig
from dgc_horovod.config import RULES, Rule
from dgc_horovod.core import selection
from dgc_horovod.core.selection import ResidualView, accepted_counts, select
from dgc_horovod.errors import ConfigError
from tests.helpers.data import BACKENDS, CONTINUOUS, DATA, as_array

SIZES = [1, 2, 63, 100, 4097]
DENSITIES = [0.001, 0.01, 0.1, 0.5]


def chosen(rule, kernels, x, k, seed=0):
    view = ResidualView(kernels, as_array(kernels, x))
    positions, values = select(rule, view, k, lambda: np.random.default_rng(seed))
    assert (values == x[positions]).all()
    assert (np.diff(positions) > 0).all(), "positions are not ascending and unique"
    assert (x[positions] != 0).all(), "a zero was sent"
    return positions


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("rule", RULES)
def test_bounds_of_k(rule, kernels, kind, numel):
    x = DATA[kind](numel, 5)
    nonzero = np.count_nonzero(x)
    for density in DENSITIES:
        k = max(1, math.ceil(density * numel))
        count = chosen(rule, kernels, x, k).size
        fraction = RULES[rule].min_fraction
        least = k - 1 if k < 10 and fraction < 1 else math.ceil(fraction * k)
        assert min(least, nonzero) <= count <= k
        assert count > 0 or nonzero == 0, "nothing sent although there is something"


def test_magnitudes_near_the_largest_float(kernels):
    """The guess lay beyond float32, which no element reaches, and of no elements there is no quantile."""
    signs = np.random.default_rng(0).choice([-1, 1], 10_000)
    for largest in (1e38, 3.4e38):
        x = (signs * np.linspace(1e38, largest, 10_000)).astype(np.float32)
        for k in (1, 10, 1000):
            assert 0.8 * k <= chosen("gaussian", kernels, x, k).size <= k


@pytest.mark.parametrize("rule", RULES)
def test_density_one_sends_everything(rule, kernels):
    x = DATA["ties"](1000, 0)
    assert (chosen(rule, kernels, x, 1000) == np.flatnonzero(x)).all()


@pytest.mark.parametrize("rule", ["gaussian", "sampled"])
def test_threshold_rules_hold_their_bounds_on_residual_fed_data(rule, kernels):
    """Error feedback thins the tail: where the published loop sends nothing, or seventy times k."""
    rng = np.random.default_rng(1)
    numel, k = 40_000, 250  # large enough that `sampled` does take a sample
    for scales in (np.ones(numel), rng.lognormal(0, 1, numel)):
        u, v = np.zeros(numel), np.zeros(numel)
        inside = total = 0
        for _ in range(80):
            u = 0.9 * u + rng.standard_normal(numel) * scales
            v += u
            positions = chosen(rule, kernels, v.astype(np.float32), k)
            assert 2 * k / 3 <= positions.size <= k
            inside += 0.8 * k <= positions.size
            total += 1
            u[positions] = v[positions] = 0
        assert inside >= 0.99 * total


@pytest.mark.parametrize("kind", CONTINUOUS)
@pytest.mark.parametrize("rule", ["gaussian", "sampled"])
def test_threshold_rules_take_the_largest(rule, kernels, kind):
    """What they send is exactly the top of what they send: no smaller element before a larger one."""
    x = DATA[kind](50_000, 2)
    positions = chosen(rule, kernels, x, 500)
    exact = set(chosen("exact", kernels, x, positions.size).tolist())
    assert set(positions.tolist()) == exact


def test_exact_is_exact_above_the_size_where_it_samples(kernels):
    for kind in DATA:
        x = DATA[kind](200_003, 4)
        for k in (1, 200, 20_000, 199_999):
            order = np.lexsort((np.arange(x.size), -np.abs(x)))[: min(k, np.count_nonzero(x))]
            assert (chosen("exact", kernels, x, k) == np.sort(order)).all(), (kind, k)


@pytest.mark.parametrize("rule", RULES)
def test_no_positional_bias(rule, kernels):
    """On iid data every position is equally likely: chi-square over 64 stretches of positions, 300 draws."""
    rng = np.random.default_rng(7)
    draws, numel, k = 300, 2048, 256  # large enough that `sampled` does take a sample
    counts = np.zeros(64)
    for seed in range(draws):
        x = rng.standard_normal(numel).astype(np.float32)
        positions = chosen(rule, kernels, x, k, seed=seed)
        counts += np.bincount(positions // (numel // 64), minlength=64)
    expected = counts.sum() / 64
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # 63 degrees of freedom: mean 63, deviation 11.2; drawing without replacement only narrows it
    assert chi_square < 63 + 4 * 11.2, f"{rule}: {chi_square}"
    assert abs(counts[:32].sum() / counts.sum() - 0.5) < 4 * 0.5 / math.sqrt(counts.sum())


def test_a_rule_is_a_row_and_a_function(monkeypatch):
    """What is registered, config, engine and launcher know."""
    monkeypatch.setitem(RULES, "largest", Rule())
    monkeypatch.setitem(selection._SELECT, "largest", selection.exact)
    kernels = BACKENDS[0]
    x = DATA["normal"](1000, 0)
    config = DGCConfig(rule="largest", density=0.05)
    assert config.density == 0.05
    assert chosen("largest", kernels, x, 50).tolist() == chosen("exact", kernels, x, 50).tolist()
    with pytest.raises(ConfigError, match=r"rule must be one of exact.*largest"):
        DGCConfig(rule="smallest")


def test_accepted_counts():
    assert accepted_counts(1) == (1, 2) and accepted_counts(9) == (8, 10)
    assert accepted_counts(10) == (8, 12) and accepted_counts(1000) == (800, 1250)
