"""Python runs this at its start where this folder stands on PYTHONPATH: `dgcrun` puts it there.

In a rank of a job it arranges that Horovod, when a script imports it, gets its optimizers replaced
(`dgc_horovod.launch.activate`). It imports nothing but the standard library, so that a Python that never imports
Horovod starts as fast as ever and cannot fail because of it. A sitecustomize that this one hides is run as well.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
from types import ModuleType
from typing import Any

_ENDS = os.path.join("dgc_horovod", "launch", "site")
FRAMEWORKS = ("horovod.torch", "horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras", "horovod.mxnet")
ADAPTERS = ("dgc_horovod.torch.adapter", "dgc_horovod.tensorflow", "dgc_horovod.tensorflow.keras")
_RANK = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_OFF = ("0", "off", "false", "no")


class ImportHook(importlib.abc.MetaPathFinder):
    """Calls ``dgc_horovod.launch.activate.imported(module)`` after a module of `FRAMEWORKS` or `ADAPTERS` has run."""

    is_dgc_hook = True

    def __init__(self) -> None:
        self._here = threading.local()
        self.replacements: Any = None  # what `dgc_horovod.launch.activate` has put in place of Horovod's names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The spec that the other finders give, with our call after its module has run."""
        if name not in (*FRAMEWORKS, *ADAPTERS) or getattr(self._here, "looking", False):
            return None
        self._here.looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._here.looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Followed(spec.loader)
        return spec


class _Followed(importlib.abc.Loader):
    """A loader whose modules are handed over after they have run."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _activation().imported(module)


def _activation() -> Any:
    try:
        from dgc_horovod.launch import activate
    except ImportError as error:
        raise ImportError(
            f"compression is on for this job, but {sys.executable} cannot import dgc_horovod ({error}): install it for "
            "this Python, or set DGC_ENABLED=0 to train with stock Horovod"
        ) from error
    return activate


def is_wanted() -> bool:
    """Whether this process is a rank of a job, and nobody has switched compression off."""
    on = os.environ.get("DGC_ENABLED", "").lower() not in _OFF
    return on and any(name in os.environ for name in _RANK)


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
    if is_wanted():
        sys.meta_path.insert(0, ImportHook())
    _run_hidden()
