"""Over torch.distributed: parameters of TensorDicts are plain ones; where a rank holds parts, that is refused."""

from __future__ import annotations

from typing import Any

import pytest
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
from tests.helpers.ddp_training import made, sgd
from tests.helpers.errors import error_of
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.regression import INPUTS, UNROUNDED, batches, distance, fingerprint, smooth_model, weights

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]


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
    from tensordict import TensorDict

    for x, y in batches(steps, dist.get_rank()):
        optimizer.zero_grad()
        found = model(TensorDict({"x": x}, [len(x)]) if hasattr(model.module, "in_keys") else x)
        F.mse_loss(found if isinstance(found, torch.Tensor) else found["y"], y).backward()
        optimizer.step()


@pytest.mark.parametrize("make", [_tensordict_parameters, _tensordict_module, _ensemble])
def test_parameters_of_tensordicts(make, tmp_path):
    """As with stock DDP at density 1; at density 0.02 a checkpoint is resumed bit for bit."""
    pytest.importorskip("tensordict", reason="tensordict is not installed")
    exact = Compression.dgc(1.0, factor_masking=False, min_numel=1, **UNROUNDED)
    few = Compression.dgc(0.02, min_numel=64)
    (stock, _), (whole, _), (model, optimizer) = all_made = [made(given, inner=make()) for given in (None, exact, few)]
    for each in all_made:
        _steps(*each)
    assert distance(weights(stock), weights(whole)) <= 1e-5 < 1e-3 < distance(weights(stock), weights(make()))
    save_checkpoint(tmp_path, model, optimizer)
    again, other = made(few, inner=make())
    load_checkpoint(tmp_path, again, other)
    _steps(model, optimizer, 2)
    _steps(again, other, 2)
    assert fingerprint(again) == fingerprint(model)
    same_on_ranks(fingerprint(model))


def _fsdp(model: nn.Module, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def _fsdp_within() -> nn.Module:
    model = smooth_model()
    model[0] = _fsdp(model[0])
    return DistributedDataParallel(model)


def _dtensor(mesh: Any) -> nn.Module:
    model = smooth_model()
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)]))
    return DistributedDataParallel(model, init_sync=False)


def _tensor_parallel(mesh: Any) -> nn.Module:
    model = parallelize_module(smooth_model(), mesh["parts"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return DistributedDataParallel(model, device_mesh=mesh["replicas"])


@pytest.mark.slow
@pytest.mark.on_ranks(2, fresh=True)
def test_models_of_which_a_rank_holds_parts():
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicas", "parts"))
    whole, part = "the model is sharded (FSDP)", "is sharded over the ranks (FSDP, DTensor, tensor parallel)"
    original = _fsdp(smooth_model(), use_orig_params=True)
    for model, said in (
        (_fsdp(smooth_model()), whole),
        (original, whole),
        (fully_shard(smooth_model(), mesh=mesh["replicas"]), whole),
        (_fsdp_within(), f"'0._fsdp_wrapped_module._flat_param' {part}"),
        (_dtensor(mesh["replicas"]), f"'0.weight' {part}"),
        (_tensor_parallel(mesh), f"'0.weight' {part}"),
    ):
        error = error_of(lambda model=model: register(model, sgd(model), Compression.dgc(0.1)))
        assert f"UnsupportedUse: {said}" in error
    error = error_of(lambda: DistributedOptimizer(sgd(original), original.named_parameters()))
    assert f"UnsupportedUse: '_fsdp_wrapped_module.0.weight' {part}" in error
