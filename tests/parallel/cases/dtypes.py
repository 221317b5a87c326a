"""Tensors that are not contiguous fp32 on the device that Horovod serves."""

from __future__ import annotations

from typing import Any
from unittest import mock

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F

from dgc_horovod.errors import NotFinite
from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer, horovod_carrier
from tests.helpers.logs import messages
from tests.helpers.training import UNROUNDED, batches, fingerprint, momentum_sgd, smooth_model, train


def low_precision() -> dict[str, Any]:
    """A bfloat16 model: gradients are accumulated in fp32, p.grad comes back in its own dtype."""
    hvd.init()
    model = smooth_model().bfloat16()
    optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.05))
    for x, y in batches(10, hvd.rank()):
        optimizer.zero_grad()
        F.mse_loss(model(x.bfloat16()), y.bfloat16()).backward()
        optimizer.step()
    arrays = session(optimizer).exchange.state_arrays()
    dtypes = sorted({str(p.grad.dtype) for p in model.parameters() if p.grad is not None})
    return {
        "fp32 shadow": [_follows_shadow(dtype) for dtype in (torch.float16, torch.bfloat16)],
        "fingerprint": fingerprint(model.float()),
        "dtypes": dtypes,
        "state dtypes": sorted({str(a.dtype) for d in arrays.values() for a in d.values()}),
    }


def _follows_shadow(dtype: torch.dtype) -> bool:
    """u and v equal those computed in fp32 from the low-precision gradients, bit for bit, wherever nothing was sent."""
    w = nn.Parameter(torch.zeros(40, 50, dtype=dtype))
    sgd = torch.optim.SGD([w], lr=1e-3, momentum=0.9)
    optimizer = DistributedOptimizer(sgd, [("w", w)], Compression.dgc(0.01, **UNROUNDED))
    u = v = torch.zeros(w.numel())
    generator = torch.Generator().manual_seed(hvd.rank())
    same = True
    for _ in range(8):
        optimizer.zero_grad()
        (w * torch.randn(40, 50, generator=generator).to(dtype)).sum().backward()
        u = u * 0.9 + w.grad.flatten().float()
        v = v + u
        optimizer.step()
        arrays = {name: torch.from_numpy(a) for name, a in session(optimizer).exchange.state_arrays()["w"].items()}
        kept = arrays["v"] != 0
        same &= bool((arrays["v"][kept] == v[kept]).all() and (arrays["u"][kept] == u[kept]).all())
        same &= int((~kept).sum()) == 20
        u, v = u * kept, v * kept
    return same


def cast_after_wrapping() -> dict[str, Any]:
    """``model.double()`` after wrapping: the hooks still fire, the replicas stay equal."""
    hvd.init()
    model = smooth_model()
    optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.05))
    model.double()
    for x, y in batches(5, hvd.rank()):
        optimizer.zero_grad()
        F.mse_loss(model(x.double()), y.double()).backward()
        in_flight = session(optimizer).under_way
        optimizer.step()
    return {"fingerprint": fingerprint(model), "in flight": in_flight}


def channels_last_clipped() -> dict[str, Any]:
    """Convolution weights in channels_last, dense path and compressed, with a clip that acts."""
    hvd.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 16, 3)).to(memory_format=torch.channels_last)
    optimizer = DistributedOptimizer(
        momentum_sgd(model), model.named_parameters(), Compression.dgc(0.05, clip_norm=1e-3, min_numel=1000)
    )
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
        model(x.to(memory_format=torch.channels_last)).pow(2).sum().backward()
        optimizer.step()
    return {"fingerprint": fingerprint(model)}


def clipped_doubles() -> dict[str, Any]:
    """A model in float64 that is clipped in each way, beside the same in fp32: distance, and the sum of its weights."""
    hvd.init()
    found = {}
    for way in ("script", "elements", "clip_norm", "auto"):
        ends = []
        for dtype in (torch.float32, torch.float64):
            model = smooth_model().to(dtype)
            given = {"clip_norm": 0.5} if way in ("clip_norm", "auto") else {}
            compression = Compression.auto(**given) if way == "auto" else Compression.dgc(0.1, min_numel=64, **given)
            optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), compression)
            for x, y in batches(4, hvd.rank()):
                optimizer.zero_grad()
                F.mse_loss(model(x.to(dtype)), y.to(dtype)).backward()
                optimizer.synchronize()
                if way == "script":
                    nn.utils.clip_grad_norm_(model.parameters(), 0.2)
                elif way == "elements":
                    nn.utils.clip_grad_value_(model.parameters(), 0.05)
                with optimizer.skip_synchronize():
                    optimizer.step()
            ends.append(torch.cat([p.detach().double().flatten() for p in model.parameters()]))
        found[way] = float((ends[1] - ends[0]).norm() / ends[0].norm()), float(ends[1].sum())
    return found


def half_overflow() -> dict[str, Any]:
    """fp16 weights whose update leaves fp16's range: the step is applied on no rank, and training goes on."""
    hvd.init()
    w = nn.Parameter(torch.zeros(40, 50, dtype=torch.float16))
    optimizer = DistributedOptimizer(torch.optim.SGD([w], lr=1e-6), [("w", w)], Compression.topk(0.01))
    moved = []
    with messages() as texts:
        for step in range(40):
            optimizer.zero_grad()
            before = w.detach().clone()
            (w * (6e3 if step < 30 else 6e2)).sum().backward()
            optimizer.step()
            moved.append(bool((w != before).any()))
    arrays = session(optimizer).exchange.state_arrays()["w"]
    return {
        "weights finite": bool(torch.isfinite(w).all()),
        "v finite": bool(torch.isfinite(torch.from_numpy(arrays["v"])).all()),
        "moved": moved,
        "skipped": optimizer.compression_stats()["skipped"],
        "said": [text for text in texts if "large" in text or "finite" in text],
        "where": sorted({where for _, where in session(optimizer).exchange.counts.skips}),
        "stopped": _stops_at_half_overflow(),
        "fingerprint": float(w.detach().double().sum()),
    }


def _stops_at_half_overflow() -> str:
    """What is raised where the job is to stop."""
    w = nn.Parameter(torch.zeros(40, 50, dtype=torch.float16))
    sgd = torch.optim.SGD([w], lr=1e-6)
    optimizer = DistributedOptimizer(sgd, [("w", w)], Compression.topk(0.01, on_nonfinite="stop"))
    try:
        for _ in range(30):
            optimizer.zero_grad()
            (w * 6e3).sum().backward()
            optimizer.step()
    except NotFinite as error:
        return str(error)
    return ""


def through_host_memory() -> dict[str, Any]:
    """Copies on the host are exchanged where Horovod cannot take a tensor: the same weights as without."""
    hvd.init()
    found = {}
    for name in ("as it is", "by the host"):
        model = smooth_model()
        compression = Compression.dgc(0.05, dense_values="fp32", check_every=1, on_mismatch="broadcast")
        optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), compression)
        asked = []

        def needed(x: torch.Tensor, name: str = name, asked: list[Any] = asked) -> bool:
            asked.append(x)
            return name == "by the host"

        with mock.patch.object(horovod_carrier, "needs_host", needed):
            train(model, optimizer, 3)
            if hvd.rank() == 1:  # the others' weights come back by broadcasts
                with torch.no_grad():
                    model[0].bias += 1
            train(model, optimizer, 3)
        found[name] = {"weights": fingerprint(model), "asked": len(asked)}
    return found
