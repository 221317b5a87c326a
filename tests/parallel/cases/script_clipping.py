"""Scripts that clip by themselves, and know nothing of compression: each rank clips its own gradient instead."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_  # by name, before anything of ours is loaded

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.logs import messages
from tests.helpers.training import batches, distance, fingerprint, smooth_model, weights

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


def _by_hand(model: Any) -> None:
    grads = [p.grad for p in model.parameters()]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
    for grad in grads:
        grad.data.mul_(min(1.0, C / (float(norm) + 1e-6)))


def _train(
    clip: Clips,
    after: bool = True,
    hook: Callable[[torch.Tensor], torch.Tensor] | None = None,
    scaled: bool = False,
    sgd: bool = True,
    looks: Callable[[Any, Any], None] = lambda model, returned: None,
    **fields: Any,
) -> nn.Module:
    """Train; the first gradient is zero, since a script's clipping counts from the second step on.

    Args:
        clip: what the script does to gradients.
        after: whether it does so after synchronize(), or before.
        hook: what autograd does to each gradient before anybody sees it.
        scaled: whether by a GradScaler.
        sgd: or AdamW.
        looks: called with the model and what `clip` returned.
        fields: of the compression.
    """
    model = smooth_model()
    for p in model.parameters():
        if hook is not None:
            p.register_hook(hook)
    plain = torch.optim.SGD(model.parameters(), 0.05, 0.9) if sgd else torch.optim.AdamW(model.parameters(), 0.003)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    optimizer = DistributedOptimizer(
        plain, model.named_parameters(), Compression.dgc(0.05, **fields), grad_scaler=scaler
    )
    for step, (x, y) in enumerate(batches(STEPS, hvd.rank())):
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(x), y) * (step > 0) * 3).backward()
        if not after:
            looks(model, clip(model))
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        if after:
            looks(model, clip(model))
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    return model


def same_as_given() -> dict[str, Any]:
    """Both idioms, two optimizers, loss scaling: the bits of ``clip_norm=c``, which are not those without."""
    hvd.init()
    results = {}
    for name, sgd in (("sgd", True), ("adamw", False)):
        given = fingerprint(_train(_nothing, sgd=sgd, clip_norm=C))
        results[name] = {
            "after": fingerprint(_train(_norm, sgd=sgd)) == given,
            "before": fingerprint(_train(_norm, after=False, sgd=sgd)) == given,
            "measured again": fingerprint(_train(_logs_too, sgd=sgd)) == given,
            "measured again, before": fingerprint(_train(_logs_too, after=False, sgd=sgd)) == given,
            "scaled": fingerprint(_train(_norm, sgd=sgd, scaled=True)) == given,
            "another c is left out": fingerprint(_train(_norm, sgd=sgd, clip_norm=C)) == given,
            "none": fingerprint(_train(_nothing, sgd=sgd)) != given,
            "prints": given,
        }
    return results


def first_step() -> dict[str, float]:
    """Distances of u (Adam: of the second moment's root) after the first step from those with ``clip_norm=c``.

    The gradient is a hundred times as large as the limit, and the script clips from the first step on.
    """
    hvd.init()
    found: dict[str, float] = {}
    for name, sgd in (("sgd", True), ("adamw", False)):
        kept = {}
        for way in ("given", "after", "before", "none"):
            model = smooth_model()
            optimizer: Any = torch.optim.SGD(model.parameters(), 0.05, 0.9)
            if not sgd:
                optimizer = torch.optim.AdamW(model.parameters(), 0.003)
            compression = Compression.dgc(0.05, clip_norm=C if way == "given" else None, factor_masking=False)
            optimizer = DistributedOptimizer(optimizer, model.named_parameters(), compression)
            x, y = next(iter(batches(1, hvd.rank())))
            (F.mse_loss(model(x), y) * 30).backward()
            if way == "before":
                _norm(model)
            optimizer.synchronize()
            if way == "after":
                _norm(model)
            with optimizer.skip_synchronize():
                optimizer.step()
            tensors = optimizer.residual_state_dict()["tensors"].values()
            parts = [array for arrays in tensors for part, array in sorted(arrays.items()) if part != "v"]
            second, names = session(optimizer).exchange.second, session(optimizer).exchange.compressed
            kept[way] = torch.cat(parts or [torch.from_numpy(second[name].square()).sqrt() for name in names])
        found |= {f"{name}, {way}": distance(kept["given"], kept[way]) for way in ("after", "before", "none")}
    return found


def told() -> list[str]:
    """What a script is told that clips at every step, without and with a ``clip_norm`` of another size."""
    hvd.init()
    with messages() as texts:
        _train(_norm)
        _train(_norm, clip_norm=10 * C)
        _train(_nothing)
    return [text for text in texts if "clip" in text]


def returned_norms() -> dict[str, Any]:
    """What clip_grad_norm_ returns, beside the norms of the gradients themselves."""
    hvd.init()
    results: dict[str, Any] = {}
    for after in (True, False):
        own, returned = [], []

        def see(grad: torch.Tensor, own: list[float] = own) -> torch.Tensor:
            own.append(float(grad.norm()) ** 2)
            return grad

        _train(_norm, after, see, looks=lambda model, norm, returned=returned: returned.append(float(norm)))
        tensors = len(own) // STEPS
        squares = torch.tensor([sum(own[i * tensors : (i + 1) * tensors]) for i in range(STEPS)])
        shared = hvd.allreduce(squares, name=f"squares.{after}")
        expected = (shared if after else squares).sqrt().tolist()
        results["after" if after else "before"] = {"expected": expected[2:], "returned": returned[2:]}
    return results


def _trained(
    clip: Callable[[int, Any], None],
    steps: int = STEPS,
    before: Callable[[int, Any], None] = lambda step, optimizer: None,
) -> tuple[nn.Module, Any]:
    """Model and optimizer of a script that trains with ``clip(step, model)`` after synchronize().

    Args:
        clip: what this rank does to the updates of a step.
        steps: number of batches of this rank.
        before: called with the number of a step and the optimizer before its backward pass.
    """
    hvd.init()
    model = smooth_model()
    sgd = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    optimizer = DistributedOptimizer(sgd, model.named_parameters(), Compression.dgc(0.05))
    for step, (x, y) in enumerate(batches(steps, hvd.rank())):
        before(step, optimizer)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.synchronize()
        clip(step, model)
        with optimizer.skip_synchronize():
            optimizer.step()
    return model, optimizer


def resumed() -> list[bool]:
    """Gone on with in the middle, by a new optimizer: the weights of a run that was not, for either idiom."""
    hvd.init()
    same = []
    for after in (True, False):
        ends = []
        for stops in (False, True):
            model, optimizer = _made(0)
            for step, (x, y) in enumerate(batches(STEPS, hvd.rank())):
                if stops and step == STEPS // 2:
                    kept = [copy.deepcopy(each.state_dict()) for each in (model, optimizer)]
                    residuals = optimizer.residual_state_dict()
                    model, optimizer = _made(1)
                    model.load_state_dict(kept[0])
                    optimizer.load_state_dict(kept[1])
                    optimizer.load_residual_state_dict(residuals)
                optimizer.zero_grad()
                (30 * F.mse_loss(model(x), y)).backward()
                if not after:
                    _norm(model)
                optimizer.synchronize()
                if after:
                    _norm(model)
                with optimizer.skip_synchronize():
                    optimizer.step()
            ends.append(fingerprint(model))
        same.append(ends[0] == ends[1])
    return same


def _made(seed: int) -> tuple[nn.Module, Any]:
    model = smooth_model(seed)
    sgd = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    return model, DistributedOptimizer(sgd, model.named_parameters(), Compression.dgc(0.05))


def measured_on_one_rank() -> str:
    """Rank 0 alone calls clip_grad_norm_ in some steps, to log the norm."""

    def clip(step: int, model: Any) -> None:
        if hvd.rank() == 0 and step % 2 == 0:
            assert clip_grad_norm_(model.parameters(), 1e9) > 0

    return fingerprint(_trained(clip)[0])


def more_on_one_rank() -> dict[str, Any]:
    """All ranks clip, or log, and rank 0 logs a layer's norm as well; rank 1 leaves out what it logs now and then."""
    found: dict[str, Any] = {}
    for name, limit in {"clipped": C, "logged": 1e6}.items():
        norms = []

        def clip(step: int, model: Any, limit: float = limit, norms: list[float] = norms) -> None:
            if hvd.rank() == 0 and step % 2 == 0:
                assert clip_grad_norm_(model[0].parameters(), 1e6) > 0
            if hvd.rank() == 0 or limit == C or step % 4 != 2:
                norms.append(float(clip_grad_norm_(model.parameters(), limit)))

        found[name] = [fingerprint(_trained(clip)[0]), norms[-1]]
    return found


def odd_orders() -> dict[str, Any]:
    """Norms of order 0 and below: torch's own function, on what stands in ``p.grad``."""
    found = []

    def clip(step: int, model: Any) -> None:
        for p in (0.0, -1.0, -math.inf):
            own = torch.nn.utils.get_total_norm([x.grad for x in model.parameters()], p)
            found.append((float(own), float(clip_grad_norm_(model.parameters(), 1e9, p))))

    return {"fingerprint": fingerprint(_trained(clip)[0]), "found": found}


def other_clippings() -> dict[str, float]:
    """Distances from runs in which autograd itself gives clipped gradients: by value, by parameter, other norms."""
    hvd.init()
    root = math.sqrt(hvd.size())

    def within(limit: float, p: float = 2.0) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda grad: grad * min(1.0, root * limit / max(1e-30, float(torch.linalg.vector_norm(grad, p))))

    def each(p: float) -> Clips:
        return lambda model: [clip_grad_norm_(x, C, norm_type=p) for x in model.parameters()]

    pairs = {
        "value": (
            lambda model: clip_grad_value_(model.parameters(), 0.05),
            lambda g: g.clamp(-root * 0.05, root * 0.05),
        ),
        "each parameter": (each(2.0), within(C)),
        "each, largest element": (each(math.inf), within(C, math.inf)),
    }
    found = {}
    for name, (clip, hook) in pairs.items():
        reference = weights(_train(_nothing, hook=hook))
        found[name] = distance(reference, weights(_train(clip)))
        found[f"{name}, before"] = distance(reference, weights(_train(clip, after=False)))
        found[f"{name}: acts"] = distance(reference, weights(_train(_nothing)))
    return found


def clipped_by_hand() -> dict[str, Any]:
    """A script that multiplies ``p.grad.data`` itself, without and with ``clip_norm``."""
    hvd.init()
    with messages() as texts:
        models = _train(_by_hand), _train(_by_hand, clip_norm=C)
    return {"told": [text for text in texts if "clip" in text], "fingerprints": list(map(fingerprint, models))}


def others() -> dict[str, Any]:
    """Gradients that are not ours are clipped as ever; those of a step that is not finite have norm NaN everywhere."""
    hvd.init()
    norms: list[float] = []
    _train(
        _norm, hook=lambda g: g * math.nan if hvd.rank() == 1 else g, looks=lambda _, norm: norms.append(float(norm))
    )
    linear = nn.Linear(3, 3)
    (linear(torch.ones(1, 3)) * 100).sum().backward()
    norm = float(clip_grad_norm_(linear.parameters(), 1.0))
    after = float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in linear.parameters()])))  # type: ignore[union-attr]
    return {"nan": all(map(math.isnan, norms)), "norm": norm, "after": after}


def uneven_data() -> str:
    """A script that clips after synchronize(), whose ranks have different numbers of batches."""
    hvd.init()
    model, _optimizer = _trained(lambda step, model: _norm(model), STEPS if hvd.rank() else STEPS // 2)
    assert hvd.join() == hvd.size() - 1
    return fingerprint(model)


def loaded_on_one_rank() -> str:
    """A script that clips after synchronize() loads a state on rank 0 alone, in the middle, and broadcasts it."""

    def load(step: int, optimizer: Any) -> None:
        if step in (0, STEPS // 2):
            if hvd.rank() == 0:
                optimizer.load_state_dict(optimizer.state_dict())
            hvd.broadcast_optimizer_state(optimizer, 0)

    return fingerprint(_trained(lambda step, model: _norm(model), before=load)[0])
