"""Scripts that clip by themselves, and know nothing of compression: each rank clips its own gradient instead."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import torch
import torch.nn as nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_  # by name, before anything of ours is loaded

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression
from tests.helpers.logs import messages
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.regression import adamw, sgd, step
from tests.helpers.training import batches, distance, fingerprint, first_loss, made, smooth_model, weights

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
C, STEPS = 0.3, 12
Clips = Callable[[Any], Any]


def _norm(model: Any) -> Any:
    return clip_grad_norm_(model.parameters(), C)


def _logs_too(model: Any) -> Any:
    norm = _norm(model)
    clip_grad_norm_(model.parameters(), 1e6)
    return norm


def _nothing(model: Any) -> None:
    return None


each_kind = pytest.mark.parametrize("make", [sgd, adamw])


def _step(optimizer: Any, loss: torch.Tensor, clip: Callable[[], Any], way: str = "after", scaler: Any = None) -> None:
    """One step, in which the script clips before synchronize(), or after."""
    optimizer.zero_grad()
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(loss).backward()
    if way == "before":
        clip()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    if way == "after":
        clip()
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()


def _train(
    clip: Clips,
    way: str = "after",
    hook: Callable[[torch.Tensor], torch.Tensor] | None = None,
    scaled: bool = False,
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    looks: Callable[[Any], None] = lambda returned: None,
    **fields: Any,
) -> nn.Module:
    """Train; the first gradient is zero, since a script's clipping counts from the second step on.

    Args:
        clip: what the script does to gradients.
        way: whether it does so "after" synchronize(), or "before".
        hook: what autograd does to each gradient before anybody sees it.
        scaled: whether by a GradScaler.
        make: the optimizer.
        looks: called with what `clip` returned.
        fields: of the compression.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    model, optimizer = made(Compression.dgc(0.05, **fields), make, grad_scaler=scaler)
    for p in model.parameters() if hook is not None else ():
        p.register_hook(hook)
    for number, (x, y) in enumerate(batches(STEPS, hvd.rank())):
        loss = nn.functional.mse_loss(model(x), y) * (number > 0) * 3
        _step(optimizer, loss, lambda: looks(clip(model)), way, scaler)
    return model


@each_kind
def test_both_idioms_give_the_bits_of_clip_norm(make):
    """Loss scaling too; and those bits are not those without, which are those of a limit that nothing reaches."""
    given = fingerprint(_train(_nothing, make=make, clip_norm=C))
    for name, model in {
        "after": _train(_norm, make=make),
        "before": _train(_norm, "before", make=make),
        "measured again": _train(_logs_too, make=make),
        "measured again, before": _train(_logs_too, "before", make=make),
        "scaled": _train(_norm, make=make, scaled=True),
        "another c is left out": _train(_norm, make=make, clip_norm=C),
    }.items():
        assert fingerprint(model) == given, name
    without, beyond = _train(_nothing, make=make), _train(_nothing, make=make, clip_norm=1e6)
    assert fingerprint(without) == fingerprint(beyond)
    assert distance(weights(without), weights(model)) > 1e-3
    same_on_ranks(given)


@each_kind
def test_the_first_step_leaves_no_more_than_it_should(make):
    """The gradient is a hundred times as large as the limit, and the script clips from the first step on.

    Looks at u, or the root of Adam's second moment, beside those with ``clip_norm=c``.
    """
    kept = {}
    for way in ("given", "after", "before", "none"):
        compression = Compression.dgc(0.05, clip_norm=C if way == "given" else None, factor_masking=False)
        model, optimizer = made(compression, make)
        _step(optimizer, 30 * first_loss(model), lambda: _norm(model), way)  # noqa: B023
        tensors = optimizer.residual_state_dict()["tensors"].values()
        parts = [array for arrays in tensors for part, array in sorted(arrays.items()) if part != "v"]
        second, names = session(optimizer).exchange.second, session(optimizer).exchange.compressed
        kept[way] = torch.cat(parts or [torch.from_numpy(second[name].square()).sqrt() for name in names])
    after, before, none = (distance(kept["given"], kept[way]) for way in ("after", "before", "none"))
    if make is sgd:
        assert none > 1 and max(after, before) < 1e-5
    else:  # of squares, the sum over ranks is known; each had clipped by a factor of its own
        assert max(after, before) < 0.1 * none


@pytest.mark.parametrize("way", ["after", "before"])
def test_what_a_script_clips_is_part_of_the_state(way):
    """The first gradient after a resume had entered u and v unclipped."""
    ends, compression = [], Compression.dgc(0.05)
    for stops in (False, True):
        model, optimizer = made(compression, sgd)
        for number, (x, y) in enumerate(batches(STEPS, hvd.rank())):
            if stops and number == STEPS // 2:
                other, successor = made(compression, sgd, smooth_model(1))  # as after a restart
                other.load_state_dict(model.state_dict())
                successor.load_state_dict(optimizer.state_dict())
                successor.load_residual_state_dict(optimizer.residual_state_dict())
                model, optimizer = other, successor
            loss = 30 * nn.functional.mse_loss(model(x), y)
            _step(optimizer, loss, lambda: _norm(model), way)  # noqa: B023
        ends.append(fingerprint(model))
    assert ends[0] == ends[1]


def test_a_script_is_told_once():
    """One that clips at every step, without and with a ``clip_norm`` of another size; not with the same."""
    with messages() as texts:
        _train(_norm)
        _train(_norm, clip_norm=10 * C)
        _train(_norm, clip_norm=C)
        _train(_nothing)
    told = [text for text in texts if "clip" in text]
    if hvd.rank():
        assert told == []
        return
    first, second = told
    assert "clipping of gradients to 0.3" in first and "clip_norm=c" in first and "clip_norm=3 of the" in second


@pytest.mark.parametrize("way", ["after", "before"])
def test_the_norm_returned_is_that_of_the_gradients(way):
    own, returned = [], []

    def see(grad: torch.Tensor) -> torch.Tensor:
        own.append(float(grad.norm()) ** 2)
        return grad

    _train(_norm, way, see, looks=lambda norm: returned.append(float(norm)))
    tensors = len(own) // STEPS
    squares = torch.tensor([sum(own[i * tensors : (i + 1) * tensors]) for i in range(STEPS)])
    if way == "after":
        squares = hvd.allreduce(squares, name="squares")
        same_on_ranks(returned[2:])  # every rank must decide alike
    assert returned[2:] == pytest.approx(squares.sqrt().tolist()[2:], rel=1e-5)


def _within(limit: float, p: float = 2.0) -> Callable[[torch.Tensor], torch.Tensor]:
    root = math.sqrt(2)
    return lambda grad: grad * min(1.0, root * limit / max(1e-30, float(torch.linalg.vector_norm(grad, p))))


OTHERS: dict[str, tuple[Clips, Callable[[torch.Tensor], torch.Tensor]]] = {  # the script's, and by autograd itself
    "value": (
        lambda model: clip_grad_value_(model.parameters(), 0.05),
        lambda grad: grad.clamp(-math.sqrt(2) * 0.05, math.sqrt(2) * 0.05),
    ),
    "each parameter": (lambda model: [clip_grad_norm_(x, C) for x in model.parameters()], _within(C)),
    "each, largest element": (
        lambda model: [clip_grad_norm_(x, C, norm_type=math.inf) for x in model.parameters()],
        _within(C, math.inf),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_clippings(name):
    clip, hook = OTHERS[name]
    reference = weights(_train(_nothing, hook=hook))
    for way in ("after", "before"):
        assert distance(reference, weights(_train(clip, way))) < 1e-5
    assert distance(reference, weights(_train(_nothing))) > 1e-3


def test_gradients_of_others_are_clipped_as_ever():
    linear = nn.Linear(3, 3)
    (linear(torch.ones(1, 3)) * 100).sum().backward()
    norm = float(clip_grad_norm_(linear.parameters(), 1.0))
    after = float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in linear.parameters()])))
    assert norm > 100 and after == pytest.approx(1, rel=1e-3)


def test_clipping_of_others_accepts_no_change_of_an_update():
    """The clipping of another network hid that the script had changed this one's update."""
    model, optimizer = made(Compression.dgc(0.05), sgd)
    other = nn.Linear(4, 1)
    other(torch.ones(4)).backward()
    with messages() as texts:
        first_loss(model).backward()
        optimizer.synchronize()
        for p in model.parameters():
            p.grad.mul_(0.5)
        clip_grad_norm_(other.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert sum("the script changed p.grad" in text for text in texts) == (hvd.rank() == 0)


def test_the_norm_of_a_step_that_is_not_finite_is_nan_on_every_rank():
    norms: list[float] = []
    _train(_norm, hook=lambda g: g * math.nan if hvd.rank() == 1 else g, looks=lambda norm: norms.append(float(norm)))
    assert all(map(math.isnan, norms))


def _trained(
    clip: Callable[[int, Any], Any],
    steps: int = STEPS,
    before: Callable[[int, Any], None] = lambda step, optimizer: None,
) -> tuple[nn.Module, Any]:
    """Model and optimizer of a script that trains with ``clip(step, model)`` after synchronize().

    Args:
        clip: what this rank does to the updates of a step.
        steps: number of batches of this rank.
        before: called with the number of a step and the optimizer before its backward pass.
    """
    model, optimizer = made(Compression.dgc(0.05), sgd)
    for number, (x, y) in enumerate(batches(steps, hvd.rank())):
        before(number, optimizer)
        step(model, optimizer, x, y, between=lambda: clip(number, model))  # noqa: B023
    return model, optimizer


def _uneven_data() -> nn.Module:
    """Ranks have different numbers of batches."""
    model, _optimizer = _trained(lambda step, model: _norm(model), STEPS if hvd.rank() else STEPS // 2)
    assert hvd.join() == hvd.size() - 1
    return model


def _loaded_on_one_rank() -> nn.Module:
    """A state is loaded on rank 0 alone, in the middle, and broadcast."""

    def load(step: int, optimizer: Any) -> None:
        if step in (0, STEPS // 2):
            if hvd.rank() == 0:
                optimizer.load_state_dict(optimizer.state_dict())
            hvd.broadcast_optimizer_state(optimizer, 0)

    return _trained(lambda step, model: _norm(model), before=load)[0]


@pytest.mark.parametrize("trained", [_uneven_data, _loaded_on_one_rank])
def test_ranks_that_do_something_else_clip_with_the_others(trained):
    same_on_ranks(fingerprint(trained()))


def test_norms_of_order_zero_and_below_are_torchs():
    """Torch's own function, on what stands in ``p.grad``."""

    def clip(step: int, model: Any) -> None:
        for p in (0.0, -1.0, -math.inf):
            own = float(torch.nn.utils.get_total_norm([x.grad for x in model.parameters()], p))
            returned = float(clip_grad_norm_(model.parameters(), 1e9, p))
            assert returned == pytest.approx(own, rel=1e-4, nan_ok=True)

    same_on_ranks(fingerprint(_trained(clip)[0]))
