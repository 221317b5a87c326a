"""Compression for scripts that nobody has edited: Horovod's names are replaced when it is imported, DDP is followed.

`site/sitecustomize.py` calls `imported` in every rank that `dgcrun` starts. Where PYTHONPATH cannot be set (Ray, Spark,
``horovod.run``), a function that runs on each worker calls `activate`, before or after it imports Horovod.

After torch's ``init_process_group`` it calls `begin_ddp`: before that there is no rank, and no DDP. What DDP exchanges
is compressed from the second step of each optimizer on.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dgc_horovod import __version__, envvars
from dgc_horovod.compression import ConfiguredCompressor
from dgc_horovod.config import DGCConfig
from dgc_horovod.core.nodes import declare
from dgc_horovod.errors import ConfigError, UnsupportedUse
from dgc_horovod.launch import reports, summary
from dgc_horovod.launch.settings import Job, of_this_process, resolve
from dgc_horovod.launch.site.sitecustomize import FRAMEWORKS, ImportHook, follow_torch, is_ours
from dgc_horovod.names import replace_everywhere

if TYPE_CHECKING:
    from dgc_horovod.torch.ddp.unedited import Unedited

_log = logging.getLogger("dgc_horovod")
_replace = functools.partial(replace_everywhere, package="horovod")


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


def imported(module: ModuleType) -> None:
    """`module`, of Horovod or one of our adapters, has just run: replace what can be replaced now."""
    hook = our_hook()
    if hook.outcome is None:
        _clean_path()  # from now on children of this process know nothing of the job
        hook.outcome = HorovodJob(of_this_process())
    here: HorovodJob = hook.outcome
    if not here.job.active:
        return
    if module.__name__ == "horovod.mxnet":
        raise UnsupportedUse("dgc_horovod has no adapter for MXNet; set DGC_ENABLED=0 to train with stock Horovod")
    if module.__name__ in _ADAPTERS and not hasattr(module.DistributedOptimizer, "__wrapped__"):
        if module not in here.waiting:
            here.waiting.append(module)
    for each in list(here.waiting):
        adapter, names = _ADAPTERS[each.__name__]
        # a script may import the adapter itself, which imports Horovod: then the adapter has to be complete first
        if adapter not in sys.modules or hasattr(sys.modules[adapter], "DistributedOptimizer"):
            if each in here.waiting:  # imports of an adapter come here too
                here.waiting.remove(each)
                names(here, each)


def our_hook() -> Any:
    """Our hook among the finders of modules; None where nothing is activated."""
    return next((finder for finder in sys.meta_path if getattr(finder, "is_dgc_hook", False)), None)


def _clean_path() -> None:
    """Take our folder off PYTHONPATH and ``sys.path``: data loaders and compilers are no ranks."""
    entries = envvars.environment().get("PYTHONPATH", "").split(os.pathsep)
    kept = os.pathsep.join(entry for entry in entries if not is_ours(entry))
    envvars.put_into_environment({"PYTHONPATH": kept})
    sys.path[:] = [entry for entry in sys.path if not is_ours(entry)]


class HorovodJob(summary.Outcome):
    """One process of a job of Horovod, in which names are replaced, if it is `active`.

    Args:
        job: resolved settings of the job.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.waiting: list[ModuleType] = []  # modules of Horovod whose adapter is not complete
        if job.active:
            self.watch_exit()

    def replace_factories(self, horovod: ModuleType, **ours: Callable[..., Any]) -> None:
        """Replace functions of a module of Horovod's that take an argument ``compression``.

        Args:
            horovod: the module.
            ours: what takes their place, by name; it gets the job's compression.
        """
        for name, factory in ours.items():
            if (stock := getattr(horovod, name, None)) is not None:  # horovod.tensorflow.keras has no partial one
                _replace(stock, self._compressing(stock, factory, horovod.Compression))

    def _compressing(self, stock: Callable[..., Any], ours: Callable[..., Any], compressions: Any) -> Any:
        """`ours` under the name and signature of `stock`."""
        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def compressing(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            asked = arguments.get("compression", compressions.none)
            if isinstance(asked, (ConfiguredCompressor, DGCConfig)):
                self.tell_once(f"the script chooses its compression itself, and it is kept: {asked}")
            else:
                self.wants_fp16 |= asked is compressions.fp16
                arguments["compression"] = self.job.config or getattr(compressions, self.job.method)
            made = ours(**arguments)
            self.has_wrapped(made)
            return made

        return compressing

    def initializing(self, horovod: ModuleType) -> Any:
        """``hvd.init``, followed by the activation check."""
        init: Callable[..., Any] = vars(horovod)["init"]

        @functools.wraps(init)
        def initializing(*args: Any, **kwargs: Any) -> Any:
            if horovod.is_initialized():
                return init(*args, **kwargs)
            reports.prepare()
            result = init(*args, **self._with_nodes(horovod, args, kwargs))
            # a newcomer of an elastic job comes when the others are under way; parts of a job do not know each other
            part = (args[0] if args else kwargs.get("comm")) not in (None, [])
            reports.hold(horovod.rank(), 1 if part or envvars.horovod_elastic() else horovod.size())
            self.begin(horovod.rank(), horovod.size())
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


def torch_names(here: HorovodJob, horovod: ModuleType) -> None:
    """Replace in ``horovod.torch``: DistributedOptimizer, init; and see the loss scale."""
    from dgc_horovod.torch import DistributedOptimizer
    from dgc_horovod.torch.gradients.scaling import SeenScaler, watch_scalers

    watch_scalers()

    def ours(**arguments: Any) -> Any:
        if here.job.config is None:
            return DistributedOptimizer(**arguments)
        if not here.job.config.automatic:  # which leaves sparse gradients to stock Horovod
            # the script cannot be told to ask for it, and only a gradient that is sparse is treated otherwise
            arguments["sparse_as_dense"] = True
        arguments["grad_scaler"] = SeenScaler()
        return DistributedOptimizer(**arguments)

    here.replace_factories(horovod, DistributedOptimizer=ours)
    _replace(horovod.init, here.initializing(horovod))


def tensorflow_names(here: HorovodJob, horovod: ModuleType) -> None:
    """Replace in ``horovod.tensorflow``: DistributedOptimizer, DistributedGradientTape, broadcast_variables, init."""
    from dgc_horovod import tensorflow as ours

    here.replace_factories(
        horovod,
        DistributedOptimizer=ours.DistributedOptimizer,
        DistributedGradientTape=ours.DistributedGradientTape,
        PartialDistributedGradientTape=_partial(ours.DistributedGradientTape, "register_local_source"),
    )
    broadcast = functools.wraps(horovod.broadcast_variables)(ours.broadcast_variables)
    _replace(horovod.broadcast_variables, broadcast)
    _replace(horovod.init, here.initializing(horovod))


def keras_names(here: HorovodJob, horovod: ModuleType) -> None:
    """Replace in ``horovod.tensorflow.keras`` or ``horovod.keras``: optimizers, load_model, callbacks, KerasState."""
    from dgc_horovod.tensorflow import keras as ours

    here.replace_factories(
        horovod,
        DistributedOptimizer=ours.DistributedOptimizer,
        PartialDistributedOptimizer=_partial(ours.DistributedOptimizer, "register_local_var"),
        load_model=ours.load_model,
    )
    for name in ours.callbacks.__all__:
        _replace(getattr(horovod.callbacks, name), getattr(ours.callbacks, name))
    for name in ("KerasState", "run"):
        _replace(getattr(horovod.elastic, name), getattr(ours.elastic, name))


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


def begin_ddp(before: DDPJob | None) -> DDPJob | None:
    """A process group has been made: compress what DDP exchanges in this process, as ``DGC_*`` says.

    Args:
        before: what an earlier call in this process has returned.

    Returns:
        The job; None if none asks for compression, or it is one of Horovod's.
    """
    if before is None:
        hook = our_hook()
        if hook is not None and hook.outcome is not None and hook.outcome.job.active:
            return None
        _clean_path()
        problem = ""
        try:
            job = of_this_process()
        except ConfigError as error:
            method = envvars.from_environment().get(envvars.COMPRESSION.name, "dgc")
            job, problem = replace(resolve({}, {}), method=method), str(error)
        if not job.active:
            return None
        before = DDPJob(job, problem)
    before.meet()
    return before


class DDPJob(summary.Outcome):
    """One process of a job of DDP; a `unedited.Listener`.

    Args:
        job: resolved settings of the job.
        problem: what is wrong with them; "" for nothing.
    """

    not_wrapped = (
        "the script has made no DistributedDataParallel; what is sharded (FSDP), or exchanged by the script itself, "
        "cannot be compressed"
    )
    not_exchanged = "no optimizer has made a step with the parameters of its DistributedDataParallel"
    no_step = "its optimizer has made one step only, and the first one is DDP's own"

    def __init__(self, job: Job, problem: str) -> None:
        super().__init__(job)
        self._problem = problem
        self._unedited: Unedited | None = None
        self.watch_exit()

    def meet(self) -> None:
        """All ranks are here: let them agree whether to compress. It is the same answer on each."""
        from dgc_horovod.torch.ddp import Compression, unedited

        problem = self._problem
        try:
            self.begin(*unedited.place())
        except ConfigError as error:
            problem = problem or str(error)
        compared = {"dgc_horovod": __version__, envvars.COMPRESSION.name: self.job.method}
        compared |= {row.name: each.text for row, each in self.job.settings.items() if row.field}
        seconds = min(reports.CHECK_SECONDS, self.job.get(envvars.TIMEOUT))
        reason = unedited.agree(problem, compared, seconds)
        if reason:
            self.refuse(reason)
            self._report(summary.END, {"inactive": reason}, by=self.rank)  # rank 0 may be the one that is not active
        elif self._unedited is None and self.job.method != "none":
            self._unedited = unedited.Unedited(self.job.config or getattr(Compression, self.job.method), self)
        if self._unedited is not None:
            self._unedited.active = not reason

    def found(self) -> None:
        """See `unedited.Listener`."""
        self.is_there = True

    def has_wrapped(self, optimizer: Any) -> None:
        """See `unedited.Listener`."""
        self.is_there = False  # what is wrapped exchanges, unless `auto` leaves it to DDP
        super().has_wrapped(optimizer)

    def refuse(self, reason: str) -> None:
        """See `unedited.Listener`; told on every rank, once."""
        if reason not in self.refused:
            self.refused.append(reason)
            _log.warning("dgc_horovod: %s", summary.not_active(self.job, reason, self.may_fail))
