"""Which GradScaler drives an optimizer, in scripts that nobody has edited."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from dgc_horovod.torch.gradients.scaling import SeenScaler, stop_watching, watch_scalers
from dgc_horovod.torch.session.records import Passes


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
    """The scale that a backward pass finds, and what comes after it, in a step with `scaler`, or without one."""
    found = backward(optimizer, seen, scaler)
    assert seen.get_scale() == found
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad()
    return found


def backward(optimizer, seen, scaler=None):
    """The scale that a backward pass finds."""
    found = []
    (p,) = optimizer.param_groups[0]["params"]
    hook = p.register_post_accumulate_grad_hook(lambda _: found.append(seen.get_scale()))
    loss = (p * p).sum()
    (scaler.scale(loss) if scaler is not None else loss).backward()
    hook.remove()
    return found[0]


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


@pytest.mark.parametrize("uneven", ["join", "no batch"])
def test_a_step_without_a_loss_has_the_scale_of_before(uneven):
    """As a rank in join makes them, and one that has no batch, whose gradients are zero."""
    optimizer, seen = watched()
    scaler = scaler_of(8.0)
    scale_at(optimizer, seen, scaler)
    assert seen.get_scale() == 1
    passes = Passes("ab", 1)
    exchange = SimpleNamespace(in_join=uneven == "join")
    carrier = SimpleNamespace(exchanges_in_backward=False)
    optimizer._dgc = SimpleNamespace(exchange=exchange, passes=passes, carrier=carrier)
    assert seen.get_scale() == 8
    if uneven == "no batch":
        passes.comes("a")
        assert seen.get_scale() == 1


def test_a_scaler_that_is_switched_off_and_on():
    """The first gradient without a loss scale was divided by it: weights grew to 1e18 in three steps."""
    optimizer, seen = watched()
    scaler = scaler_of(8.0)
    for used in (True, True, False, False, True, True, False):
        assert scale_at(optimizer, seen, scaler if used else None) == (8 if used else 1)


def test_a_new_optimizer_without_the_scaler_of_the_one_before():
    (first, of_first), scaler = watched(), scaler_of(8.0)
    scale_at(first, of_first, scaler)
    second, of_second = watched()
    assert [scale_at(second, of_second) for _ in range(2)] == [1, 1]
    assert scale_at(first, of_first, scaler) == 8


@pytest.mark.parametrize("updated", ["at once", "at the end"])
def test_an_optimizer_without_a_scaler_comes_after_one_with(updated):
    """The two networks of a GAN, one of which computes in half precision."""
    (scaled, of_scaled), (plain, of_plain), scaler = watched(), watched(), scaler_of(8.0)
    for _ in range(3):
        assert backward(scaled, of_scaled, scaler) == 8
        scaler.step(scaled)
        if updated == "at once":
            scaler.update()
        assert scale_at(plain, of_plain) == 1
        if updated == "at the end":
            scaler.update()


@pytest.mark.parametrize("losses", ["one", "two"])
def test_two_optimizers_stepped_one_after_the_other(losses):
    """What is asked of the second after the first has been stepped has its scale all the same."""
    (first, of_first), (second, of_second), scaler = watched(), watched(), scaler_of(8.0)
    both = [each.param_groups[0]["params"][0] for each in (first, second)]
    for _ in range(3):
        parts = [p.sum() for p in both]
        for loss in parts if losses == "two" else [sum(parts)]:
            scaler.scale(loss).backward()
        for optimizer, seen in ((first, of_first), (second, of_second)):
            assert seen.get_scale() == 8
            scaler.step(optimizer)
        scaler.update()


def test_several_backward_passes_of_a_step_have_its_scale():
    optimizer, seen = watched()
    scaler = scaler_of(8.0)
    for _ in range(2):
        assert [backward(optimizer, seen, scaler) for _ in range(3)] == [8] * 3
        scaler.step(optimizer)
        scaler.update()


def test_a_step_that_is_skipped_ends_as_any_other():
    optimizer, seen = watched()
    scaler = scaler_of(8.0)
    (p,) = optimizer.param_groups[0]["params"]
    for _ in range(2):
        backward(optimizer, seen, scaler)
        p.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert [scale_at(optimizer, seen, scaler), scale_at(optimizer, seen)] == [2, 1]


@pytest.mark.parametrize("stepped_by", ["scaler", "script"])
def test_unscaled_before_the_step(stepped_by):
    optimizer, seen = watched()
    scaler = scaler_of(8.0)
    hooked = []
    optimizer.register_step_pre_hook(lambda *_: hooked.append(seen.get_scale()))
    for _ in range(2):
        assert backward(optimizer, seen, scaler) == 8
        scaler.unscale_(optimizer)
        if stepped_by == "scaler":
            scaler.step(optimizer=optimizer)
        else:
            optimizer.step()
        scaler.update()
    assert hooked == [8, 8]
    assert scale_at(optimizer, seen) == 1


def test_inside_a_step_its_scale_holds_until_the_end():
    """Of an optimizer around the wrapped one, too, which is what accelerate gives a script."""
    optimizer, seen = watched()
    asked, around = [], torch.optim.SGD(optimizer.param_groups[0]["params"], 0.1)
    around.step = lambda: [optimizer.step(), asked.append(seen.get_scale())]
    scaler = scaler_of(8.0)
    for _ in range(3):
        assert backward(optimizer, seen, scaler) == 8
        scaler.step(around)
        scaler.update()
    assert asked == [8] * 3


def test_a_loss_of_evaluation_is_no_loss_of_training():
    optimizer, seen = watched()
    scaler = scaler_of(8.0)
    scale_at(optimizer, seen, scaler)
    with torch.no_grad():
        scaler.scale(outputs=torch.ones(1))
    assert scale_at(optimizer, seen) == 1


def test_a_loss_from_before_the_optimizer_was_wrapped():
    scaler, p = scaler_of(8.0), torch.nn.Parameter(torch.ones(3))
    loss = scaler.scale(p.sum())
    optimizer, seen = torch.optim.SGD([p], 0.1), SeenScaler()
    seen.belongs_to(optimizer)
    loss.backward()
    assert seen.get_scale() == 8
