"""Every backend × rule × codec against the NumPy reference: whole steps of two ranks, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest

from dgc_horovod import DGCConfig
from dgc_horovod.bucket import Bucket, Segment
from dgc_horovod.codecs import VALUE_CODECS
from dgc_horovod.engine import BucketEngine
from dgc_horovod.ops.schema import AdamFeed, MomentumFeed, ResidualFeed
from dgc_horovod.selection import RULES
from tests.helpers.data import BACKENDS, as_array, as_numpy

SIZES = (1, 63, 4097, 333, 9000)  # segments that begin anywhere, chunks that end anywhere
STEPS, RANKS = 7, 2


def make_bucket(whole, values):
    starts = np.cumsum((0, *SIZES)).tolist()
    segments = tuple(Segment(str(i), start, n) for i, (start, n) in enumerate(zip(starts, SIZES, strict=False)))
    return Bucket(3, segments, whole, values if whole else "")


def transcript(kernels, config, whole, feed):
    """Packets, states and updates of every step, as bytes."""
    bucket = make_bucket(whole, config.values)
    engines = [BucketEngine(bucket, config, kernels, rank, RANKS) for rank in range(RANKS)]
    said = []
    for step in range(STEPS):
        payloads = []
        for rank, engine in enumerate(engines):
            g = np.random.default_rng([step, rank]).laplace(size=bucket.numel).astype(np.float32)
            g[step] = np.nan if (step, rank) == (4, 1) else g[step]
            for i, s in enumerate(bucket.segments):
                engine.offer(i, as_array(kernels, g[s.start : s.start + s.numel]), feed(step))
            payloads.append(engine.compress(0.5, step, config.final_density).payload.copy())
        targets = [as_array(kernels, np.full(n, np.nan, np.float32)) for n in SIZES]
        for engine in engines:
            finite = engine.receive(np.concatenate(payloads))
            for i, target in enumerate(targets):
                engine.targets.put(i, target)
            engine.fill(1 / RANKS)
            if not finite:
                engine.restore()
            states = [engine.state.v, engine.state.u, *(engine.state.moments or ())]
            said += [as_numpy(kernels, x).tobytes() for x in (*states, *targets) if x is not None]
        said += [payload.tobytes() for payload in payloads]
    return said


def config_for(rule, **fields):
    extra = {"threshold": 3.0, "max_density": 0.05} if rule == "threshold" else {"density": 0.03}
    return DGCConfig(rule=rule, **extra, **fields)


@pytest.mark.parametrize("kernels", BACKENDS[1:], ids=lambda k: k.name)
@pytest.mark.parametrize("values", VALUE_CODECS)
@pytest.mark.parametrize("rule", RULES)
def test_rule_and_codec(rule, values, kernels):
    for scope in ("bucket", "tensor"):
        config = config_for(rule, values=values, scope=scope)
        feed = lambda step: MomentumFeed(0.9, scope == "bucket")  # noqa: B023, E731 - used within the round
        assert transcript(kernels, config, False, feed) == transcript(BACKENDS[0], config, False, feed)


@pytest.mark.parametrize("kernels", BACKENDS[1:], ids=lambda k: k.name)
@pytest.mark.parametrize("values", ["bf16", "8bit"])
def test_whole_buckets(values, kernels):
    config = DGCConfig(values=values)
    feed = lambda step: ResidualFeed()  # noqa: E731
    assert transcript(kernels, config, True, feed) == transcript(BACKENDS[0], config, True, feed)


@pytest.mark.parametrize("kernels", BACKENDS[1:], ids=lambda k: k.name)
def test_adam(kernels):
    feed = lambda step: AdamFeed((0.9, 0.999), 1e-8, step + 1)  # noqa: E731
    assert transcript(kernels, config_for("exact"), False, feed) == transcript(
        BACKENDS[0], config_for("exact"), False, feed
    )


def test_a_whole_bucket_sends_everything_and_keeps_its_rounding_error():
    kernels, bucket = BACKENDS[0], Bucket(0, (Segment("bias", 0, 300),), True, "8bit")
    engine = BucketEngine(bucket, DGCConfig(), kernels, 0, 1)
    owed, arrived, target = np.zeros(300), np.zeros(300), np.empty(300, np.float32)
    engine.targets.put(0, target)
    for step in range(40):
        g = np.random.default_rng(step).standard_normal(300).astype(np.float32)
        g[7] = 0
        engine.offer(0, g, ResidualFeed())
        message = engine.compress(1.0, step, 0.001)
        assert message.count == 300 and message.payload.size == 36 + 300 + 8
        assert engine.receive(message.payload) and engine.fill(1.0)
        owed += g
        arrived += target
    left = np.abs(engine.state.v)
    assert 0 < left.max() < 0.05, "an 8-bit value is off by less than half a 127th of the largest"
    np.testing.assert_allclose(arrived + engine.state.v, owed, atol=1e-4)
