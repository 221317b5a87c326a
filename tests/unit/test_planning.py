"""The planner: bytes are those that exchanges count, seconds those of single messages, and laws of both."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgc_horovod import DGCConfig
from dgc_horovod.core.bucketing import TensorSpec, card_bytes
from dgc_horovod.exchange.contract import ALLGATHER, ALLREDUCE, Round
from dgc_horovod.exchange.hierarchical import Topology
from dgc_horovod.kernels.contract import ErrorFeedback
from dgc_horovod.planning import cluster as formulas
from dgc_horovod.planning.cluster import PAYLOAD, Cluster, Link, Machine
from dgc_horovod.planning.cost_model import (
    DENSE,
    EXCHANGES,
    FP16,
    METHODS,
    cost,
    power_sgd_elements,
    traffic_of,
)
from dgc_horovod.tools.plan import best, measured, ranges, table, tensors
from tests.helpers import simulated_links
from tests.helpers.data import as_array
from tests.helpers.engines import make_exchange

RATES, LATENCIES, DENSITIES = (1e8, 1e9, 1e10), (20e-6, 1e-3, 40e-3), (0.001, 0.01)
SPECS = tensors(25_600_000, DGCConfig())
MACHINE = Machine(computing=0.2).over_gloo()
GIGABIT = Link(1e9)


def methods_of(cluster: Cluster) -> list[str]:
    return [name for name in METHODS if cluster.node_size > 1 or not name.startswith("hierarchical")]


# -- bytes


@pytest.mark.parametrize("workers, density", [(2, 0.001), (16, 0.001), (64, 0.25)])
def test_bytes_are_those_that_the_exchange_counts(workers, density):
    config = DGCConfig(density=density, bucket_bytes=4 * 2**20, momentum_correction=False)
    specs = tensors(3_000_000, config)
    exchange = make_exchange(specs, config, workers=workers)
    for engine in exchange.engines:
        gradient = np.random.default_rng(0).standard_normal(engine.bucket.numel).astype(np.float32)
        engine.add_gradient(0, as_array(engine.kernels, gradient), ErrorFeedback())
        exchange.compress(engine)
    by_allreduce = 0 if workers == 2 else 2 * (workers - 1) * 4 * 6_000 // workers
    planned = cost("flat", specs, config, Cluster(workers, GIGABIT), MACHINE)
    assert exchange.counts.traffic.received + by_allreduce == planned.card_bytes
    assert planned.card_bytes == card_bytes(specs, config, Topology(0, workers))


def test_several_workers_behind_a_card():
    """A ring of all crosses a card once; an alltoall brings each of them what it gets from other nodes."""
    ring, direct = Round("r", ALLGATHER, "uint8", 1000), Round("a", "alltoall", "uint8", 1600)
    alone, nodes = Cluster(16, GIGABIT), Cluster(16, GIGABIT, 4)
    for cluster, *expected in ((alone, 15_000, 1_500), (nodes, 15_000, 4 * 12 * 100)):
        found = [formulas.through_card(each, cluster.workers, cluster.node_size) for each in (ring, direct)]
        assert found == expected


def test_power_sgd_sends_two_factors():
    specs = [TensorSpec("w", (100, 20, 10)), TensorSpec("b", (100,)), TensorSpec("thin", (1000, 2))]
    assert power_sgd_elements(specs, 2) == (2100, 200, 400)


# -- seconds


def test_an_allreduce_by_hand():
    """Four workers: 3 hops in which bytes travel while others are added, 3 in which sums go round."""
    cluster, part = Cluster(4, Link(1e9, latency=1e-3, message=1e-4)), 250_000
    on_wire, hop = 8 * part / (PAYLOAD * 1e9), 1.75e-3 + 1e-4
    found = formulas.seconds(Round("r", ALLREDUCE, "float32", part), cluster, add=1e-8)
    assert found == pytest.approx(3 * (max(on_wire, part * 1e-8) + hop) + 3 * (on_wire + hop))


LARGE = itertools.product((64, 128, 256, 512, 1024), (1, 4, 8))
MANY = [pytest.param(*each, marks=pytest.mark.slow) for each in LARGE]


@pytest.mark.parametrize("workers, node_size", [(2, 1), (4, 1), (8, 1), (8, 4), (16, 4), (16, 8), (32, 8), *MANY])
def test_the_simulation_agrees(workers, node_size):
    """With the closed form, over links, densities and methods."""
    for rate, latency in itertools.product(RATES, LATENCIES):
        cluster = Cluster(workers, Link(rate, latency), node_size)
        for density, method in itertools.product(DENSITIES, methods_of(cluster)):
            if method in EXCHANGES or density == DENSITIES[0]:
                traffic = traffic_of(method, SPECS, DGCConfig(density=density), cluster)
                simulated = simulated_links.seconds(traffic, cluster, MACHINE)
                assert abs(traffic.seconds(cluster, MACHINE) / simulated - 1) <= 0.05, (rate, latency, density, method)


@given(st.sampled_from([2, 16, 64]), st.sampled_from([1, 4]), st.floats(1e7, 1e11), st.floats(0, 0.1))
def test_a_slower_link_never_helps(workers, node_size, bits, latency):
    if workers % node_size or workers == node_size:
        return
    fast = Cluster(workers, Link(bits, latency), node_size)
    for slower in (Link(bits / 2, latency), Link(bits, latency + 1e-3)):
        for method in methods_of(fast):
            costs = [
                cost(method, SPECS, DGCConfig(), replace(fast, card=card), MACHINE) for card in (fast.card, slower)
            ]
            assert costs[0].step_seconds <= costs[1].step_seconds


def test_one_worker_exchanges_nothing():
    for method in ("dense", "flat", "sharded"):
        alone = cost(method, SPECS, DGCConfig(), Cluster(1, GIGABIT), MACHINE)
        assert alone.network_seconds == 0 and alone.card_bytes == 0


@pytest.mark.parametrize("elements, least, most", [(25_600_000, 0.8, 1.0), (138_400_000, 4.5, 5.5)])
def test_dense_takes_as_long_as_was_measured_on_two_hosts(elements, least, most):
    config = DGCConfig()
    found = cost(DENSE, tensors(elements, config), config, Cluster(2, GIGABIT), Machine(0.18))
    assert least < found.network_seconds < most and found.card_bytes == pytest.approx(4 * elements, rel=1e-6)


def test_what_hides():
    """At most 2/3 of the computing, and never the last bucket; nothing where a norm is needed first."""
    of = lambda config: cost("flat", tensors(10**8, config), config, Cluster(64, GIGABIT), MACHINE)  # noqa: E731
    found, clipped = of(DGCConfig()), of(DGCConfig(clip_norm=1.0))
    hidden = clipped.step_seconds - found.step_seconds
    assert 0 < hidden <= 2 / 3 * MACHINE.computing + 1e-9 and found.network_seconds == clipped.network_seconds
    assert 0 < found.efficiency < 1


def test_memory_is_shared_by_a_node():
    nodes = Cluster(64, GIGABIT, 8)
    flat, hierarchical = (cost(name, SPECS, DGCConfig(), nodes, MACHINE).memory_bytes for name in EXCHANGES[:2])
    assert hierarchical / flat == pytest.approx(1 / 8, rel=0.01)


def test_a_budget_lowers_the_density():
    config = DGCConfig(density=0.01, max_bytes_per_step=2 * 10**6)
    found = cost("flat", SPECS, config, Cluster(64, GIGABIT), MACHINE)
    assert found.card_bytes <= 2 * 10**6 and found.density < 0.01


@pytest.mark.parametrize("config", [DGCConfig(), DGCConfig(density=0.25), DGCConfig(exchange="sharded")])
def test_compress_is_really_measured(config):
    found = measured(MACHINE, 300_000, config)
    assert 1e-11 < found.compress < 1e-5 and found.decode >= 0 and found.update >= 0
    assert found.computing == MACHINE.computing


# -- what to take


def test_the_table_and_what_to_take():
    """1 Gbit/s: owners where many send much; 100 Gbit/s: no compression."""
    slow = table(SPECS, DGCConfig(density=0.01), Cluster(8, GIGABIT, 8), MACHINE)
    assert list(slow) == [16, 32, 64, 128, 256, 512, 1024]
    assert ranges(slow)[0][::2] == (16, EXCHANGES[1]) and "sharded" in ranges(slow)[-1][2]
    fast = table(SPECS, DGCConfig(), Cluster(1, Link(1e11)), Machine(0.2))
    assert best(fast[2]).name in (DENSE, FP16)


# -- shapes


@pytest.mark.parametrize("elements", [1, 999, 25_600_000, 7 * 10**10, 10**12])
def test_shapes_that_stand_for_a_model_are_few(elements):
    """Each of them is priced by every method and number of workers; a model of any size is planned in seconds."""
    found = tensors(elements, DGCConfig())
    assert sum(spec.numel for spec in found) == elements and len(found) <= 1001
    assert all(spec.numel < 2**31 for spec in found)


@pytest.mark.parametrize("method", METHODS)
def test_a_plan_of_many_buckets_is_the_sum_of_all(method):
    """Buckets that are alike are priced once."""
    cluster, specs = Cluster(16, GIGABIT, 4), tensors(10**9, DGCConfig())
    whole = traffic_of(method, specs, DGCConfig(), cluster)
    apart = [type(whole)((bucket,)) for bucket in whole.buckets]
    assert whole.card_bytes(cluster) == sum(each.card_bytes(cluster) for each in apart)
    once = formulas.waiting(whole.depth, cluster)
    parts = sum(each.seconds(cluster, MACHINE) - formulas.waiting(each.depth, cluster) for each in apart)
    assert whole.seconds(cluster, MACHINE) == pytest.approx(once + parts)
