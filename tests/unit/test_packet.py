"""Packets: round trip, fixed size, saturation, and an error for anything a sender cannot have written."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgc_horovod.errors import CorruptPacket, RankMismatch
from dgc_horovod.packet import FLAG_NONFINITE, HEADER, VALUE_CODECS, PacketFormat, checksum

VALUES = sorted(VALUE_CODECS)
TOLERANCE = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8}


def make(numel=1000, capacity=20, values="fp32", count=13, step=7, seed=0):
    rng = np.random.default_rng(seed)
    wire = PacketFormat(3, numel, capacity, values)
    positions = np.sort(rng.choice(numel, count, replace=False))
    floats = rng.standard_normal(count).astype(np.float32)
    out = np.full(wire.nbytes, 0xAA, np.uint8)  # poisoned: an unwritten byte shows
    return wire, positions, floats, wire.encode(positions, floats, step, 0, out), out


@given(st.sampled_from(VALUES), st.integers(1, 5000), st.data())
def test_round_trip(values, numel, data):
    capacity = data.draw(st.integers(1, numel))
    count = data.draw(st.integers(0, capacity))
    wire, positions, floats, sent, out = make(numel, capacity, values, count)
    got_positions, got_values, flags = wire.decode(out, 7, 0)
    assert (got_positions == positions).all() and flags == 0
    assert (got_values == sent).all(), "the receiver decodes what the sender subtracts"
    bound = TOLERANCE[values] * np.abs(floats) + (2**-25 if values == "fp16" else 0)
    assert (np.abs(sent - floats) <= bound).all()
    if values != "fp32" and count > 50:
        assert (sent != floats).any(), "values were not rounded: fp32 went out as " + values


@pytest.mark.parametrize("values", VALUES)
def test_size_does_not_depend_on_the_content(values):
    sizes = {make(values=values, count=count)[4].size for count in (0, 1, 20)}
    assert sizes == {PacketFormat(3, 1000, 20, values).nbytes}
    assert PacketFormat(0, 10**6, 1000, "fp32").nbytes == 36 + 8000
    assert PacketFormat(0, 10**6, 1001, "bf16").nbytes == 36 + 4004 + 2004


@pytest.mark.parametrize(("values", "largest"), [("fp16", 65504.0), ("bf16", 3.3895313892515355e38)])
def test_values_saturate(values, largest):
    floats = np.array([3.4e38, -3.4e38, 1.0], np.float32)
    wire = PacketFormat(0, 10, 3, values)
    sent = wire.encode(np.arange(3), floats, 0, 0, np.empty(wire.nbytes, np.uint8))
    assert sent.tolist() == [largest, -largest, 1.0]


def test_bf16_rounds_to_nearest_even():
    torch = pytest.importorskip("torch")
    floats = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    wire = PacketFormat(0, floats.size, floats.size, "bf16")
    sent = wire.encode(np.arange(floats.size), floats, 0, 0, np.empty(wire.nbytes, np.uint8))
    assert (sent == torch.from_numpy(floats).bfloat16().float().numpy()).all()


def seal(packet):
    """Give a changed packet a checksum that is right again."""
    header = packet[: HEADER.itemsize].view(HEADER)
    header["checksum"] = checksum(packet)
    return packet


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("version", 9, RankMismatch),
        ("bucket", 4, RankMismatch),
        ("step", 8, RankMismatch),
        ("numel", 999, RankMismatch),
        ("capacity", 21, RankMismatch),
        ("value_codec", 2, RankMismatch),
        ("index_codec", 2, RankMismatch),
        ("count", 21, CorruptPacket),
        ("flags", 2, CorruptPacket),
    ],
)
def test_sealed_header_changes_are_named(field, value, error):
    wire, _, _, _, out = make()
    out[: HEADER.itemsize].view(HEADER)[field] = value
    with pytest.raises(CorruptPacket, match="damaged"):
        wire.decode(out, 7, rank=5)
    with pytest.raises(error, match=f"rank 5.*{field if error is RankMismatch else ''}"):
        wire.decode(seal(out), 7, rank=5)


@pytest.mark.parametrize("bad", [[5, 5], [6, 5], [-1, 3], [3, 1000]])
def test_impossible_positions(bad):
    wire, _, _, _, out = make(count=2)
    out[36:44].view("<i4")[:] = bad
    with pytest.raises(CorruptPacket, match="not ascending"):
        wire.decode(seal(out), 7, 0)


def test_values_that_are_not_finite():
    wire, _, _, _, out = make()
    out[wire._values_at : wire._values_at + 4].view("<f4")[:] = np.nan
    with pytest.raises(CorruptPacket, match="not finite"):
        wire.decode(seal(out), 7, 0)


@settings(max_examples=300)
@given(st.integers(0, 195), st.integers(1, 255), st.booleans())
def test_any_changed_byte_is_an_error_or_harmless(at, change, sealed):
    wire, _, _, _, out = make()
    out[at % out.size] ^= change
    try:
        positions, values, _ = wire.decode(seal(out) if sealed else out, 7, 0)
    except (CorruptPacket, RankMismatch):
        return
    assert sealed, "a change went unseen by the checksum"
    assert positions.size <= 20 and np.isfinite(values).all()
    assert not positions.size or (0 <= positions[0] and positions[-1] < 1000)


def test_flag_travels():
    wire = PacketFormat(0, 10, 3)
    out = np.empty(wire.nbytes, np.uint8)
    wire.encode(np.empty(0, np.int64), np.empty(0, np.float32), 0, FLAG_NONFINITE, out)
    assert wire.decode(out, 0, 0)[2] == FLAG_NONFINITE
