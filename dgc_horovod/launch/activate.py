"""Compression for scripts that nobody has edited: Horovod's names are replaced when Horovod is imported.

`site/sitecustomize.py` calls `imported` in every rank that `dgcrun` starts. Where PYTHONPATH cannot be set (Ray, Spark,
``horovod.run``), a function that runs on each worker calls `activate`, before or after it imports Horovod.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

from dgc_horovod import envvars
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.launch import config_file
from dgc_horovod.launch.rank.patches import Replacements, keras_names, tensorflow_names, torch_names
from dgc_horovod.launch.settings import resolve
from dgc_horovod.launch.site.sitecustomize import FRAMEWORKS, ImportHook, is_ours

_ADAPTERS = {
    "horovod.torch": ("dgc_horovod.torch.adapter", torch_names),
    "horovod.tensorflow": ("dgc_horovod.tensorflow", tensorflow_names),
    "horovod.tensorflow.keras": ("dgc_horovod.tensorflow.keras", keras_names),
    "horovod.keras": ("dgc_horovod.tensorflow.keras", keras_names),
}
_replacements: Replacements | None = None
_waiting: list[ModuleType] = []


def activate() -> None:
    """Compress what Horovod exchanges in this process from now on, as ``DGC_*`` says. A second call does nothing.

    Raises:
        ConfigError: the settings are wrong.
    """
    if not any(getattr(finder, "is_dgc_hook", False) for finder in sys.meta_path):
        sys.meta_path.insert(0, ImportHook())
    for name in FRAMEWORKS:
        module = sys.modules.get(name)
        if module is not None:
            imported(module)


def deactivate() -> None:
    """Put Horovod's own names back; optimizers that are wrapped already stay as they are."""
    global _replacements
    sys.meta_path[:] = [finder for finder in sys.meta_path if not getattr(finder, "is_dgc_hook", False)]
    if _replacements is not None:
        _replacements.revert()
        _replacements = None


def imported(module: ModuleType) -> None:
    """`module`, of Horovod or one of our adapters, has just run: replace what can be replaced now."""
    global _replacements
    if _replacements is None:
        _replacements = _from_environment()
    if not _replacements.job.active:
        return
    if module.__name__ == "horovod.mxnet":
        raise UnsupportedUse("dgc_horovod has no adapter for MXNet; set DGC_ENABLED=0 to train with stock Horovod")
    if module.__name__ in _ADAPTERS and not hasattr(module.DistributedOptimizer, "__wrapped__"):
        if module not in _waiting:
            _waiting.append(module)
    for each in list(_waiting):
        adapter, names = _ADAPTERS[each.__name__]
        # a script may import the adapter itself, which imports Horovod: then the adapter has to be complete first
        if each in _waiting and (adapter not in sys.modules or hasattr(sys.modules[adapter], "DistributedOptimizer")):
            _waiting.remove(each)
            names(_replacements, each)


def _from_environment() -> Replacements:
    """The settings of this job; from now on children of this process know nothing of it."""
    _clean_path()
    given = envvars.from_environment()
    job = resolve({}, given, config_file.for_everyone(given))
    if job.active:
        envvars.put_into_environment(job.variables())  # what stands in a file is read from the environment elsewhere
    replacements = Replacements(job)
    if job.active:
        replacements.outcome.watch_exit()
    return replacements


def _clean_path() -> None:
    """Take our folder off PYTHONPATH and ``sys.path``: data loaders and compilers are no ranks."""
    entries = envvars.environment().get("PYTHONPATH", "").split(os.pathsep)
    kept = os.pathsep.join(entry for entry in entries if not is_ours(entry))
    envvars.put_into_environment({"PYTHONPATH": kept})
    sys.path[:] = [entry for entry in sys.path if not is_ours(entry)]
