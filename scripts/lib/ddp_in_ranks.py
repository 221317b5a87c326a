"""What is different in every process of `pytorch_hook_tests`: no GPU is needed, and gradients go through our hook.

PyTorch's tests know nothing of it. Importing this module makes the changes; each rank imports it before the tests.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

from dgc_horovod.torch.ddp import Compression, carrier, register
from dgc_horovod.torch.ddp.models import exchange_hook

MODE, MARK = "DDP_TESTS_MODE", "DDP_TESTS_MARK"  # environment variables, which reach the ranks
STOCK, HOOKS, ALL = "stock", "hooks", "all"  # ours: nowhere, in the place of the hooks of a test, in every DDP
GPUS = 8  # that the tests see; each is the CPU

_optimizers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # model -> its optimizer
_make, _hook = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook
_end = carrier.end_backward


def on_cpu(device: Any) -> Any:
    """`device`, or the CPU in the place of a GPU."""
    if isinstance(device, int) and not isinstance(device, bool):
        return torch.device("cpu")
    if isinstance(device, str) and device.startswith("cuda"):
        return torch.device("cpu")
    return torch.device("cpu") if isinstance(device, torch.device) and device.type == "cuda" else device


class OnCPU(TorchFunctionMode):
    """What is made on a GPU, or moved to one, is on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], on_cpu(args[1]), *args[2:])
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return func(*args, **kwargs)


def need_no_gpu() -> None:
    """Let the tests that want GPUs run, and give them the CPU."""
    move = torch.nn.Module.to

    def to(self: Any, *arguments: Any, **named: Any) -> Any:
        if "device" in named:
            named["device"] = on_cpu(named["device"])
        return move(self, *[on_cpu(a) for a in arguments[:1]], *arguments[1:], **named)

    def nothing(*arguments: Any, **named: Any) -> None: ...

    def as_it_is(*arguments: Any, **named: Any) -> Callable[[Any], Any]:
        return lambda function: function

    torch.nn.Module.to, torch.nn.Module.cuda = to, lambda self, device=None: self  # type: ignore[method-assign]
    torch.cuda.device_count = torch.accelerator.device_count = lambda: GPUS
    torch.cuda.set_device = torch.cuda.synchronize = torch.accelerator.set_device_index = nothing
    torch.cuda.current_device = lambda: int(os.environ.get("RANK", "0"))
    torch.cuda.device = lambda device: contextlib.nullcontext()
    common_distributed.skip_if_lt_x_gpu = common_distributed.requires_accelerator_dist_backend = as_it_is
    common_distributed.nccl_skip_if_lt_x_gpu = as_it_is
    common_distributed.skip_if_no_gpu = lambda function: function
    OnCPU().__enter__()


def register_ours(model: DistributedDataParallel) -> None:
    """Our hook at density 1, for an optimizer that moves nothing: what it leaves in ``p.grad`` is the average."""
    named = model.module.named_parameters()
    trained = [p for name, p in named if p.requires_grad and name not in model.parameters_to_ignore]
    compression = Compression.dgc(1.0, factor_masking=False, min_numel=1, values="fp32", dense_values="fp32")
    _optimizers[model] = register(model, torch.optim.SGD(trained, lr=0.0), compression)


def put_our_hook() -> None:
    """Change what `DistributedDataParallel` makes and registers, as `MODE` says."""

    def make(self: Any, module: Any, *arguments: Any, **named: Any) -> None:
        if all(p.device.type == "cpu" for p in module.parameters()):
            named.update(device_ids=None, output_device=None)
            arguments = ()
        _make(self, module, *arguments, **named)
        if os.environ[MODE] == ALL:
            register_ours(self)

    def register_hook(self: Any, state: Any, hook: Any) -> None:
        if hook is exchange_hook or os.environ[MODE] == STOCK:
            _hook(self, state, hook)
            return
        self._check_comm_hook(hook)
        register_ours(self)

    def register_builtin(self: Any, kind: Any) -> None:
        register_ours(self)

    def end_backward(session: Any) -> None:
        _end(session)
        session.optimizer.step()  # the tests know nothing of our optimizer; it moves nothing
        with Path(os.environ[MARK]).open("a") as file:
            file.write("exchanged\n")

    DistributedDataParallel.__init__ = make  # type: ignore[method-assign]
    DistributedDataParallel.register_comm_hook = register_hook  # type: ignore[method-assign]
    if os.environ[MODE] != STOCK:
        DistributedDataParallel._register_builtin_comm_hook = register_builtin  # type: ignore[method-assign]
    carrier.end_backward = end_backward


torch.set_num_threads(1)
os.environ.setdefault(MODE, STOCK)
need_no_gpu()
put_our_hook()
