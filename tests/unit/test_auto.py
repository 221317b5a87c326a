"""Which exchange a job takes: the trial by the clock, what it expects, and the density that fits a run."""

from __future__ import annotations

import itertools
import math
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgc_horovod import DGCConfig
from dgc_horovod.compression import PRESETS
from dgc_horovod.core.bucketing import TensorSpec
from dgc_horovod.planning.cost_model import Observed, predicted
from dgc_horovod.planning.trial import (
    COMPRESSED,
    DENSE,
    GAIN,
    LEAST,
    MOST_TIMED,
    SENT,
    SETTLING,
    TIMED,
    fitted,
    fitting,
)
from dgc_horovod.session.auto import Choice
from dgc_horovod.state.residual_state import UNDECIDED
from tests.helpers.engines import make_exchange


def run(choice, seconds, expected):
    """Steps that take `seconds` by mode on both ranks, until the trial has ended; the modes that were at work."""
    now, modes = 0.0, []
    for _ in range(4 * (SETTLING + MOST_TIMED)):
        if choice.ended:
            break
        modes.append(choice.mode)
        now += seconds[choice.mode]
        if choice.step_ended(now, 0.0):
            with mock.patch("dgc_horovod.session.auto.predicted", return_value=expected):
                choice.compare([2 * x for x in choice.own()])
    return modes


def _choice():
    specs = [TensorSpec("weight", (64, 64))]
    exchange = make_exchange(specs, DGCConfig(**{**PRESETS["auto"], "min_numel": 1}), workers=2)
    return Choice(exchange, "stock Horovod", True)


TIMES = st.floats(0.001, 100)


@given(st.fixed_dictionaries({mode: TIMES for mode in (DENSE, COMPRESSED)}), TIMES)
def test_what_stays_is_the_fastest_of_what_was_tried(seconds, expected):
    choice = _choice()
    modes = run(choice, seconds, expected)
    assert choice.ended and choice.mode in choice.seconds
    for mode, taken in choice.seconds.items():
        assert taken == pytest.approx(seconds[mode], rel=1e-6)
    best = min(choice.seconds.values())
    assert choice.seconds[choice.mode] == best or choice.mode == DENSE
    if choice.mode == DENSE:
        assert best > GAIN * choice.seconds[DENSE] or best == choice.seconds[DENSE]
    else:
        assert best <= GAIN * choice.seconds[DENSE]
    changes = [mode for mode, _ in itertools.groupby(modes)]
    assert changes in ([DENSE], [DENSE, COMPRESSED])
    if COMPRESSED in choice.seconds:
        assert expected <= 1.1 * choice.seconds[DENSE] * (1 + 1e-6), "nothing is tried that is expected to lose"


@pytest.mark.parametrize("expected", [1.15, math.nan, None])
def test_what_is_expected_to_be_slower_or_cannot_be_is_not_tried(expected):
    choice = _choice()
    assert set(run(choice, {DENSE: 1.0}, expected)) == {DENSE} and choice.mode == DENSE


@pytest.mark.parametrize(
    ("dense", "compressed", "expected", "timed", "stays"),
    [
        (1.0, 0.7, 1.05, (TIMED, TIMED), COMPRESSED),  # it may be faster, and is
        (1.0, 0.97, 0.1, (TIMED, TIMED), DENSE),  # the clock does not confirm what was expected
        (2**-5, 7 / 2**8, 0.001, (32, 37), COMPRESSED),  # short steps are timed for a second
        (0.001, 0.0005, 0.001, (MOST_TIMED, TIMED), COMPRESSED),  # unless the answer is plain
    ],
)
def test_what_may_be_faster_is_tried_as_long_as_it_takes(dense, compressed, expected, timed, stays):
    choice = _choice()
    modes = run(choice, {DENSE: dense, COMPRESSED: compressed}, expected)
    assert (modes.count(DENSE) - SETTLING, modes.count(COMPRESSED) - SETTLING) == timed and choice.mode == stays


def test_steps_right_after_a_change_are_not_timed():
    choice, now = _choice(), 0.0
    for step in range(SETTLING + TIMED):
        now += 100.0 if step < SETTLING else 1.0
        ready = choice.step_ended(now, 0.25)
    assert ready and choice.own()[:3] == [1.0, 1.0, 0.25]


@pytest.mark.parametrize("steps, density", [(300, 0.067), (1000, 0.02), (30_000, LEAST), (10, 1.0), (1, 1.0)])
def test_a_coordinate_is_sent_often_enough(steps, density):
    assert fitting(steps) == density
    assert fitting(steps) * steps >= 0.95 * min(SENT, steps)
    config = DGCConfig(**{**PRESETS["auto"], "total_steps": steps})
    assert fitted(config).density == density
    assert fitted(DGCConfig(**PRESETS["auto"])).density == PRESETS["auto"]["density"]


@pytest.mark.parametrize("steps, stays", [(1960, True), (1999, True), (2000, False)])
def test_a_run_that_is_too_short_stays_dense(steps, stays):
    """From 1,951 on, 20 / steps is 0.010 in two digits, and such runs were compressed."""
    choice = Choice(_exchange(2, total_steps=steps, density=fitting(steps)), "stock Horovod", True)
    assert (choice.mode, choice.ended) == (DENSE, stays)


@pytest.mark.parametrize(
    ("saved", "goes_on"),
    [
        ("", [COMPRESSED, True]),
        ("fp16", [DENSE, True]),  # of an earlier version, which could take it
        *[(mode, [mode, True]) for mode in (DENSE, COMPRESSED)],
        (UNDECIDED, [DENSE, False]),
    ],
)
def test_a_resumed_job_goes_on_with_what_was_saved(saved, goes_on):
    choice = Choice(_exchange(2), "stock Horovod", True)
    choice.resume(saved)
    assert [choice.mode, choice.ended] == goes_on


def _exchange(workers, **fields):
    specs = [TensorSpec(f"weight{i}", (1000, 1000)) for i in range(20)] + [TensorSpec("bias", (1000,))]
    return make_exchange(specs, DGCConfig(**{**PRESETS["auto"], **fields}), workers=workers)


def _observed(computing, bits, workers=2, hidden=0.0, numel=2**20):
    """Dense steps of 20 M elements behind a link of so many bits a second."""
    exchange = 8 * 2 * (workers - 1) / workers * 4 * 20e6 / bits
    probe = 8 * 2 * (workers - 1) / workers * 4 * numel / bits
    waited = max(0.0, exchange - hidden)
    return Observed(computing + waited, waited, 0.001, 0.001 + probe, numel)


@pytest.mark.parametrize("workers", [2, 8])
def test_a_slow_link_lets_compression_win_and_a_fast_one_does_not(workers):
    buckets = _exchange(workers)
    slow, fast = _observed(0.2, 1e8, workers), _observed(0.2, 1e12, workers, hidden=0.1)
    assert predicted(buckets, slow, True) < 0.25 * slow.step
    assert predicted(buckets, fast, True) > fast.step


def test_what_hides_behind_the_backward_pass_is_not_gained():
    buckets = _exchange(2)
    seen, hidden = _observed(20.0, 1e8), _observed(20.0, 1e8, hidden=10.0)
    assert predicted(buckets, hidden, True) > 0.95 * hidden.step
    assert predicted(buckets, seen, True) < 0.95 * seen.step


def test_observed_times_that_contradict_each_other_still_give_numbers():
    buckets = _exchange(2)
    for observed in (Observed(1.0, 1.5, 0.01, 0.001, 2), Observed(1e-6, 0.0, 1.0, 1.0, 2**20)):
        assert predicted(buckets, observed, True) > 0
