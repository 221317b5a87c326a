"""Every backend × rule × codec against the NumPy reference: whole steps of two ranks, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.gpu.transcript import FEEDS, Size, transcript
from dgc_horovod import DGCConfig
from dgc_horovod.config import RULES
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.kernels.contract import ErrorFeedback
from dgc_horovod.wire.bucket import Bucket, Segment
from dgc_horovod.wire.codecs import VALUE_CODECS
from tests.helpers.data import BACKENDS, EACH
from tests.helpers.engines import exchange, update_of

SIZE = Size("cpu", (1, 63, 4097, 333, 9000), steps=7, ranks=2)


def same(kernels, config, **how):
    return transcript(kernels, config, SIZE, **how) == transcript(BACKENDS[0], config, SIZE, **how)


def config_for(rule, **fields):
    return DGCConfig(rule=rule, density=0.03, **fields)


@pytest.mark.parametrize("kernels", EACH[1:])
@pytest.mark.parametrize("values", VALUE_CODECS)
@pytest.mark.parametrize("rule", RULES)
def test_rule_and_codec(rule, values, kernels):
    for accumulation in ("Nesterov", "momentum"):
        assert same(kernels, config_for(rule, values=values), feeds=FEEDS[accumulation])


@pytest.mark.parametrize("kernels", EACH[1:])
@pytest.mark.parametrize("values", ["bf16", "8bit"])
def test_whole_buckets(values, kernels):
    assert same(kernels, DGCConfig(values=values), feeds=FEEDS["no momentum"], whole=True)


@pytest.mark.parametrize("kernels", BACKENDS[1:], ids=lambda k: k.name)
@pytest.mark.parametrize("accumulation", ["Adam", "several"])
def test_feeds(accumulation, kernels):
    assert same(kernels, config_for("exact"), feeds=FEEDS[accumulation])


def test_a_whole_bucket_sends_everything_and_keeps_its_rounding_error():
    kernels, bucket = BACKENDS[0], Bucket(0, (Segment("bias", 0, 300),), True, "8bit")
    engine = BucketEngine(bucket, DGCConfig(), kernels, 0, 1)
    owed, arrived = np.zeros(300), np.zeros(300)
    for step in range(40):
        g = np.random.default_rng(step).standard_normal(300).astype(np.float32)
        g[7] = 0
        (message,), finite = exchange([engine], [g], ErrorFeedback(), step, 0.001)
        assert finite and message.count == 300 and message.payload.size == 36 + 300 + 8
        owed += g
        arrived += update_of(engine)
    left = np.abs(engine.state.v)
    assert 0 < left.max() < 0.05, "an 8-bit value is off by less than half a 127th of the largest"
    np.testing.assert_allclose(arrived + engine.state.v, owed, atol=1e-4)
