"""What holds of several calls of a script that clip."""

from __future__ import annotations

import math

import pytest
import torch

from dgc_horovod.torch.gradients.clipping import ELEMENTS, Clip, LocalClipping


def clipping():
    weights = torch.zeros(1), torch.zeros(1)
    return weights, LocalClipping(None, weights, workers=2, averages=True)


@pytest.mark.parametrize("p", [2.0, ELEMENTS])
@pytest.mark.parametrize("limits", [(1.0, 1e6), (1e6, 1.0)])
def test_of_several_calls_of_a_step_the_least_limit_holds(p, limits):
    """A large limit is how scripts measure; the last call had held, and clipped nothing any more."""
    weights, made = clipping()
    for limit in limits:
        made.note(Clip(weights, limit, p))
    made.step_ends()
    assert [clip.limit for clip in made.clips] == [1.0]
    for limit in limits:
        made.keep(Clip(weights, 2 * limit, p))
    made.uncompressed_step_ends()
    made.goes_on()
    assert [clip.limit for clip in made.clips] == [2.0]


def test_a_limit_of_uncompressed_steps_may_rise():
    weights, made = clipping()
    for limit in (1.0, 3.0):
        made.keep(Clip(weights, limit))
        made.uncompressed_step_ends()
    made.goes_on()
    assert [clip.limit for clip in made.clips] == [3.0]


def test_limits_of_different_norms_are_not_mixed():
    weights, made = clipping()
    made.note(Clip(weights, 0.5))
    made.note(Clip(weights, 10.0, math.inf))
    made.step_ends()
    assert [(clip.limit, clip.p) for clip in made.clips] == [(10.0, math.inf)]
