"""Call a function on every rank of a job; a test with the mark ``on_ranks`` is such a function."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.helpers.launchers import built_controllers, horovodrun, torchrun, torchrun_on_nodes
from tests.helpers.outcomes import Order, reason, same_on_ranks, settle
from tests.helpers.standing_ranks import StandingRanks

__all__ = ["KINDS", "kind_of", "on_ranks", "same_on_ranks"]
KINDS = ("torch", "keras", "ddp")


def kind_of(module: str) -> str:
    """The kind of ranks in the name of a module of tests; "torch" where none is."""
    return next((kind for kind in KINDS if f"_{kind}_" in f"{module}_"), KINDS[0])


def on_ranks(
    function: Callable[..., Any],
    workers: int = 2,
    kind: str | None = None,
    *,
    arguments: Mapping[str, Any] | None = None,
    controller: str = "gloo",
    nodes: int = 1,
    environment: Mapping[str, str] | None = None,
    fresh: bool = False,
    last: bool = False,
    timeout: float = 240,
    launcher_flags: tuple[str, ...] = (),
) -> list[Any]:
    """What `function` returns on each rank. The test fails if it raises on one.

    Over Gloo on one node, ranks that are up already call it: to start ranks takes longer than most tests do. Where that
    fails, ranks of their own decide.

    Args:
        function: of a module, which each rank imports.
        workers: number of ranks, all on this machine.
        kind: "torch" or "keras" (Horovod has been initialized), "ddp" (torch.distributed has, and there is no Horovod);
            None: what the name of the module says.
        arguments: of the function, by name; what pickle can copy.
        controller: "gloo" or "mpi"; skips, with the reason, if Horovod was built without it.
        nodes: number of nodes, 1 or 2, which are names of this machine; Horovod then has the process sets of nodes.
        environment: more environment variables while it runs.
        fresh: whether it needs processes of its own: it looks at memory, calls ``hvd.init`` itself, starts Horovod with
            variables that it reads once, or what it has begun ends with the process.
        last: whether these ranks end then. Where a rank was waited for in vain, or more operations were made on one
            rank than on another, tests whose operations have no names cannot follow: Horovod numbers them. Tests that
            say ``last=1``, or 2, come after the others on the same ranks.
        timeout: seconds, past which all ranks are killed.
        launcher_flags: more flags for horovodrun.
    """
    kind = kind or kind_of(function.__module__)
    if kind != "ddp" and controller not in built_controllers():
        pytest.skip(f"Horovod was built without {controller}: get a system MPI and run scripts/build_horovod --force")
    variables = dict(environment or {})
    what = f"{function.__module__}.{function.__qualname__}"
    starts = kind != "ddp" and not fresh
    order = Order(function.__module__, function.__qualname__, dict(arguments or {}), variables, starts, timeout)
    if controller == "gloo" and nodes == 1 and not (fresh or launcher_flags):
        ranks = StandingRanks.of(workers, kind, lambda place, kind: _command(place, kind, workers))
        outcomes = ranks.call(order)
        if all(each and not each.error for each in outcomes):
            ranks.end() if last else ranks.pause()
            return settle(outcomes, "", what)
        why = reason(outcomes, ranks.log(), what)
        warnings.warn(f"failed on ranks that were up, others start: {why}", stacklevel=2)
        ranks.end()
    if nodes > 1 and kind != "ddp":
        variables |= {"DGC_TEST_NODES": "1", "DGC_NODE_SIZE": str(workers // nodes)}
    own = StandingRanks(
        workers, kind, lambda place, kind: _command(place, kind, workers, controller, nodes, launcher_flags), variables
    )
    try:
        outcomes = own.call(order)
        code = own.leave() if all(outcomes) else None
        values = settle(outcomes, own.log(), what)
        assert kind != "ddp" or code == 0, f"{what}: its ranks ended with {code}; output:\n{own.log()[-6000:]}"
        return values
    finally:
        own.end()


def _command(
    place: str, kind: str, workers: int, controller: str = "gloo", nodes: int = 1, flags: tuple[str, ...] = ()
) -> list[str]:
    words = ["-m", "tests.helpers.rank_main", place, kind]
    if kind == "ddp":
        return [*torchrun(workers), *words] if nodes == 1 else torchrun_on_nodes(nodes, workers, words)
    if nodes > 1:
        flags = (*flags, "-H", f"localhost:{workers // 2},127.0.0.1:{workers // 2}")
    return [*horovodrun(workers, controller, *flags), *words]
