"""Python runs this at its start where this folder stands on PYTHONPATH: `dgcrun` puts it there.

In a rank of a job it arranges that Horovod, when a script imports it, gets its optimizers replaced, and that torch's
``init_process_group`` calls `begin_ddp` (both in `dgc_horovod.launch.activate`). It imports nothing but the standard
library, so that a Python that never imports them starts as fast as ever and cannot fail because of it. A sitecustomize
that this one hides is run as well.

For torch no PYTHONPATH is needed where the package is installed: `dgc_horovod_autoload` calls `follow_torch`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

_ENDS = os.path.join("dgc_horovod", "launch", "site")
FRAMEWORKS = ("horovod.torch", "horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras", "horovod.mxnet")
ADAPTERS = ("dgc_horovod.torch.adapter", "dgc_horovod.tensorflow", "dgc_horovod.tensorflow.keras")
_TORCH = "torch.distributed"
_RANK = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_OFF = ("0", "off", "false", "no")


class _Finder(importlib.abc.MetaPathFinder):
    """Calls `then` with each of some modules after it has run.

    Args:
        names: their names.
        then: function that takes the module.
    """

    def __init__(self, names: Collection[str], then: Callable[[ModuleType], None]) -> None:
        self._here = threading.local()
        self._names, self._then = names, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The spec that the other finders give, with our call after its module has run."""
        if name not in self._names or getattr(self._here, "looking", False):
            return None
        self._here.looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._here.looking = False
        if spec is not None and spec.loader is not None:
            stock = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                stock(module)
                self._then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class ImportHook(_Finder):
    """Calls ``dgc_horovod.launch.activate.imported(module)`` after a module of `FRAMEWORKS` or `ADAPTERS` has run."""

    is_dgc_hook = True

    def __init__(self) -> None:
        super().__init__((*FRAMEWORKS, *ADAPTERS), lambda module: _activate().imported(module))
        self.outcome: Any = None  # what `dgc_horovod.launch.activate` knows of this process


def _activate() -> Any:
    """The module ``dgc_horovod.launch.activate``, in a rank that needs it."""
    try:
        return importlib.import_module("dgc_horovod.launch.activate")
    except ImportError as error:
        raise ImportError(
            f"compression is on for this job, but {sys.executable} cannot import dgc_horovod ({error}): install it for "
            "this Python, or set DGC_ENABLED=0 to train without it"
        ) from error


def follow_torch() -> None:
    """Let torch's ``init_process_group`` call `begin_ddp` of ``launch.activate``, in this process, if it imports torch.

    Nothing happens where no variable of ours is set, or ``DGC_ENABLED`` is off.
    """
    if not (_is_on() and any(name.startswith("DGC_") for name in os.environ)):
        return
    if _TORCH in sys.modules:
        _replace_start(sys.modules[_TORCH])
    else:
        sys.meta_path.insert(0, _Finder((_TORCH,), _replace_start))


def _replace_start(distributed: ModuleType) -> None:
    """Replace ``init_process_group`` wherever torch has it; nothing in a torch that has none, nor a second time."""
    stock = getattr(distributed, "init_process_group", None)
    if stock is None or hasattr(stock, "dgc_job"):
        return

    @functools.wraps(stock)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        ours.dgc_job = _activate().begin_ddp(ours.dgc_job)
        return result

    ours: Any = init_process_group
    ours.dgc_job = None  # what `begin_ddp` knows of this process
    for name, module in list(sys.modules.items()):
        if name.startswith(_TORCH) and getattr(module, "init_process_group", None) is stock:
            module.init_process_group = ours  # type: ignore[attr-defined]
    if distributed.is_initialized():  # `activate` comes after it, in a worker of Ray Train
        ours.dgc_job = _activate().begin_ddp(None)


def _is_on() -> bool:
    return os.environ.get("DGC_ENABLED", "").lower() not in _OFF


def is_ours(entry: str) -> bool:
    """Whether an entry of a path is a folder of this kind, of whichever installation."""
    return entry.rstrip(os.sep).endswith(_ENDS)


def _run_hidden() -> None:
    """Run the sitecustomize that would have been found without this folder."""
    others = [entry for entry in sys.path if not is_ours(entry)]  # there may be several of us
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module  # what a program that asks for it expects
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    if _is_on() and any(name in os.environ for name in _RANK):  # a rank of a job
        sys.meta_path.insert(0, ImportHook())
    follow_torch()
    _run_hidden()
