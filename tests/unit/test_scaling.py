"""Which GradScaler drives an optimizer, in scripts that nobody has edited."""

from __future__ import annotations

import gc
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.torch.gradients.scaling import SeenScaler, watch_scalers


@pytest.fixture(autouse=True)
def watching():
    watch_scalers()


def watched(p=None):
    """An optimizer, and what stands for its scaler, which hears of every gradient, as a session lets it."""
    p = torch.nn.Parameter(torch.ones(3)) if p is None else p
    optimizer, seen = torch.optim.SGD([p], 0.1), SeenScaler()
    optimizer._dgc = SimpleNamespace(scaler=seen)
    p.register_post_accumulate_grad_hook(lambda _: seen.begin_step(True))
    return optimizer, seen


def scaler_of(scale):
    return torch.amp.GradScaler("cpu", init_scale=scale)


def end_step(optimizer, scaler):
    scaler.step(optimizer)
    scaler.update()


def scale_at(optimizer, seen, scaler=None):
    """The scale that a backward pass finds, and what comes after it, in a step with `scaler`, or without one."""
    found = backward(optimizer, seen, scaler)
    assert seen.get_scale() == found
    if scaler is not None:
        end_step(optimizer, scaler)
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
@pytest.mark.parametrize(
    "steps",
    [
        "a8 a8 a8 a16 a16 a16 a32 a32 a32",  # a new scaler each epoch
        "a8 b8 a8 b8 a16 b16 a16 b16",  # which two optimizers share
        "a1 a8 a8",  # the first comes after steps without one
        "a1 b8 c32 a1 b8 c32 a1 b8 c32",  # an optimizer without one beside two with one each
        "a8 a8 a1 a1 a8 a8 a1",  # divided by the scale of before, weights grew to 1e18 in three steps
        "a8 b1 b1 a8",  # a new optimizer without the scaler of the one before
    ],
)
def test_each_step_has_the_scale_of_its_scaler(steps, kept):
    """Of its optimizer and its loss scale, 1 without a scaler; scalers live on, or end with their last step."""
    optimizers, scalers, ahead = defaultdict(watched), {}, [int(step[1:]) for step in steps.split()]
    for step in steps.split():
        (optimizer, seen), scale = optimizers[step[0]], ahead.pop(0)
        if scale > 1 and scale not in scalers:
            scalers[scale] = scaler_of(float(scale))
        assert scale_at(optimizer, seen, scalers.get(scale)) == scale
        if not kept and scale not in ahead:
            scalers.pop(scale, None)
            gc.collect()


def test_a_step_without_a_loss_has_the_scale_of_before():
    """As a rank in join makes them, and one that has no batch, whose gradients are zero; any scaler may drive it."""
    optimizer, seen = watched()
    scaler = scaler_of(8.0)
    scale_at(optimizer, seen, scaler)
    seen.begin_step(False)
    assert seen.get_scale() == 8
    seen.driven_by(scaler_of(2.0))
    assert seen.get_scale() == 2


@pytest.mark.parametrize("scaled_by", ["another", "none"])
def test_a_scaler_that_has_not_scaled_the_loss_is_refused(scaled_by):
    """Two of them on one optimizer, or a loss that is scaled in compiled code: its scale would be a guess."""
    optimizer, seen = watched()
    backward(optimizer, seen, scaler_of(4.0) if scaled_by == "another" else None)
    with pytest.raises(UnsupportedUse, match="grad_scaler=scaler"):
        scaler_of(8.0).unscale_(optimizer)


def test_a_pass_inside_a_pass_has_its_scale():
    """Of a reentrant checkpoint, and a pass of a loss that is not scaled, after it, has none."""
    optimizer, seen = watched()
    (p,) = optimizer.param_groups[0]["params"]
    scaler = scaler_of(8.0)
    for scale in (8, 1):
        loss = checkpoint(lambda x: (x * p).sum(), torch.ones(3, requires_grad=True), use_reentrant=True)
        (scaler.scale(loss) if scale == 8 else loss).backward()
        assert seen.get_scale() == scale


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
        end_step(optimizer, scaler)


def test_a_step_that_is_skipped_ends_as_any_other():
    optimizer, seen = watched()
    scaler = scaler_of(8.0)
    (p,) = optimizer.param_groups[0]["params"]
    for _ in range(2):
        backward(optimizer, seen, scaler)
        p.grad.fill_(torch.inf)
        end_step(optimizer, scaler)
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
    _, seen = watched(p)
    loss.backward()
    assert seen.get_scale() == 8
