"""When dense steps end: the criterion, by hand and by law."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from dgc_horovod.core.settling import INTERVAL, Settling
from dgc_horovod.schedule import WarmupSchedule, density_at

WINDOW, CHANGE, LONGEST, STAGES, FINAL = 100.0, 0.25, 1000, 4, 0.01


def made(change: float | None = CHANGE) -> Settling:
    return Settling(WarmupSchedule(steps=STAGES * LONGEST, first_density=1.0, until_settled=change), FINAL)


def settled_at(norm_of: Callable[[int], float], rate_of: Callable[[int], float] = lambda step: 1.0) -> int | None:
    """The step at which a second moment of that norm has settled, and what is kept on the way."""
    settling, others = made(), made()
    for step in range(1, LONGEST + 1):
        if settling.is_due(step):
            told = settling.judge(step, norm_of(step), rate_of(step), WINDOW)
            for each in (settling, others):
                each.take(told, step)
            assert len(settling.measured) <= WINDOW / INTERVAL + 2
    assert settling.settled_at == others.settled_at
    return settling.settled_at


def test_it_has_settled_where_a_window_changes_it_by_no_more():
    assert settled_at(lambda step: 1.0) == 200, "not before two windows"
    assert settled_at(lambda step: 1.0025**step) is None
    assert settled_at(lambda step: 1.0022**step) == 200
    assert settled_at(lambda step: 0.9975**step) is None, "nor where it falls"
    assert settled_at(lambda step: 2.0 if step < 250 else 1.0) == 200
    assert settled_at(lambda step: 1.01 ** min(step, 300)) == 380, "1.01**20 is 1.22"


def test_the_average_of_constant_gradients_counts_as_one_that_grows():
    b2 = 1 - 1 / WINDOW
    at = settled_at(lambda step: 1 - b2**step)
    assert at == 230
    assert (1 - b2**at) / (1 - b2 ** (at - WINDOW)) <= 1 + CHANGE < (1 - b2 ** (at - 10)) / (1 - b2 ** (at - 110))


def test_it_has_not_settled_while_the_learning_rate_rises():
    assert settled_at(lambda step: 1.0, lambda step: min(step, 305) / 305) == 410
    assert settled_at(lambda step: 1.0, lambda step: math.cos(step / LONGEST)) == 200


@pytest.mark.parametrize("norm", [0.0, math.inf, math.nan])
def test_no_norm_at_all_is_none_that_has_settled(norm):
    assert settled_at(lambda step: norm) is None


def test_the_density_falls_from_there_by_stages_of_that_length():
    settling = made()
    for step in range(INTERVAL, 201, INTERVAL):
        assert density_at(FINAL, settling.warmup, step) == 1
        settling.take(settling.judge(step, 1.0, 1.0, WINDOW), step)
    found = [density_at(FINAL, settling.warmup, step) for step in (199, 200, 400, 600, 799, 800)]
    assert found == [1, 0.25, 0.0625, 0.015625, 0.015625, 0.01]
    assert not settling.is_due(210) and not settling.measured


def test_without_the_setting_nothing_is_measured():
    assert not any(made(None).is_due(step) or Settling(None, FINAL).is_due(step) for step in range(100))
