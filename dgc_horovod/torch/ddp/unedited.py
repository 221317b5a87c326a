"""DDP in unmodified scripts: each optimizer is registered between its first and its second step."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from dgc_horovod.errors import ConfigError, DGCError, RankMismatch, UnsupportedUse
from dgc_horovod.names import put_around
from dgc_horovod.stats import PROCESS
from dgc_horovod.torch.ddp.models import fall_back_to_ddp
from dgc_horovod.torch.ddp.optimizer import register
from dgc_horovod.torch.ddp.transport import ProcessGroupCollectives, new_group

ABSENT = (
    "{ranks} of {workers} did not answer within {seconds:g} s: DGC_COMPRESSION or DGC_CONFIG_FILE is not set there, "
    "DGC_ENABLED=0 is, or the Python there has no dgc_horovod installed"
)
_MOST_NAMED = 20


class Listener(Protocol):
    """Callbacks for the events of `Unedited`."""

    def found(self) -> None:
        """Called when the script has made a DistributedDataParallel."""

    def parting(self) -> None:
        """Called when the script is about to destroy the process group of all ranks."""

    def has_wrapped(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when the gradients of `optimizer` are compressed from now on."""

    def refuse(self, reason: str) -> None:
        """Called when an optimizer is not compressed, with the `reason`, the same on every rank."""


def place() -> tuple[int, int]:
    """Return the index of this rank, and the number of ranks."""
    return dist.get_rank(), dist.get_world_size()


def agree(problem: str, settings: Mapping[str, str], seconds: float) -> str:
    """Return why these ranks do not compress, the same text on each; "" if all are active, with the same settings.

    A rank that is not active does not call this; the other ranks then wait for `seconds`.

    Args:
        problem: why this rank cannot compress; "" if it can.
        settings: texts of its settings, by name.
        seconds: time to wait for all ranks, > 0.
    """
    rank, workers = place()
    if workers == 1:
        return problem
    number = PROCESS.next_number("agreement of unedited ranks")
    present = dist.PrefixStore(f"dgc/active/{number}", _get_default_store())
    present.set(str(rank), "")
    try:
        group = new_group(range(workers), seconds, connecting=seconds)
        own = json.dumps({"problem": problem, "settings": dict(settings)}).encode()
        told = ProcessGroupCollectives(group, "active", seconds).gather_bytes(own, "settings")
    except DGCError as error:
        absent = [f"rank {r}" for r in range(workers) if not present.check([str(r)])]
        if not absent:  # a restarted job may find the keys of dead ranks
            return str(error)
        more = " and more" * (len(absent) > _MOST_NAMED)
        return ABSENT.format(ranks=", ".join(absent[:_MOST_NAMED]) + more, workers=workers, seconds=seconds)
    return _difference([json.loads(text) for text in told])


def _difference(told: list[dict[str, Any]]) -> str:
    """Return why ranks with these problems and settings do not compress; "" if they do."""
    problems = [each["problem"] for each in told]
    if len(set(problems)) == 1:
        first = told[0]["settings"]
        for rank, each in enumerate(told):
            for name in (name for name, text in first.items() if each["settings"].get(name) != text):
                theirs = each["settings"].get(name)
                return f"the ranks' settings differ: {name} is {first[name]} on rank 0 and {theirs} on rank {rank}"
        return str(problems[0])
    return "; ".join(f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem)


class Unedited:
    """Observes the DDP models and optimizers that this process makes from now on, and registers the optimizers.

    An optimizer that trains parameters of a DDP model is registered with it after its first step, which is DDP's own.
    ``register`` compares the ranks, so that all change to compression between the same two steps, or none does.

    Args:
        compression: see `register`.
        listener: receiver of events.
    """

    def __init__(self, compression: Any, listener: Listener) -> None:
        self.active = True  # result of the last agreement of the ranks
        self._compression, self._listener = compression, listener
        self._models: weakref.WeakValueDictionary[int, DistributedDataParallel] = weakref.WeakValueDictionary()
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

        @put_around(DistributedDataParallel, "__init__")
        def noting(stock: Any, model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            stock(model, *args, **kwargs)
            self._models[id(model)] = model
            listener.found()

        @put_around(dist, "destroy_process_group")  # where scripts and a worker of Ray Train find it
        def parting(stock: Any, group: dist.ProcessGroup | None = None) -> None:
            if group in (None, dist.group.WORLD):
                listener.parting()
            stock(group)

        register_optimizer_step_post_hook(torch.compiler.disable(self._stepped))

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Register an optimizer after its first step; torch calls this at the end of every step of every optimizer."""
        if optimizer in self._seen or not self.active or _is_trial(optimizer):
            return
        self._seen.add(optimizer)
        if hasattr(optimizer, "_dgc"):  # the script has registered it itself
            return
        trained = {p for group in optimizer.param_groups for p in group["params"]}
        newest_first = reversed([*self._models.values()])  # a script may wrap a model again
        model = next((model for model in newest_first if not trained.isdisjoint(model.parameters())), None)
        held = vars(optimizer).values()  # Lookahead holds an optimizer, which may be registered itself
        inside = [x for x in held if isinstance(x, torch.optim.Optimizer) and hasattr(x, "_dgc")]
        if model is not None and not inside:
            self._register(model, optimizer)

    def _register(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        try:
            register(model, optimizer, self._compression)
        except (ConfigError, UnsupportedUse, RankMismatch) as error:  # on every rank; DDP's own exchange goes on
            self._listener.refuse(f"{type(optimizer).__name__} cannot be compressed: {error}")
            return
        fall_back_to_ddp(model)
        self._listener.has_wrapped(optimizer)


def _is_trial(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the step only filled the state, on this rank only; see `wrapping.steps.is_trial`."""
    groups = optimizer.param_groups
    grads = (p.grad for group in groups for p in group["params"] if p.grad is not None)
    return not any(group.get("lr", 1) for group in groups) and not any(bool(grad.any()) for grad in grads)
