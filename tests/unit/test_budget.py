"""What a network card receives at a step, and the density that keeps it within a budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgc_horovod import DGCConfig
from dgc_horovod.core.bucketing import (
    HOST_SPEED,
    LEAST_DENSITY,
    NCCL_SPEED,
    TensorSpec,
    card_bytes,
    loss_by_nodes,
    within_budget,
)
from dgc_horovod.exchange.hierarchical import Topology
from dgc_horovod.launch.settings import resolve

SPECS = [TensorSpec("weight", (1000, 2000)), TensorSpec("other", (300, 500)), TensorSpec("bias", (2000,))]
FLAT, NODES = Topology(0, 16), Topology(0, 16, 4)


def test_a_card_receives_one_packet_of_each_other_node():
    config = DGCConfig(density=0.001, dense_values="fp32")
    small = card_bytes([SPECS[-1]], config, FLAT)
    assert small == 2 * 15 * 4 * 2000 // 16
    flat, nodes = (card_bytes(SPECS, config, each) - small for each in (FLAT, NODES))
    # 3 packets of the bucket in four slices, each with a header, in the place of 15
    assert 3 / 15 < nodes / flat < 3 / 15 * 1.1


@given(st.floats(1e-4, 1.0), st.integers(1, 10**7), st.sampled_from([FLAT, NODES, Topology(0, 2)]))
def test_the_density_is_the_largest_that_fits(density, budget, topology):
    asked = DGCConfig(density=density, max_bytes_per_step=budget)
    found = within_budget(SPECS, asked, topology)
    assert found.density <= asked.density
    if found.density == asked.density:
        return
    if card_bytes(SPECS, found, topology) > budget:
        assert found.density == LEAST_DENSITY
    else:  # one per cent more would not
        assert card_bytes(SPECS, found.replace(density=min(1.0, 1.011 * found.density)), topology) > budget


def test_no_budget_changes_nothing():
    config = DGCConfig(density=0.02)
    assert within_budget(SPECS, config, FLAT) is config


@pytest.mark.parametrize(
    ("text", "nbytes"), [("2MB", 2_000_000), ("500kB", 500_000), ("1234", 1234), ("1.5M", 1_500_000)]
)
def test_sizes_are_read(text, nbytes):
    job = resolve({"DGC_COMPRESSION": "dgc", "DGC_MAX_BYTES_PER_STEP": text}, {})
    assert job.config.max_bytes_per_step == nbytes


def test_nodes_are_used_where_their_cards_are_spared_more_than_it_costs():
    resnet = [TensorSpec(str(i), (1, 2_500_000)) for i in range(10)]
    low, high = DGCConfig(density=0.001), DGCConfig(density=0.01)
    assert "inside its node" in loss_by_nodes(resnet, low, Topology(0, 4, 2), HOST_SPEED)
    assert loss_by_nodes(resnet, high, Topology(0, 64, 8), HOST_SPEED) == ""
    assert loss_by_nodes(resnet, low, Topology(0, 4, 2), NCCL_SPEED) == ""


def test_auto_gives_elements_owners_where_many_would_send_too_much():
    auto = DGCConfig(density=0.01, exchange="auto", max_bytes_per_step=400_000)
    few, many, nodes = Topology(0, 8), Topology(0, 64), Topology(0, 256, 4)
    assert within_budget(SPECS, auto, few).exchange == "auto"
    assert within_budget(SPECS, auto.replace(max_bytes_per_step=10**9), many).exchange == "auto", "it fits as it is"
    flat = within_budget(SPECS, auto.replace(exchange="flat"), many)
    for topology, name in ((many, "sharded"), (nodes, "hierarchical+sharded")):
        found = within_budget(SPECS, auto, topology)
        assert found.exchange == name and card_bytes(SPECS, found, topology) <= 400_000
        assert found.density > 5 * flat.density
