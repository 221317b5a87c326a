"""What is said of a run while it goes on: beyond its limits alone, after several looks, and once."""

from __future__ import annotations

import pytest

from dgc_horovod import advice

DENSITY = 0.01
LIMITS = {
    "residual_ratio": (advice.MOST_WAITING / DENSITY**0.5, "residual"),
    "staleness_99": (advice.MOST_STALE / DENSITY, "staleness"),
    "overlap": (advice.MOST_OVERLAP, "overlap"),
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
    monkeypatch.setattr(advice, "_given", {})
    with caplog.at_level("WARNING", "dgc_horovod"):
        for _ in range(3):
            advice.tell({"overlap": "too much of it"})
            advice.tell({})
    assert caplog.text.count("too much of it (docs/tuning.md#while-it-runs)") == 1
    assert advice.given() == ["too much of it"]
