"""The layout of buckets: everything in it once, backward order, sizes, who stays dense."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dgc_horovod import DGCConfig
from dgc_horovod.bucket import TensorSpec, count_for, plan, sends_scattered, spans
from dgc_horovod.packet import PacketFormat

SHAPES = st.lists(
    st.one_of(st.tuples(st.integers(1, 50), st.integers(1, 50)), st.tuples(st.integers(1, 3000))), max_size=12
)


@given(
    SHAPES,
    st.integers(1, 20_000),
    st.integers(1, 500),
    st.booleans(),
    st.lists(st.integers(0, 2), min_size=12, max_size=12),
)
def test_every_tensor_is_somewhere_once(shapes, bucket_bytes, min_numel, compress_1d, boundaries):
    specs = [TensorSpec(f"p{i}", shape, boundaries[i]) for i, shape in enumerate(shapes)]
    config = DGCConfig(bucket_bytes=bucket_bytes, min_numel=min_numel, compress_1d=compress_1d)
    layout = plan(specs, config)
    of = {spec.name: spec for spec in specs}
    placed = [segment.name for bucket in layout.buckets for segment in bucket.segments]
    assert sorted([*placed, *layout.dense]) == sorted(of)
    assert placed == [spec.name for spec in reversed(specs) if spec.name in placed], "not in backward order"
    for name in layout.dense:
        assert of[name].numel < min_numel or (len(of[name].shape) == 1 and not compress_1d)
    for bucket in layout.buckets:
        assert len({of[segment.name].boundary for segment in bucket.segments}) == 1
        assert 4 * bucket.numel <= bucket_bytes or len(bucket.segments) == 1
        starts = [segment.start for segment in bucket.segments]
        assert starts == [sum(s.numel for s in bucket.segments[:i]) for i in range(len(starts))]
        for scope in ("bucket", "tensor"):
            runs = spans(bucket, scope, 0.01)
            assert sum(run.numel for run in runs) == bucket.numel
            assert all(1 <= run.k <= run.numel for run in runs)


def test_k_is_the_ceiling_of_the_decimal_product():
    assert [count_for(n, 0.001) for n in (1, 999, 1000, 1001, 2000)] == [1, 1, 1, 2, 2]
    assert count_for(30, 0.1) == 3  # 0.1 * 30 is 3.0000000000000004 in floating point
    assert count_for(7, 1.0) == 7 and count_for(7, 1) == 7


def test_scattered_exchange_where_an_allgather_costs_more():
    """N*k*b > 64*n bits: never at 0.1%, at density 0.5 from N = 3, at 0.25 from N = 5."""

    def packet(capacity):
        return PacketFormat(0, 10**6, capacity).coded_bytes

    assert not sends_scattered(10**6, packet(1000), 500)
    assert [sends_scattered(10**6, packet(500_000), n) for n in (2, 3)] == [False, True]
    assert [sends_scattered(10**6, packet(250_000), n) for n in (4, 5)] == [False, True]
    assert sends_scattered(2**30, 2**28, 8), "an allgather's output stays below 2**31 bytes"
