"""Which GradScaler drives an optimizer, in scripts that nobody has edited."""

from __future__ import annotations

import gc

import pytest
import torch

from dgc_horovod.torch.gradients.scaling import SeenScaler, stop_watching, watch_scalers


@pytest.fixture(autouse=True)
def watching():
    watch_scalers()
    yield
    stop_watching()


def watched():
    """An optimizer, and what stands for its scaler."""
    p = torch.nn.Parameter(torch.ones(3))
    optimizer, seen = torch.optim.SGD([p], 0.1), SeenScaler()
    seen.belongs_to(optimizer)
    return optimizer, seen


def scaler_of(scale):
    return torch.amp.GradScaler("cpu", init_scale=scale)


def scale_at(optimizer, seen, scaler=None):
    """The scale that a backward pass would find, in a step with `scaler`, or without one."""
    (p,) = optimizer.param_groups[0]["params"]
    loss = p.sum()
    (scaler.scale(loss) if scaler is not None else loss).backward()
    found = seen.get_scale()
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad()
    return found


@pytest.mark.parametrize("kept", [False, True])
def test_a_new_scaler_each_epoch(kept):
    optimizer, seen = watched()
    scalers = []
    for scale in (8.0, 16.0, 32.0):
        scaler = scaler_of(scale)
        assert [scale_at(optimizer, seen, scaler) for _ in range(3)] == [scale] * 3
        if kept:
            scalers.append(scaler)
        del scaler
        gc.collect()


def test_a_scaler_that_comes_after_steps_without_one():
    optimizer, seen = watched()
    assert scale_at(optimizer, seen) == 1
    scaler = scaler_of(8.0)
    assert [scale_at(optimizer, seen, scaler) for _ in range(2)] == [8, 8]


def test_two_optimizers_with_one_scaler_each_one_with_none():
    (first, of_first), (second, of_second) = watched(), watched()
    (none, of_none), one, other = watched(), scaler_of(8.0), scaler_of(32.0)
    scale_at(none, of_none)
    for step in range(3):
        assert scale_at(first, of_first, one) == 8
        assert scale_at(second, of_second, other) == 32
        assert scale_at(none, of_none) == 1, step


def test_two_optimizers_and_a_scaler_that_both_share_anew_each_epoch():
    (first, of_first), (second, of_second) = watched(), watched()
    for scale in (8.0, 16.0):
        scaler = scaler_of(scale)
        for _ in range(2):
            assert scale_at(first, of_first, scaler) == scale
            assert scale_at(second, of_second, scaler) == scale
        del scaler
        gc.collect()


def test_a_step_that_is_not_the_scripts_has_the_scale_of_before():
    """A rank in join makes steps without a backward pass."""
    optimizer, seen = watched()
    scaler = scaler_of(8.0)
    scale_at(optimizer, seen, scaler)
    assert seen.get_scale() == 8
