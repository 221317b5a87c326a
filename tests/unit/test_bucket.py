"""The layout of buckets: everything in it once, backward order, sizes, who stays dense."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgc_horovod import DGCConfig
from dgc_horovod.core.bucketing import TensorSpec, plan
from dgc_horovod.core.workspace import count_for
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.exchange import IMPLEMENTATIONS, choose
from dgc_horovod.wire.packet import PacketFormat

SHAPES = st.lists(
    st.one_of(st.tuples(st.integers(1, 50), st.integers(1, 50)), st.tuples(st.integers(1, 3000))), max_size=12
)


@given(
    SHAPES,
    st.integers(1, 20_000),
    st.integers(1, 500),
    st.booleans(),
    st.lists(st.integers(0, 2), min_size=12, max_size=12),
    st.sampled_from(["auto", "fp32", "bf16"]),
)
def test_every_tensor_is_somewhere_once(shapes, bucket_bytes, min_numel, compress_1d, boundaries, dense_values):
    specs = [TensorSpec(f"p{i}", shape, boundaries[i]) for i, shape in enumerate(shapes)]
    config = DGCConfig(
        bucket_bytes=bucket_bytes, min_numel=min_numel, compress_1d=compress_1d, dense_values=dense_values
    )
    layout = plan(specs, config, workers=4)
    of = {spec.name: spec for spec in specs}
    placed = [segment.name for bucket in layout.buckets for segment in bucket.segments]
    assert sorted([*placed, *layout.dense]) == sorted(of)
    whole = [segment.name for bucket in layout.buckets if bucket.uncompressed for segment in bucket.segments]
    for kind in (whole, [name for name in placed if name not in whole]):
        assert kind == [spec.name for spec in reversed(specs) if spec.name in kind], "not in backward order"
    small = [n for n, s in of.items() if s.numel < min_numel or (len(s.shape) == 1 and not compress_1d)]
    assert sorted(small) == sorted([*layout.dense, *whole])
    assert not (layout.dense if dense_values != "fp32" else whole)
    for bucket in layout.buckets:
        assert len({of[segment.name].boundary for segment in bucket.segments}) == 1
        assert 4 * bucket.numel <= bucket_bytes or len(bucket.segments) == 1
        starts = [segment.start for segment in bucket.segments]
        assert starts == [sum(s.numel for s in bucket.segments[:i]) for i in range(len(starts))]


def test_how_the_dense_path_travels():
    """By default in bytes while an allgather of them brings less than an allreduce of fp16: up to 4 workers."""
    specs = [TensorSpec("bias", (10,)), TensorSpec("weight", (100, 100))]
    for workers, buckets, dense in ((1, 2, ()), (4, 2, ()), (5, 1, ("bias",))):
        layout = plan(specs, DGCConfig(), workers)
        assert (len(layout.buckets), layout.dense) == (buckets, dense)
    last = plan(specs, DGCConfig(dense_values="bf16"), 99).buckets[-1]
    assert last.uncompressed and last.values == "bf16" and last.index == 1
    assert plan(specs, DGCConfig(dense_values="fp16"), 2).dense == ("bias",)


def test_a_tensor_too_long_for_32_bit_positions_is_refused():
    with pytest.raises(UnsupportedUse, match="'a' has 4294967306 elements"):
        plan([TensorSpec("a", (2**31 + 5, 2))], DGCConfig())
    half = [TensorSpec(name, (2**15, 2**15)) for name in "ab"]
    assert len(plan(half, DGCConfig(bucket_bytes=2**40)).buckets) == 2, "together they would be 2**31 elements"


def test_a_tensor_of_no_elements_is_in_no_bucket():
    layout = plan([TensorSpec("empty", (0,)), TensorSpec("bias", (3,))], DGCConfig(), 2)
    assert layout.dense == ("empty",) and [s.name for b in layout.buckets for s in b.segments] == ["bias"]


def test_k_is_the_ceiling_of_the_decimal_product():
    assert [count_for(n, 0.001) for n in (1, 999, 1000, 1001, 2000)] == [1, 1, 1, 2, 2]
    assert count_for(30, 0.1) == 3  # 0.1 * 30 is 3.0000000000000004 in floating point
    assert count_for(7, 1.0) == 7 and count_for(7, 1) == 7


def test_densified_where_an_allgather_costs_more():
    """N*k*b > 64*n bits: never at 0.1%; at density 0.5, b = 35, from N = 4; at 0.25, b = 36, from N = 8."""

    def densifies(capacity, workers, numel=10**6):
        return choose(PacketFormat(0, numel, capacity, "fp32"), workers) is IMPLEMENTATIONS["densified"]

    assert not densifies(1000, 500)
    assert [densifies(500_000, n) for n in (3, 4)] == [False, True]
    assert [densifies(250_000, n) for n in (7, 8)] == [False, True]
    assert densifies(2**25, 16, 2**30), "an allgather's output stays below 2**31 bytes"


def test_no_round_brings_more_than_a_collective_can_count(monkeypatch):
    """What goes round inside a node, whose workers bring a slice each, was not looked at; nor were headers."""
    slices, counted = PacketFormat(0, 5 * 10**7, 3 * 10**7, "fp32"), 2**31 - 1
    assert 3 * slices.nbytes < counted < 8 * 3 * slices.nbytes
    owned = PacketFormat(0, 2 * 10**8, 10**8, "fp32")
    for wire, workers, shards, expected in ((slices, 3, False, "allgather"), (owned, 8, True, "sharded")):
        assert choose(wire, workers, shards, 1) is IMPLEMENTATIONS[expected]
        assert choose(wire, workers, shards, 8) is IMPLEMENTATIONS["densified"]
    for longest, expected in ((2 * slices.nbytes, "allgather"), (2 * slices.nbytes - 1, "densified")):
        monkeypatch.setattr("dgc_horovod.exchange._LONGEST", longest)
        assert choose(slices, 2) is IMPLEMENTATIONS[expected]
