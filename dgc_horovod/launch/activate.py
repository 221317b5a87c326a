"""Compression for scripts that nobody has edited: Horovod's names are replaced when Horovod is imported.

`site/sitecustomize.py` calls `imported` in every rank that `dgcrun` starts. Where PYTHONPATH cannot be set (Ray, Spark,
``horovod.run``), a function that runs on each worker calls `activate`, before or after it imports Horovod.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dgc_horovod import envvars
from dgc_horovod.compression import ConfiguredCompressor
from dgc_horovod.config import DGCConfig
from dgc_horovod.core.nodes import declare
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.launch import activation_check, summary
from dgc_horovod.launch.settings import Job, of_this_process
from dgc_horovod.launch.site.sitecustomize import FRAMEWORKS, ImportHook, follow_torch, is_ours


def activate() -> None:
    """From now on compress what Horovod, or DDP, exchanges in this process, as ``DGC_*`` says; once.

    Raises:
        ConfigError: the settings are wrong.
    """
    if our_hook() is None:
        sys.meta_path.insert(0, ImportHook())
    for name in FRAMEWORKS:
        module = sys.modules.get(name)
        if module is not None:
            imported(module)
    follow_torch()


def deactivate() -> None:
    """Put Horovod's own names back; optimizers that are wrapped already stay as they are."""
    hook = our_hook()
    if hook is not None:
        sys.meta_path.remove(hook)
        if hook.replacements is not None:
            hook.replacements.revert()


def replaces_horovod() -> bool:
    """Whether names of Horovod are replaced in this process."""
    hook = our_hook()
    return hook is not None and hook.replacements is not None and hook.replacements.job.active


def imported(module: ModuleType) -> None:
    """`module`, of Horovod or one of our adapters, has just run: replace what can be replaced now."""
    hook = our_hook()
    if hook is None:
        return
    if hook.replacements is None:
        hook.replacements = _from_environment()
    replacements: Replacements = hook.replacements
    if not replacements.job.active:
        return
    if module.__name__ == "horovod.mxnet":
        raise UnsupportedUse("dgc_horovod has no adapter for MXNet; set DGC_ENABLED=0 to train with stock Horovod")
    if module.__name__ in _ADAPTERS and not hasattr(module.DistributedOptimizer, "__wrapped__"):
        if module not in replacements.waiting:
            replacements.waiting.append(module)
    for each in list(replacements.waiting):
        adapter, names = _ADAPTERS[each.__name__]
        # a script may import the adapter itself, which imports Horovod: then the adapter has to be complete first
        if adapter not in sys.modules or hasattr(sys.modules[adapter], "DistributedOptimizer"):
            if each in replacements.waiting:  # imports of an adapter come here too
                replacements.waiting.remove(each)
                names(replacements, each)


def our_hook() -> Any:
    """Our hook among the finders of modules, which keeps what was replaced; None where nothing is activated."""
    return next((finder for finder in sys.meta_path if getattr(finder, "is_dgc_hook", False)), None)


def _from_environment() -> Replacements:
    """The settings of this job; from now on children of this process know nothing of it."""
    clean_path()
    replacements = Replacements(of_this_process())
    if replacements.job.active:
        replacements.outcome.watch_exit()
    return replacements


def clean_path() -> None:
    """Take our folder off PYTHONPATH and ``sys.path``: data loaders and compilers are no ranks."""
    entries = envvars.environment().get("PYTHONPATH", "").split(os.pathsep)
    kept = os.pathsep.join(entry for entry in entries if not is_ours(entry))
    envvars.put_into_environment({"PYTHONPATH": kept})
    sys.path[:] = [entry for entry in sys.path if not is_ours(entry)]


class Replacements:
    """Everything replaced in this process, and what has come of it.

    Args:
        job: resolved settings of the job.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.outcome = summary.Outcome(job)
        self.waiting: list[ModuleType] = []  # modules of Horovod whose adapter is not complete
        self._undo: list[Callable[[], None]] = []

    def replace(self, stock: Any, ours: Any) -> None:
        """Put `ours` wherever a module of Horovod has `stock`."""
        modules = [m for name, m in list(sys.modules.items()) if name.split(".")[0] == "horovod" and m is not None]
        for module in modules:
            for attribute in [key for key, value in vars(module).items() if value is stock]:
                setattr(module, attribute, ours)
                self.on_revert(functools.partial(setattr, module, attribute, stock))

    def replace_factories(self, horovod: ModuleType, ours: dict[str, Callable[..., Any]]) -> None:
        """Replace functions of a module of Horovod's that take a compression, by name, with `compressing`."""
        for name, factory in ours.items():
            if (stock := getattr(horovod, name, None)) is not None:  # horovod.tensorflow.keras has no partial one
                self.replace(stock, self.compressing(stock, factory, horovod.Compression))

    def on_revert(self, undo: Callable[[], None]) -> None:
        """Call `undo` when everything is put back."""
        self._undo.append(undo)

    def revert(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()
        self.outcome.dismiss()

    def compressing(self, stock: Callable[..., Any], ours: Callable[..., Any], compressions: Any) -> Any:
        """`ours` under the name and signature of `stock`, with the job's compression.

        Args:
            stock, ours: functions that take an argument ``compression``.
            compressions: Horovod's class ``Compression`` of the framework.
        """
        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def compressing(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            arguments["compression"] = self._choose(arguments.get("compression", compressions.none), compressions)
            made = ours(**arguments)
            self.outcome.has_wrapped(made)
            return made

        return compressing

    def _choose(self, asked: Any, compressions: Any) -> Any:
        """The job's compression in place of one of Horovod's; a choice among ours is the script's own, and stays."""
        if isinstance(asked, (ConfiguredCompressor, DGCConfig)):
            self.outcome.tell_once(f"the script chooses its compression itself, and it is kept: {asked}")
            return asked
        self.outcome.asked.add("fp16" if asked is compressions.fp16 else "none")
        if self.job.config is not None:
            return self.job.config
        return getattr(compressions, self.job.method)

    def initializing(self, horovod: ModuleType) -> Any:
        """``hvd.init``, followed by the activation check."""
        init: Callable[..., Any] = vars(horovod)["init"]

        @functools.wraps(init)
        def initializing(*args: Any, **kwargs: Any) -> Any:
            if horovod.is_initialized():
                return init(*args, **kwargs)
            activation_check.prepare()
            result = init(*args, **self._with_nodes(horovod, args, kwargs))
            # a newcomer of an elastic job comes when the others are under way; parts of a job do not know each other
            part = (args[0] if args else kwargs.get("comm")) not in (None, [])
            activation_check.hold(horovod.rank(), 1 if part or envvars.horovod_elastic() else horovod.size())
            self.outcome.begin(horovod.rank(), horovod.size())
            return result

        return initializing

    def _with_nodes(self, horovod: ModuleType, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments of ``hvd.init`` with the process sets of nodes, beside those of the script."""
        config, sets = self.job.config, kwargs.get("process_sets")
        if config is None or not config.may_use_nodes or args or isinstance(sets, str) or kwargs.get("comm"):
            return kwargs
        if envvars.horovod_elastic() or envvars.dynamic_process_sets():
            return kwargs
        theirs = list(sets or [])
        ours = declare(horovod.ProcessSet, config.node_size, theirs)
        return {**kwargs, "process_sets": [*theirs, *ours]} if ours else kwargs


def torch_names(replacements: Replacements, horovod: ModuleType) -> None:
    """Replace in ``horovod.torch``: DistributedOptimizer, init; and see the loss scale."""
    from dgc_horovod.torch import DistributedOptimizer
    from dgc_horovod.torch.gradients.scaling import SeenScaler, stop_watching, watch_scalers

    watch_scalers()
    replacements.on_revert(stop_watching)

    def ours(**arguments: Any) -> Any:
        if replacements.job.config is None:
            return DistributedOptimizer(**arguments)
        scaler: Any = SeenScaler()
        if not replacements.job.config.automatic:  # which leaves sparse gradients to stock Horovod
            # the script cannot be told to ask for it, and only a gradient that is sparse is treated otherwise
            arguments["sparse_as_dense"] = True
        made = DistributedOptimizer(**arguments, grad_scaler=scaler)
        scaler.belongs_to(made)
        return made

    replacements.replace_factories(horovod, {"DistributedOptimizer": ours})
    replacements.replace(horovod.init, replacements.initializing(horovod))


def tensorflow_names(replacements: Replacements, horovod: ModuleType) -> None:
    """Replace in ``horovod.tensorflow``: DistributedOptimizer, DistributedGradientTape, broadcast_variables, init."""
    from dgc_horovod import tensorflow as ours

    tape = ours.DistributedGradientTape
    given: dict[str, Callable[..., Any]] = {
        "DistributedOptimizer": ours.DistributedOptimizer,
        "DistributedGradientTape": tape,
        "PartialDistributedGradientTape": _partial(tape, "register_local_source"),
    }
    replacements.replace_factories(horovod, given)
    broadcast = functools.wraps(horovod.broadcast_variables)(ours.broadcast_variables)
    replacements.replace(horovod.broadcast_variables, broadcast)
    replacements.replace(horovod.init, replacements.initializing(horovod))


def keras_names(replacements: Replacements, horovod: ModuleType) -> None:
    """Replace in ``horovod.tensorflow.keras`` or ``horovod.keras``: optimizers, load_model, callbacks, KerasState."""
    from dgc_horovod.tensorflow import keras as ours

    given: dict[str, Callable[..., Any]] = {
        "DistributedOptimizer": ours.DistributedOptimizer,
        "PartialDistributedOptimizer": _partial(ours.DistributedOptimizer, "register_local_var"),
        "load_model": ours.load_model,
    }
    replacements.replace_factories(horovod, given)
    for name in ours.callbacks.__all__:
        replacements.replace(getattr(horovod.callbacks, name), getattr(ours.callbacks, name))
    for name in ("KerasState", "run"):
        replacements.replace(getattr(horovod.elastic, name), getattr(ours.elastic, name))


def _partial(ours: Callable[..., Any], register: str) -> Callable[..., Any]:
    """`ours`, with the weights of ``local_layers`` left to each rank by the method `register` of what it makes."""
    from dgc_horovod.tensorflow.variables import weights_of

    def partial(local_layers: Any = None, **arguments: Any) -> Any:
        variables = weights_of(local_layers)
        made = ours(**arguments)
        for variable in variables:
            getattr(made, register)(variable)
        return made

    return partial


_ADAPTERS = {
    "horovod.torch": ("dgc_horovod.torch.adapter", torch_names),
    "horovod.tensorflow": ("dgc_horovod.tensorflow", tensorflow_names),
    "horovod.tensorflow.keras": ("dgc_horovod.tensorflow.keras", keras_names),
    "horovod.keras": ("dgc_horovod.tensorflow.keras", keras_names),
}
