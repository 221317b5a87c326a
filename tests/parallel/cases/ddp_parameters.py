"""Parameters of other libraries and of other ways to train: some arrive as plain ones, some are refused."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.torch.ddp import Compression, DistributedOptimizer, load_checkpoint, register, save_checkpoint
from tests.helpers.errors import error_of
from tests.helpers.regression import INPUTS, UNROUNDED, batches, distance, fingerprint, smooth_model, weights


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _registered(model: nn.Module) -> Any:
    return register(model, _sgd(model), Compression.dgc(0.1))


def _ensemble() -> nn.Module:
    """Three networks whose weights are stacked, and called by vmap: a module of TensorDictParams."""
    from tensordict import from_modules

    stacked = from_modules(*[smooth_model(seed) for seed in range(3)], as_module=True)
    mold = [smooth_model()]  # in a list: its parameters are none of the ensemble's

    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stacked = stacked

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def of_one(parameters: Any) -> torch.Tensor:
                with parameters.to_module(mold[0]):
                    return mold[0](x)

            return torch.vmap(of_one)(self.stacked).mean(0)

    return Ensemble()


def _tensordict_parameters() -> nn.Module:
    """Its parameters lie in a TensorDict, one of them in a TensorDict within."""
    from tensordict import TensorDict, TensorDictParams

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            inner = TensorDict({"weight": torch.randn(INPUTS, 48) / 6, "bias": torch.zeros(48)})
            self.all = TensorDictParams(TensorDict({"first": inner, "last": torch.randn(48, 1) / 7}))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ self.all["first", "weight"] + self.all["first", "bias"]) @ self.all["last"]

    return Layers()


def _tensordict_module() -> nn.Module:
    """A network that reads from a TensorDict and writes into it."""
    from tensordict.nn import TensorDictModule, TensorDictSequential

    model = smooth_model()
    first = TensorDictModule(model[:4], in_keys=["x"], out_keys=["hidden"])
    return TensorDictSequential(first, TensorDictModule(model[4:], in_keys=["hidden"], out_keys=["y"]))


def _steps(model: Any, optimizer: Any, steps: int = 8) -> None:
    for x, y in batches(steps, dist.get_rank()):
        optimizer.zero_grad()
        given = x
        if hasattr(model.module, "in_keys"):
            from tensordict import TensorDict

            given = TensorDict({"x": x}, [len(x)])
        found = model(given)
        F.mse_loss(found if isinstance(found, torch.Tensor) else found["y"], y).backward()
        optimizer.step()


def _trained(make: Callable[[], nn.Module], compression: Any) -> tuple[DistributedDataParallel, Any]:
    model = DistributedDataParallel(make())
    optimizer = _sgd(model)
    if compression is not None:
        register(model, optimizer, compression)
    _steps(model, optimizer)
    return model, optimizer


def tensordict() -> dict[str, Any]:
    """For each model: distance from stock DDP at density 1; weights at density 0.02, and from a checkpoint of that."""
    found = {}
    exact = Compression.dgc(1.0, factor_masking=False, min_numel=1, **UNROUNDED)
    models = {"parameters": _tensordict_parameters, "modules": _tensordict_module, "ensemble": _ensemble}
    for name, make in models.items():
        stock = weights(_trained(make, None)[0])
        with tempfile.TemporaryDirectory() as folder:
            paths: list[Any] = [folder]
            dist.broadcast_object_list(paths)
            few = Compression.dgc(0.02, min_numel=64)
            model, optimizer = _trained(make, few)
            save_checkpoint(paths[0], model, optimizer)
            again = DistributedDataParallel(make())
            other = register(again, _sgd(again), few)
            load_checkpoint(paths[0], again, other)
            _steps(model, optimizer, 2)
            _steps(again, other, 2)
            dist.barrier()
        found[name] = {
            "distance": distance(stock, weights(_trained(make, exact)[0])),
            "moved": distance(stock, weights(make())),
            "weights": fingerprint(model),
            "resumed": fingerprint(again),
        }
    return found


def parts() -> dict[str, str]:
    """Errors for models of which a rank holds parts."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicas", "parts"))
    cpu = torch.device("cpu")

    def fsdp(**options: Any) -> nn.Module:
        return FullyShardedDataParallel(smooth_model(), device_id=cpu, **options)

    def fsdp_within() -> nn.Module:
        model = smooth_model()
        model[0] = FullyShardedDataParallel(model[0], device_id=cpu)
        return DistributedDataParallel(model)

    def dtensor() -> nn.Module:
        model = smooth_model()
        shard = distribute_tensor(model[0].weight.detach(), mesh["replicas"], [Shard(0)])
        model[0].weight = nn.Parameter(shard)
        return DistributedDataParallel(model, init_sync=False)

    def tensor_parallel() -> nn.Module:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = parallelize_module(smooth_model(), mesh["parts"], plan)
        return DistributedDataParallel(model, device_mesh=mesh["replicas"])

    original = fsdp(use_orig_params=True)
    models = {
        "FSDP": fsdp(),
        "FSDP, original parameters": original,
        "FSDP within DDP": fsdp_within(),
        "FSDP2": fully_shard(smooth_model(), mesh=mesh["replicas"]),
        "DTensor within DDP": dtensor(),
        "tensor parallel within DDP": tensor_parallel(),
    }
    found = {name: error_of(lambda model=model: _registered(model)) for name, model in models.items()}
    without = error_of(lambda: DistributedOptimizer(_sgd(original), original.named_parameters()))
    return {**found, "FSDP without register": without}
