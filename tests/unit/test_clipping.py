"""What a script does to updates by its own hands: clipping multiplies all of them by one factor."""

from __future__ import annotations

import math

import pytest
import torch

from dgc_horovod.torch.clipping.local import ELEMENTS, Change, Clip, LocalClipping


@pytest.fixture
def clipping():
    made = LocalClipping(None, [torch.zeros(1), torch.zeros(1)], workers=2, averages=True)
    made.step_ends()
    return made


def _learn(clipping):
    assert clipping.judge([], [0.6, 0.8]) is Change.OTHER and clipping.undoes
    assert clipping.judge([3.0, 4.0], [0.6, 0.8]) is Change.OTHER
    assert clipping.by_hand == pytest.approx(1)


def test_a_norm_that_comes_out_twice_is_clipping(clipping):
    _learn(clipping)
    assert clipping.judge([6.0, 8.0], [0.6, 0.8]) is Change.CLIPPING
    assert clipping.judge([0.3, 0.4], [0.3, 0.4]) is Change.NOTHING


@pytest.mark.parametrize("after", [[3.0, 0.0], [3.0, math.nan], [0.0, 4.0]])
def test_a_mask_never_is(clipping, after):
    for _ in range(4):
        assert clipping.judge([3.0, 4.0], after) is Change.OTHER and clipping.by_hand is None


def test_a_mask_behind_a_clipping_ends_what_was_learnt(clipping):
    _learn(clipping)
    assert clipping.judge([3.0, 4.0], [1.0, 0.0]) is Change.OTHER and clipping.by_hand is None
    assert clipping.judge([3.0, 4.0], [1.0, 0.0]) is Change.OTHER


def test_a_limit_that_is_given_is_no_excuse_for_a_mask():
    made = LocalClipping(1.0, [torch.zeros(1), torch.zeros(1)], workers=2, averages=True)
    assert made.judge([3.0, 4.0], [0.6, 0.8]) is Change.CLIPPING
    assert made.judge([3.0, 4.0], [1.0, 0.0]) is Change.OTHER


@pytest.mark.parametrize("p", [2.0, ELEMENTS])
@pytest.mark.parametrize("limits", [(1.0, 1e6), (1e6, 1.0)])
def test_of_several_calls_of_a_step_the_least_limit_holds(p, limits):
    """A large limit is how scripts measure; the last call had held, and clipped nothing any more."""
    weights = torch.zeros(1), torch.zeros(1)
    made = LocalClipping(None, weights, workers=2, averages=True)
    for limit in limits:
        made.note(Clip(weights, limit, p))
    made.step_ends()
    assert [clip.limit for clip in made.clips] == [1.0]
    for limit in limits:
        made.note_uncompressed(Clip(weights, 2 * limit, p))
    made.uncompressed_step_ends()
    made.goes_on()
    assert [clip.limit for clip in made.clips] == [2.0]


def test_a_limit_of_uncompressed_steps_may_rise():
    weights = (torch.zeros(1),)
    made = LocalClipping(None, weights, workers=2, averages=True)
    for limit in (1.0, 3.0):
        made.note_uncompressed(Clip(weights, limit))
        made.uncompressed_step_ends()
    made.goes_on()
    assert [clip.limit for clip in made.clips] == [3.0]


def test_limits_of_different_norms_are_not_mixed():
    weights = (torch.zeros(1),)
    made = LocalClipping(None, weights, workers=2, averages=True)
    made.note(Clip(weights, 0.5))
    made.note(Clip(weights, 10.0, math.inf))
    made.step_ends()
    assert [(clip.limit, clip.p) for clip in made.clips] == [(10.0, math.inf)]
