"""What scripts do to a model, its gradients and its optimizer after wrapping: as in stock Horovod, or told in words."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer, WarmupSchedule, load_checkpoint, save_checkpoint
from tests.helpers.errors import error_of
from tests.helpers.training import UNROUNDED, batches, distance, fingerprint, momentum_sgd, smooth_model, train, weights
from tests.parallel.cases.state import _shared_folder

_CAST = (torch.float64, torch.bfloat16)
_ALL = {"factor_masking": False, "min_numel": 1, **UNROUNDED}


def _wrapped(model: Any, sgd: Any = None, compression: Any = None, **more: Any) -> Any:
    compression = compression or Compression.dgc(0.1)
    return DistributedOptimizer(sgd or momentum_sgd(model), model.named_parameters(), compression, **more)


def cut_or_turned() -> dict[str, str]:
    """Parameters that are cut to a part, or become complex, after wrapping: kernels would write beyond gradients."""
    hvd.init()
    errors = {}
    for name, compression in (("whole", Compression.dgc(0.1)), ("clipped", Compression.dgc(0.1, clip_norm=1.0))):
        model = smooth_model()
        optimizer = _wrapped(model, compression=compression)
        train(model, optimizer, 2)
        layer = model[4]
        layer.weight.data, layer.bias.data = layer.weight.data[:8].clone(), layer.bias.data[:8].clone()
        model[6].weight.data = model[6].weight.data[:, :8].clone()
        errors[name] = error_of(lambda m=model, o=optimizer: train(m, o, 1))
    model = smooth_model()
    optimizer = _wrapped(model)
    model.to(torch.complex64)
    x, _ = next(iter(batches(1, hvd.rank())))
    errors["complex"] = error_of(lambda: model(x.to(torch.complex64)).abs().sum().backward())
    return errors


def cast() -> dict[str, Any]:
    """``model.double()`` and ``.bfloat16()`` after wrapping, before the first step; stock takes the former alone."""
    hvd.init()
    kinds = {"adam": torch.optim.Adam, "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr, 0.9)}
    found: dict[str, Any] = {}
    for kind, make in kinds.items():
        ends = []
        for dtype, way in ((torch.float64, "stock"), *((d, w) for d in _CAST for w in ("topk", "dgc", "local"))):
            model = smooth_model()
            inner = make(model.parameters(), lr=0.01)
            if way == "stock":
                optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
            elif way == "local":
                optimizer = _wrapped(model, inner, Compression.local(steps=2))
            else:
                optimizer = _wrapped(model, inner, getattr(Compression, way)(1.0, **_ALL))
            model.to(dtype)
            for x, y in batches(4, hvd.rank()):
                optimizer.zero_grad()
                F.mse_loss(model(x.to(dtype)), y.to(dtype)).backward()
                optimizer.step()
            state = [x for entries in optimizer.state.values() for x in entries.values() if x is not None and x.ndim]
            dtypes = sorted({str(x.dtype) for x in state})
            found[f"{kind}, {way}, {dtype}"] = {"dtypes": dtypes, "print": fingerprint(model.float())}
            ends.append(weights(model))
        found[f"{kind}, topk and stock"] = distance(ends[0], ends[1])
    return found


def own_gradients() -> dict[str, Any]:
    """Gradients that a script computes, cuts in place, on some ranks alone, and puts into p.grad: no backward pass."""
    hvd.init()
    ends, errors = [], []
    for way in ("stock", "ours"):
        model = smooth_model()
        sgd = momentum_sgd(model)
        ours = way == "ours"
        optimizer = (
            _wrapped(model, sgd, Compression.dgc(1.0, **_ALL))
            if ours
            else hvd.DistributedOptimizer(sgd, model.named_parameters())
        )

        def steps(model: Any = model, optimizer: Any = optimizer) -> None:
            for step, (x, y) in enumerate(batches(6, hvd.rank())):
                if step == 4:
                    model.zero_grad()  # the memory of the old ones may become that of the new ones
                parameters = list(model.parameters())
                gradients = torch.autograd.grad(F.mse_loss(model(x), y), parameters)
                for p, gradient in zip(parameters, gradients, strict=True):
                    p.grad = gradient.mul_(0.5) if step % 2 or (hvd.rank() and step == 2) else gradient
                optimizer.step()

        errors.append(error_of(steps))
        ends.append(weights(model))
    return {"errors": errors, "distance": distance(*ends), "twice": error_of(optimizer.step)}


def dropped() -> list[bool]:
    """Whether exchange and engines outlive their optimizer, without Python's collector of cycles."""
    hvd.init()
    gc.collect()
    gc.disable()
    try:
        model = smooth_model()
        optimizer = _wrapped(model)
        train(model, optimizer, 2)
        left = [weakref.ref(each) for each in (session(optimizer).exchange, *session(optimizer).exchange.engines)]
        del optimizer
        return [each() is not None for each in left]
    finally:
        gc.enable()


def commits_within_an_accumulation() -> dict[str, Any]:
    """``TorchState.commit()`` and ``restore()`` after the first of two backward passes."""
    hvd.init()
    model = smooth_model()
    optimizer = _wrapped(model, backward_passes_per_step=2)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
    train(model, optimizer, 3, passes=2)
    before, steps = fingerprint(model), session(optimizer).exchange.steps
    x, y = next(iter(batches(1, hvd.rank())))
    F.mse_loss(model(x), y).backward()
    errors = [error_of(state.save)]
    F.mse_loss(model(x), y).backward()
    refused = error_of(state.save)  # gradients are being exchanged
    optimizer.step()
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    errors.append(error_of(state.restore))
    back = fingerprint(model) == before, session(optimizer).exchange.steps == steps
    optimizer.zero_grad()
    train(model, optimizer, 2, passes=2)
    return {"errors": errors, "refused": refused, "back": back, "print": fingerprint(model)}


def loaded_by_one_rank() -> dict[str, Any]:
    """Rank 0 alone loads a state, then all broadcast: of optimizers whose new state stock leaves empty, or has more."""
    hvd.init()
    sgd, adam = torch.optim.SGD, torch.optim.Adam
    kinds = {
        "amsgrad": (adam, {"lr": 0.01, "amsgrad": True}),
        "dampening": (sgd, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
        "no momentum": (sgd, {"lr": 0.1, "weight_decay": 0.1}),
    }
    found: dict[str, Any] = {}
    for name, (kind, options) in kinds.items():
        for way, compression in (("topk", Compression.topk(0.1)), ("local", Compression.local(steps=2))):
            model = smooth_model()
            plain = kind(model.parameters(), **options)
            x, y = next(iter(batches(1, 0)))
            F.mse_loss(model(x), y).backward()
            plain.step()
            plain.param_groups[0]["lr"] = 0.05
            saved = copy.deepcopy(plain.state_dict())
            model = smooth_model()
            optimizer = _wrapped(model, kind(model.parameters(), **options), compression)
            if hvd.rank() == 0:
                optimizer.load_state_dict(saved)
            before = fingerprint(model)
            hvd.broadcast_optimizer_state(optimizer, 0)
            state = optimizer.state_dict()["state"]
            sums = {i: {key: float(x.sum()) for key, x in entries.items()} for i, entries in state.items()}
            moved = fingerprint(model) != before
            train(model, optimizer, 2)
            found[f"{name}, {way}"] = {
                "state": repr(sums),
                "lr": optimizer.param_groups[0]["lr"],
                "moved": moved,
                "print": fingerprint(model),
            }
    return found


def parts_and_additions() -> dict[str, Any]:
    """Two optimizers over parts of one model in one directory; a group that is added to the inner optimizer."""
    hvd.init()
    model = smooth_model()
    named = list(model.named_parameters())
    halves = [torch.optim.SGD([p for _, p in part], 0.1, 0.9) for part in (named[:4], named[4:])]
    first, second = (DistributedOptimizer(half, named, Compression.dgc(0.1)) for half in halves)
    for x, y in batches(2, hvd.rank()):
        F.mse_loss(model(x), y).backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    with _shared_folder() as folder:
        save_checkpoint(folder, model, first)
        save_checkpoint(folder, model, first)
        errors = [error_of(lambda: save_checkpoint(folder, model, second))]
        load_checkpoint(folder, model, first)
    inner = torch.optim.SGD([p for _, p in named[:4]], 0.1)
    optimizer = DistributedOptimizer(inner, named[:4], Compression.dgc(0.1))
    inner.add_param_group({"params": [p for _, p in named[4:]]})
    x, y = next(iter(batches(1, hvd.rank())))
    F.mse_loss(model(x), y).backward()
    errors.append(error_of(optimizer.step))
    return {"errors": errors}


def epochs_of_any_kind() -> dict[str, Any]:
    """Epochs as scripts have them, told by hand or by a sampler."""
    hvd.init()
    model = smooth_model()
    optimizer = _wrapped(model, compression=Compression.dgc(0.1, warmup=WarmupSchedule(epochs=3)))
    sampler = torch.utils.data.DistributedSampler(range(64), num_replicas=hvd.size(), rank=hvd.rank())
    kept = []
    for epoch in (1, 2.0, np.int64(2), np.float32(1.0)):
        for tell in (optimizer.set_epoch, sampler.set_epoch):
            tell(epoch)
            kept.append(repr(session(optimizer).exchange.epoch))
    train(model, optimizer, 1)
    optimizer.load_residual_state_dict(optimizer.residual_state_dict())
    return {"kept": kept, "errors": [error_of(lambda e=epoch: optimizer.set_epoch(e)) for epoch in (1.5, "2", None)]}
