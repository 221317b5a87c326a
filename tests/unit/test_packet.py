"""Packets: round trip, fixed size, the header's checks, and an error for anything a sender cannot have written."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgc_horovod.errors import CorruptPacket, RankMismatch
from dgc_horovod.exchange.flat import DensifiedExchange, PacketWriter
from dgc_horovod.kernels.contract import NO_ELEMENTS, Elements
from dgc_horovod.kernels.reference import ReferenceKernels
from dgc_horovod.wire.bucket import Bucket, Segment
from dgc_horovod.wire.codecs import INDEX_CODECS, VALUE_CODECS
from dgc_horovod.wire.packet import (
    FLAG_JOINED,
    FLAG_NONFINITE,
    HEADER,
    PacketFormat,
)
from tests.helpers.packets import CODERS, random_elements, read, seal, write

VALUES = sorted(VALUE_CODECS)


@pytest.fixture(params=CODERS)
def coder(request):
    return CODERS[request.param]


def make(coder, numel=1000, capacity=20, values="fp32", count=13, flags=0):
    wire = PacketFormat(3, numel, capacity, values)
    positions, floats = random_elements(wire, count, 0)
    return wire, positions, *write(coder, wire, positions, floats, flags=flags)


@given(st.sampled_from(VALUES), st.integers(1, 5000), st.data())
def test_round_trip_and_the_same_bytes_from_every_coder(values, numel, data):
    capacity = data.draw(st.integers(1, numel))
    count, flags = data.draw(st.integers(0, capacity)), data.draw(st.integers(0, 15))
    packets = []
    for coder in CODERS.values():
        wire, positions, out, sent = make(coder, numel, capacity, values, count, flags)
        for reader in CODERS.values():
            got_positions, got_values, got_flags = read(reader, wire, out)
            assert (got_positions == positions).all() and got_flags == flags
            assert got_values.tobytes() == sent.tobytes(), "the receiver decodes what the sender subtracts"
        packets.append(out.tobytes())
    assert packets[0] == packets[1]


def written(wire, coder, values, keeps_zeros=False):
    """What of `values`, at the first positions, `PacketWriter` sends; as it is read; the packet."""
    packet, elements = np.empty(wire.nbytes, np.uint8), Elements(np.arange(values.size, dtype=np.int32), values)
    sent, decoded = PacketWriter(wire, coder, keeps_zeros).write(elements, 0, 7, packet)
    return sent, decoded, packet


@settings(deadline=None)
@given(st.sampled_from(VALUES), st.integers(1, 2000), st.floats(0, 40), st.booleans(), st.integers(0, 99))
def test_what_is_sent_is_what_adds_something(values, count, spread, keeps_zeros, seed):
    """Whatever is rounded to zero: receivers read it as nothing, and everything else as the sender subtracts it."""
    rng = np.random.default_rng(seed)
    x = (rng.choice([-1, 1], count) * np.exp(rng.uniform(-spread, spread, count))).astype(np.float32)
    packets = []
    for coder in CODERS.values():
        wire = PacketFormat(0, 5000, 2000, values)
        sent, decoded, packet = written(wire, coder, x, keeps_zeros)
        found = np.zeros((2, 5000), np.float32)
        found[0, sent.positions] = decoded
        positions, read_as, _ = read(coder, wire, packet)
        found[1, positions] = read_as
        assert (found[0] == found[1]).all() and (sent.values == x[sent.positions]).all()
        assert (decoded != 0).all() or keeps_zeros
        assert sent.values.size == np.count_nonzero(read_as) or keeps_zeros
        packets.append(packet.tobytes())
    assert packets[0] == packets[1]


def test_nothing_is_encoded_twice(monkeypatch):
    """Without what is rounded to zero, blocks were others, in which more was: packets were made a hundred times."""
    wire, encode, made = PacketFormat(0, 200_000, 200_000, "8bit"), PacketFormat.encode, []
    monkeypatch.setattr(PacketFormat, "encode", lambda *args, **named: made.append(1) or encode(*args, **named))
    x = np.random.default_rng(0).standard_t(2, 200_000).astype(np.float32)
    sent, _, _ = written(wire, CODERS["native"], x)
    assert len(made) == 1
    assert 0.9 < sent.values.size / x.size < 1, "hardly anything of it is too small for its block"


@pytest.mark.parametrize("values", VALUES)
def test_a_whole_bucket_needs_no_positions(coder, values):
    wire = PacketFormat(0, 700, 700, values, "every")
    positions, floats = np.arange(700, dtype=np.int32), random_elements(wire, 700, 1)[1]
    out, sent = write(coder, wire, positions, floats)
    got_positions, got_values, _ = read(coder, wire, out)
    assert (got_positions == positions).all() and (got_values == sent).all()
    assert wire.body_bytes == VALUE_CODECS[values].nbytes(700)
    out[: HEADER.itemsize].view(HEADER)["count"] = 699
    with pytest.raises(CorruptPacket, match="rank 0 is invalid"):
        read(coder, wire, seal(out))


@pytest.mark.parametrize(("numel", "capacity"), [(10**6, 1000), (10**6, 10_000), (8_388_608, 8389), (1, 1), (77, 77)])
def test_bits_a_position(numel, capacity):
    """Elias-Fano stays within 2 + log2(n/k) bits, and half a bit above the entropy of random positions."""
    bits = 8 * INDEX_CODECS["elias-fano"].nbytes(numel, capacity) / capacity
    assert bits <= 2 + np.log2(numel / capacity) + 64 / capacity
    if capacity >= 1000:
        density = capacity / numel
        entropy = np.log2(1 / density) + (1 - density) / density * -np.log2(1 - density)
        assert entropy < bits < entropy + 0.56 + 64 / capacity


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("version", 9, RankMismatch),
        ("bucket", 4, RankMismatch),
        ("step", 8, RankMismatch),
        ("numel", 999, RankMismatch),
        ("capacity", 21, RankMismatch),
        ("value_codec", 2, RankMismatch),
        ("index_codec", 3, RankMismatch),
        ("count", 21, CorruptPacket),
        ("flags", 16, CorruptPacket),
    ],
)
def test_sealed_header_changes_are_named(coder, field, value, error):
    wire, *_, out, _ = make(coder)
    out[: HEADER.itemsize].view(HEADER)[field] = value
    with pytest.raises(CorruptPacket, match="damaged"):
        read(coder, wire, out, rank=5)
    with pytest.raises(error, match=f"rank 5.*{field}"):
        read(coder, wire, seal(out), rank=5)


def test_two_flipped_top_bits_are_seen(coder):
    """They cancel in a sum modulo 2^32."""
    wire, *_, out, _ = make(coder)
    out[[47, 55]] ^= 0x80
    with pytest.raises(CorruptPacket, match="damaged"):
        read(coder, wire, out)


@pytest.mark.parametrize("bad", [[5, 5], [6, 5], [3, 1000], [3], [3, 5, 9]])
def test_impossible_positions(coder, bad):
    wire, *_, out, _ = make(coder, count=2)
    body = out[HEADER.itemsize :][: wire.values_at]
    body.fill(0)
    INDEX_CODECS[wire.indices].encode(np.array(bad), wire.numel, wire.capacity, body)
    with pytest.raises(CorruptPacket, match=r"rank 0 is invalid: .*positions"):
        read(coder, wire, seal(out))


@pytest.mark.parametrize("values", VALUES)
def test_values_that_are_not_finite(coder, values):
    wire, *_, out, _ = make(coder, values=values)
    out[HEADER.itemsize + wire.values_at :] = 0xFF
    with pytest.raises(CorruptPacket, match=r"rank 0 is invalid: (values|scales|the least and largest magnitudes)"):
        read(coder, wire, seal(out))


def densified(workers):
    """The sum of vectors of three elements and their flags."""
    return DensifiedExchange(Bucket(0, (Segment("w", 0, 3),)), PacketFormat(0, 3, 1), ReferenceKernels(), workers)


@pytest.mark.parametrize("workers", [1, 2, 7, 4095])
def test_a_sum_tells_how_many_are_in_join_and_whether_all_is_finite(workers):
    exchange = densified(workers)
    kinds = {flags: exchange.begin(NO_ELEMENTS, flags, 70).buffer for flags in range(4)}
    for joined, damaged in [(0, 0), (workers, 0), (workers - 1, 1), (workers, workers), (workers // 2, workers)]:
        ranks = [FLAG_JOINED * (r < joined) | FLAG_NONFINITE * (r >= workers - damaged) for r in range(workers)]
        summed = np.zeros(6, np.float32)
        for flags in ranks:
            summed += kinds[flags]
        assert exchange.proceed(0, summed, 70) is None
        assert (exchange.outcome.finite, exchange.outcome.ranks_in_join) == (damaged == 0, joined)


@pytest.mark.parametrize("flags", [np.nan, np.inf, -5, 0.5, 9])
def test_a_sum_of_flags_that_no_ranks_add_up_to_is_refused(flags):
    """NaN was a ValueError, and -5 was taken for a sum."""
    exchange = densified(2)
    summed = 2 * exchange.begin(NO_ELEMENTS, 0, 70).buffer
    summed[3] = flags
    with pytest.raises(CorruptPacket, match="sum of the flags"):
        exchange.proceed(0, summed, 70)
