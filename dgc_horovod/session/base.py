"""Sessions and strategies: the owner of one optimizer's steps, for every framework."""

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
# in the order of wrapping, which is the same on every rank
_made: weakref.WeakValueDictionary[int, Session[Any]] = weakref.WeakValueDictionary()
Wrapped = TypeVar("Wrapped")  # an optimizer of a framework
Owner = TypeVar("Owner", bound="Session[Any]")
Tensor = TypeVar("Tensor")


class Session(Generic[Wrapped]):
    """The state of compression of one optimizer, which refers to it by its one attribute of ours.

    Args:
        optimizer: wrapped optimizer; it owns the session.

    Attributes:
        strategy: decides when the ranks exchange, and what.
        told: keys of the messages that were logged.
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
        """Whether the optimizer still exists."""
        return self._optimizer() is not None

    @property
    def speaks(self) -> bool:
        """Whether this rank logs messages that concern all ranks."""
        raise NotImplementedError

    def tell_once(self, key: str, text: str) -> None:
        """Log `text` on the first rank, once for each key."""
        if key not in self.told and self.speaks:
            self.told.add(key)
            _log.warning("dgc_horovod: %s", text)

    def enter(self) -> None:
        """Add the session to `sessions`."""
        _made[id(self)] = self


def sessions() -> list[Session[Any]]:
    """Return the sessions of this process that are alive, in the order of wrapping."""
    # of a copy: another thread may wrap an optimizer meanwhile
    return [session for each in _made.valuerefs() if (session := each()) is not None and session.alive]


def weights_set(sent: Iterable[Any]) -> None:
    """Tell all sessions that the ranks now have equal values in `sent`, which may include weights that they train."""
    values = list(sent)
    for session in sessions():
        session.strategy.weights_set(values)


class Strategy(StatePart, Generic[Owner, Tensor]):
    """The steps of one session, and state that spans several steps; by default there is none.

    Args:
        session: session that has it.
    """

    def __init__(self, session: Owner) -> None:
        self.session: Owner = weakref.proxy(session)  # the owner; without a cycle, memory is freed at once

    @property
    def apart(self) -> bool:
        """Whether the ranks' weights may differ now, within something that spans several steps."""
        return False

    def check_between_steps(self) -> None:
        """Raise UnsupportedUse within something that spans several steps and that no record holds."""
        if self.apart:
            raise UnsupportedUse(MID_ROUND)

    def conclude(self) -> None:
        """End the round under way, if there is one, on every rank."""

    def before_flush(self) -> None:
        """Prepare for a flush by the script, on every rank."""
        self.check_between_steps()

    def forget(self) -> None:
        """Drop the state that belongs to the present weights, which are about to be replaced."""

    def weights_set(self, sent: Sequence[Any]) -> None:
        """Note that all ranks have equal values in `sent`, which may include weights of this session."""

    def outer(self) -> list[Tensor]:
        """Return tensors beside weights and the optimizer's state that are equal on all ranks, in the same order."""
        return []

    # -- under Horovod Elastic

    def remembered(self) -> Any:
        """Return the state that a commit keeps of this strategy."""

    def go_back(self, to: Any) -> None:
        """Go back to a `remembered` state; a round under way is dropped."""

    def meet(self, share: Callable[[], None]) -> None:
        """Meet other ranks: call `share`, which gives all of them the weights and the optimizer of rank 0."""
        share()


Combined = TypeVar("Combined")  # a vector of a framework


def left_of_all(
    buckets: OptimizerExchange,
    collectives: Gatherer,
    combine: Callable[[np.ndarray, str], Combined],
    others: Iterable[str] = (),
) -> tuple[list[dict[str, Combined]], list[str]]:
    """Combine the state of each bucket over the ranks, by part, and empty u and v.

    Args:
        buckets: exchange of this optimizer.
        collectives: transport of the ranks.
        combine: function that averages or sums a vector over the ranks under a name, as gradients are; it is called
            for every part that any rank has.
        others: names of tensors of which this rank has state in no bucket.

    Returns:
        The combined state of each bucket, and the names in `others` of any rank.
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
