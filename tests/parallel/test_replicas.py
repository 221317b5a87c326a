"""Replicas are bit-identical on every backend of Horovod, whatever is selected and whenever it arrives."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks
from tests.parallel.cases.replicas import COMPRESSIONS

pytestmark = pytest.mark.parallel
LAUNCHES = [
    ("gloo", 2),
    pytest.param("gloo", 3, marks=pytest.mark.slow),
    pytest.param("gloo", 4, marks=pytest.mark.slow),
    pytest.param("mpi", 2, marks=[pytest.mark.mpi, pytest.mark.slow]),
]


@pytest.mark.parametrize(("controller", "workers"), LAUNCHES)
def test_replicas_identical_after_50_steps_of_every_rule(controller, workers):
    ranks = run_ranks(workers, ["replicas.every_rule"], controller)
    for name in COMPRESSIONS:
        runs = [rank["replicas.every_rule"][name] for rank in ranks]
        assert len({run["fingerprint"] for run in runs}) == 1, f"{name}: the ranks' weights differ"
        first, last = runs[0]["losses"]
        assert last < first, f"{name}: it does not learn ({first} -> {last})"
        stats = runs[0]["stats"]
        density = stats["selected"] / stats["elements"]
        most = {"threshold": 0.15, "dgc fp16 clip warm-up": 0.3}.get(name, 0.0115)
        assert 0.002 < density <= most, f"{name}: density {density}, so it was dense or silent"
        assert stats["bytes_sent"] < 0.6 * stats["bytes_dense"], f"{name}: {stats}"


@pytest.mark.parametrize(("controller", "workers"), LAUNCHES)
def test_arrival_order_unused_parameters_and_a_second_optimizer(controller, workers):
    cases = ["replicas.arrival_order", "replicas.unused_parameters", "replicas.two_optimizers"]
    ranks = run_ranks(workers, [*cases, "replicas.large_bucket"], controller)
    for rule in ("exact", "sampled", "gaussian"):
        runs = [rank["replicas.large_bucket"][rule] for rank in ranks]
        assert len({run["fingerprint"] for run in runs}) == 1, rule
        assert all(0.8 * 0.005 <= run["density"] <= 0.00501 for run in runs), rule
    for case in cases:
        assert len({str(rank[case]["fingerprint"]) for rank in ranks}) == 1, case
    orders = [rank["replicas.arrival_order"]["order"] for rank in ranks]
    assert orders[0] != orders[1], "the case no longer produces different orders"
    assert ranks[0]["replicas.unused_parameters"]["moved"] > 0, "what one rank alone used never arrived"
    two = ranks[0]["replicas.two_optimizers"]
    assert two["fingerprint"][1] == two["alone"], "a second optimizer changed the result of the first"
