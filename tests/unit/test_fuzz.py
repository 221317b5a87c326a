"""A hundred thousand changed packets: an error, or elements that could have been sent; nothing else."""

from __future__ import annotations

from dgc_horovod.packet import NumpyCoder
from tests.helpers import fuzz
from tests.helpers.packets import NATIVE

LIKELY = ("sealed CorruptPacket", "sealed RankMismatch", "sealed valid", "unsealed CorruptPacket")


def test_native_decoder_survives_a_hundred_thousand_packets():
    outcomes = fuzz.run(NATIVE, 100_000, seed=0)
    assert sum(outcomes.values()) == 100_000
    assert all(outcomes.get(likely, 0) > 1000 for likely in LIKELY), f"the changes reach too little: {outcomes}"


def test_both_decoders_end_alike():
    fuzz.run(NATIVE, 10_000, seed=1, against=NumpyCoder())
