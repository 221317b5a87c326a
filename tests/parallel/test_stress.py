"""A long run: replicas stay identical, memory stays flat, nothing hangs."""

from __future__ import annotations

import statistics

import pytest

from tests.helpers.ranks import run_ranks
from tests.parallel.cases.stress import CHECK_EVERY

pytestmark = pytest.mark.parallel


@pytest.mark.timeout(1700)
@pytest.mark.parametrize(
    ("controller", "workers", "steps"),
    [
        ("gloo", 2, 400),
        pytest.param("gloo", 4, 10_000, marks=pytest.mark.slow),
        pytest.param("mpi", 4, 10_000, marks=[pytest.mark.slow, pytest.mark.mpi]),
    ],
)
def test_a_long_run(controller, workers, steps):
    environment = {"STRESS_STEPS": str(steps), "CASE_TIMEOUT": "1500"}
    ranks = run_ranks(workers, ["stress.long_run"], controller, timeout=1600, environment=environment)
    found = [rank["stress.long_run"] for rank in ranks]
    assert all(rank["steps"] == steps and rank["finite"] for rank in found)
    assert len({str(rank["weights"]) for rank in found}) == 1
    for rank in found:
        settled = rank["memory"][min(500, steps // 2) // CHECK_EVERY :]
        third = len(settled) // 3
        growth = statistics.median(settled[-third:]) - statistics.median(settled[:third])
        assert growth < 4, f"{growth:.1f} MiB more at the end than in the middle"
        assert sum(density < 0.02 for density in rank["density"]) >= 4 and rank["slowest"] < 60
        assert 0 < max(rank["age"]) <= steps
