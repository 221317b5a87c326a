"""Models and optimizers that cannot be compressed, and odd ones that can."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._common_utils import _set_fsdp_flattened
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.errors import error_of
from tests.helpers.training import batches, fingerprint, momentum_sgd, smooth_model, train

Attempt = Callable[[], Any]


def _wrapped(model: nn.Module, make: Callable[..., Any] = torch.optim.SGD, **options: Any) -> Any:
    optimizer = make(model.parameters(), **{"lr": 0.05, **options})
    return DistributedOptimizer(optimizer, model.named_parameters(), Compression.dgc(0.1, min_numel=16))


def _with(p: torch.Tensor) -> nn.Module:
    """A model with one more parameter."""
    model = smooth_model()
    model.extra = nn.Parameter(p)
    return model


def _twice() -> Any:
    model = smooth_model()
    weight, *others = model.parameters()
    return DistributedOptimizer(
        torch.optim.SGD([weight, *others, weight], 0.1), model.named_parameters(), Compression.dgc(0.1)
    )


def _meta() -> nn.Module:
    return smooth_model().to("meta")


def _fsdp1() -> nn.Module:
    """As FullyShardedDataParallel, which wants a GPU, marks the parameters that it has made views of its shard."""
    model = smooth_model()
    _set_fsdp_flattened(model[0].weight)
    return model


def _data_parallel() -> Any:
    inner = smooth_model()
    wrapper = DistributedDataParallel(inner)  # alive while the optimizer is made
    return _wrapped(inner) or wrapper


def _superseded() -> Any:
    model = smooth_model()
    first, second = _wrapped(model), _wrapped(model)
    x, y = next(iter(batches(1, hvd.rank())))
    nn.functional.mse_loss(model(x), y).backward()
    try:
        first.step()
    finally:
        second.step()


def _on_the_last_rank(broken: nn.Module) -> Any:
    return _wrapped(broken if hvd.rank() == hvd.size() - 1 else smooth_model())


def refused() -> dict[str, str]:
    """Errors of every attempt; the ranks share nothing but Horovod: each has a process group of its own."""
    hvd.init()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    attempts: dict[str, Attempt] = {
        "LBFGS": lambda: _wrapped(smooth_model(), torch.optim.LBFGS),
        "SparseAdam": lambda: _wrapped(smooth_model(), torch.optim.SparseAdam),
        "lazy": lambda: _wrapped(nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 1))),
        "meta": lambda: _wrapped(_meta()),
        "FSDP2": lambda: _wrapped(fully_shard(smooth_model(), mesh=mesh)),
        "FSDP": lambda: _wrapped(_fsdp1()),
        "DDP": _data_parallel,
        "complex": lambda: _wrapped(_with(torch.zeros(4, dtype=torch.complex64))),
        "float8": lambda: _wrapped(_with(torch.zeros(4).to(torch.float8_e5m2))),
        "sparse layout": lambda: _wrapped(_with(torch.eye(4).to_sparse())),
        "twice": _twice,
        "superseded": _superseded,
        "one rank's meta": lambda: _on_the_last_rank(_meta()),
        "one rank's groups": lambda: DistributedOptimizer(
            momentum_sgd(model := smooth_model()),
            model.named_parameters(),
            Compression.dgc(0.1),
            groups=[[1]] if hvd.rank() else None,
        ),
    }
    found = {name: error_of(attempt) for name, attempt in attempts.items()}
    dist.destroy_process_group()
    return found


def among_other_operations() -> dict[str, Any]:
    """Horovod's own operations between backward() and step() change nothing, and give what they should."""
    hvd.init()
    found = []
    for others in (False, True):
        model = smooth_model()
        optimizer = _wrapped(model, momentum=0.9)
        sums = []
        for x, y in batches(4, hvd.rank()):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            if others:
                own = torch.full((2,), float(hvd.rank()))
                results = [
                    hvd.allreduce(own, op=hvd.Sum),
                    hvd.allgather(own),
                    hvd.alltoall(own, splits=torch.tensor([1, 1], dtype=torch.int32))[0],
                    hvd.broadcast(own, 1),
                    *hvd.grouped_allreduce([own, own], op=hvd.Max),
                ]
                hvd.barrier()
                sums.append([float(result.sum()) for result in results] + [hvd.broadcast_object(hvd.rank(), 1)])
            optimizer.step()
        found.append([fingerprint(model), sums])
    return {"same": found[0][0] == found[1][0], "results": found[1][1]}


def _after_data_parallel() -> nn.Module:
    inner = smooth_model()
    DistributedDataParallel(inner)  # nobody keeps it
    return inner


def _empty_first() -> nn.Module:
    model = nn.Sequential(nn.Linear(0, 0, bias=False), *smooth_model())
    model.forward = lambda x: nn.Sequential(*list(model)[1:])(x)
    return model


def _sharing_memory() -> nn.Module:
    """Two parameters that are views of one tensor, as in an LSTM on a GPU."""
    model, whole = smooth_model(), torch.randn(96 * 32 + 96, generator=torch.Generator().manual_seed(0)) / 8
    model[0].weight.data, model[0].bias.data = whole[: 96 * 32].view(96, 32), whole[96 * 32 :]
    return model


def works() -> dict[str, Any]:
    """Fingerprints after some steps."""
    hvd.init()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    models = {
        "empty first": _empty_first(),
        "shared memory": _sharing_memory(),
        "frozen integers": _with(torch.zeros(4)),
        "DDP gone": _after_data_parallel(),
        "all frozen": smooth_model().requires_grad_(False),
    }
    integers = models["frozen integers"]
    integers.extra = nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)
    found = {}
    for name, model in models.items():
        before = fingerprint(model)
        optimizer = _wrapped(model, momentum=0.9)
        if name == "all frozen":
            optimizer.step()
        else:
            train(model, optimizer, 3)
        found[name] = [fingerprint(model), fingerprint(model) == before]
    dist.destroy_process_group()

    model = smooth_model()
    optimizer = _wrapped(model)
    train(model, optimizer, 2)
    optimizer = _wrapped(model)  # the old one is alive meanwhile
    parts = [_wrapped(part) for part in (model[:2], model[2:])]  # each its own parameters
    x, y = next(iter(batches(1, hvd.rank())))
    nn.functional.mse_loss(model(x), y).backward()
    for part in parts:
        part.step()
    found["parts"] = [fingerprint(model), error_of(optimizer.step) == ""]

    model = smooth_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    plain.load_state_dict = partial(plain.load_state_dict)  # a script's, around methods of the optimizer from before
    plain.zero_grad = partial(plain.zero_grad)
    optimizer = _wrapped(model, lambda *_, **__: plain)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(state)
    train(model, optimizer, 2)
    found["own methods"] = [
        fingerprint(model),
        optimizer.param_groups[0]["lr"] != 0.5 or "zero_grad" in vars(optimizer),
    ]
    return found
