"""What is said of a run while it goes on: beyond its limits alone, after several looks, and once."""

from __future__ import annotations

import pytest

from dgc_horovod import advice
from dgc_horovod.launch.reports import Reports
from dgc_horovod.stats import PROCESS
from tests.helpers.records import rank

DENSITY = 0.01
LIMITS = {
    "residual_ratio": (advice.MOST_WAITING / DENSITY**0.5, "residual"),
    "staleness_99": (advice.MOST_STALE / DENSITY, "staleness"),
    "overlap": (advice.MOST_OVERLAP + DENSITY, "overlap"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_each_figure_has_its_limit(name):
    limit, kind = LIMITS[name]
    for factor, expected in ((0.99, set()), (1.01, {kind})):
        judge = advice.Compression()
        said = [judge.on({name: factor * limit}, DENSITY).keys() for _ in range(5)]
        assert said[-1] == expected and not any(said[:-1]), "several looks have to agree"


def test_one_look_within_the_range_begins_anew():
    judge, bad, good = advice.Compression(), {"overlap": 0.9}, {"overlap": 0.0}
    said = [bool(judge.on(figures, DENSITY)) for figures in [bad] * 4 + [good] + [bad] * 5]
    assert said == [False] * 9 + [True]


def test_a_figure_that_is_not_there_is_nothing():
    judge = advice.Compression()
    assert not any(judge.on({}, DENSITY) for _ in range(10))


def test_it_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(PROCESS, "advice", {})
    with caplog.at_level("WARNING", "dgc_horovod"):
        for _ in range(3):
            advice.tell({"overlap": "too much of it"})
            advice.tell({})
    assert caplog.text.count("too much of it (docs/tuning.md#while-it-runs)") == 1
    assert advice.given() == ["too much of it"]


SLOW = 2  # the rank that waits least


def told(*steps: int) -> list[dict]:
    """What ranks tell after so many steps each."""
    return [rank(i, f"host{i}", made, 0.01 if i == SLOW else 0.06) for i, made in enumerate(steps)]


@pytest.mark.parametrize(
    ("looks", "heard"),
    [
        ([told(40, 40, 40, 40)], False),
        ([told(60, 60, 60, 45)], False),  # which may only have reported earlier
        ([told(60, 60, 60, 60)], True),
        ([told(400, 20, 400, 400)], True),  # rank 1 reports no more
        ([told(9000, 9000, 9000, 9000)[:2], told(9100, 40, 9100, 9100)], True),  # it is another process, new
        ([told(9000, 9000, 9000, 9000)[:2], told(9100, 60, 60, 60)], True),  # and these are
    ],
)
def test_a_rank_that_stays_behind_does_not_silence_what_is_said_of_the_others(looks, heard, monkeypatch):
    monkeypatch.setattr(PROCESS, "advice", {})
    reports = Reports("key@127.0.0.1:1")
    for ranks in looks:
        reports._judge(ranks)
    assert [text.split(" is slow")[0] for text in advice.given()] == [f"rank {SLOW} (host{SLOW})"] * heard


def test_a_rank_that_begins_anew_is_not_taken_for_slow(monkeypatch):
    """Its seconds of waiting are fewer than those of the process before, not fewer than those of the other ranks."""
    monkeypatch.setattr(PROCESS, "advice", {})
    reports, even = Reports("key@127.0.0.1:1"), [rank(i, "host", 9000, 0.05) for i in range(4)]
    reports._judge(even)
    for steps in (60, 120, 180):
        reports._judge([rank(i, "host", steps if i == 1 else 9000 + steps, 0.05) for i in range(4)])
    assert advice.given() == [] and {of["timed_steps"] for of in reports._judged.values()} == {180, 9180}
