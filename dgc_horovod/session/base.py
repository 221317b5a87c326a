"""The owner of one optimizer's steps, and when it exchanges: what is the same in every framework."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from dgc_horovod.config_check import Gatherer
from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.notices import MID_ROUND
from dgc_horovod.state.parts import StatePart

_log = logging.getLogger("dgc_horovod")
_made: list[weakref.ref[Session[Any]]] = []  # in the order of wrapping, which is the same on every rank
Wrapped = TypeVar("Wrapped")  # an optimizer of a framework
Owner = TypeVar("Owner", bound="Session[Any]")
Tensor = TypeVar("Tensor")


class Session(Generic[Wrapped]):
    """Everything of ours about one optimizer, which has it as its one attribute.

    Args:
        optimizer: wrapped optimizer; it owns the session.

    Attributes:
        strategy: when it exchanges, and what.
        told: keys of what the user has been told once.
    """

    strategy: Strategy[Any, Any]

    def __init__(self, optimizer: Wrapped) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.told: set[str] = set()

    @property
    def optimizer(self) -> Wrapped:
        """The optimizer that has this session."""
        found = self._optimizer()
        assert found is not None
        return found

    @property
    def alive(self) -> bool:
        """Whether the optimizer is still there."""
        return self._optimizer() is not None

    @property
    def speaks(self) -> bool:
        """Whether this rank tells the user what concerns all."""
        raise NotImplementedError

    def tell_once(self, key: str, text: str) -> None:
        """Log `text` on the first rank, the first time that it is told under this key."""
        if key not in self.told and self.speaks:
            self.told.add(key)
            _log.warning("dgc_horovod: %s", text)

    def enter(self) -> None:
        """The session has begun: from now on it is among `sessions`."""
        _made[:] = [ref for ref in _made if ref() is not None]
        _made.append(weakref.ref(self))


def sessions() -> list[Session[Any]]:
    """Those of this process that are alive, in the order of wrapping."""
    found = [ref() for ref in _made]
    return [session for session in found if session is not None and session.alive]


def weights_set(sent: Iterable[Any]) -> None:
    """All ranks have the same values in `sent` now, of which some may be weights that an optimizer here trains."""
    values = list(sent)
    for session in sessions():
        session.strategy.weights_set(values)


class Strategy(StatePart, Generic[Owner, Tensor]):
    """What a step of one session is, and what spans several steps: by default nothing does.

    Args:
        session: session that has it.
    """

    def __init__(self, session: Owner) -> None:
        self._session = weakref.ref(session)  # which owns this: what is dropped is to go at once

    @property
    def session(self) -> Owner:
        """The session that has this strategy."""
        found = self._session()
        assert found is not None
        return found

    @property
    def apart(self) -> bool:
        """Whether the ranks' weights may differ, as something that spans several steps is under way."""
        return False

    def check_between_steps(self) -> None:
        """Raise UnsupportedUse while something is under way of which a record of this rank holds nothing."""
        if self.apart:
            raise UnsupportedUse(MID_ROUND)

    def conclude(self) -> None:
        """End what spans several steps, on every rank."""

    def before_flush(self) -> None:
        """The script flushes, on every rank."""
        self.check_between_steps()

    def forget(self) -> None:
        """The weights are about to be others, and what is known of those before is worth nothing."""

    def weights_set(self, sent: Sequence[Any]) -> None:
        """All ranks have the same values in `sent`, of which some may be weights of this session."""

    def outer(self) -> list[Tensor]:
        """What is the same on all ranks beside weights and the optimizer's state; in one order on all of them."""
        return []

    # -- under Horovod Elastic

    def remembered(self) -> Any:
        """What a commit keeps of what spans several steps."""

    def go_back(self, to: Any) -> None:
        """Be again where this was `remembered`; what is under way is given up."""

    def meet(self, share: Callable[[], None]) -> None:
        """The ranks are others: let `share` give all of them the weights and the optimizer of rank 0."""
        share()


Combined = TypeVar("Combined")  # a vector of a framework


def left_of_all(
    buckets: OptimizerExchange,
    collectives: Gatherer,
    combine: Callable[[np.ndarray, str], Combined],
    others: Iterable[str] = (),
) -> tuple[list[dict[str, Combined]], list[str]]:
    """What all ranks have kept of each bucket, by part, and the names of what any has elsewhere; here u and v end.

    Args:
        buckets: all that this rank keeps.
        collectives: transport of the ranks.
        combine: function that averages or sums a vector over the ranks under a name, as gradients are; it is called
            for every part that any rank has.
        others: names of what this rank has in no bucket.
    """
    own = {"parts": [engine.state.parts for engine in buckets.engines], "others": sorted(others)}
    theirs = [json.loads(data) for data in collectives.gather_bytes(json.dumps(own).encode(), "parts")]
    left: list[dict[str, Combined]] = [{} for _ in buckets.engines]
    for engine, found, *every in zip(buckets.engines, left, *(each["parts"] for each in theirs), strict=True):
        for part in sorted({part for one in every for part in one}):
            whole = engine.as_one_of_all(part)
            buckets.counts.traffic.count_allreduce(whole.nbytes, buckets.workers)
            found[part] = combine(whole, f"left.{engine.bucket.index}.{part}")
    buckets.empty()
    return left, sorted({name for each in theirs for name in each["others"]})
