"""What pytest's process and a rank tell each other: which function to call with what, and how that ended."""

from __future__ import annotations

import importlib
import pickle
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

_LONGEST = 300  # characters of a line of an error, where local variables can be whole models
_same: list[Any] = []


class Order(NamedTuple):
    """A function that every rank calls.

    Args:
        module: where the function is.
        name: of the function there.
        arguments: by name; what pickle can copy.
        environment: variables while it runs.
        starts: whether Horovod starts before the call.
        timeout: seconds, past which a rank writes where it is and ends.
    """

    module: str
    name: str
    arguments: Mapping[str, Any]
    environment: Mapping[str, str]
    starts: bool
    timeout: float


LEAVE = Order("", "", {}, {}, False, 0.0)  # ends the ranks


class Outcome(NamedTuple):
    """How a call ended on one rank.

    Args:
        value: that the function returned.
        same: of `same_on_ranks`, in the order of its calls.
        error: the traceback with local variables, or "".
        skipped: the reason of a skip, or "".
    """

    value: Any = None
    same: list[Any] | None = None
    error: str = ""
    skipped: str = ""


def same_on_ranks(*values: Any) -> None:
    """On a rank: the test fails unless all ranks have said the same values (numbers, text, lists of them), in order."""
    _same.extend(values)


def carry_out(order: Order) -> Outcome:
    """Call the function on this rank."""
    _same.clear()
    try:
        function = getattr(importlib.import_module(order.module), order.name)
        outcome = Outcome(function(**order.arguments), list(_same))
        pickle.dumps(outcome)
        return outcome
    except pytest.skip.Exception as skip:
        return Outcome(skipped=str(skip) or "on a rank")
    except (Exception, pytest.fail.Exception) as error:
        below = error.__traceback__ and error.__traceback__.tb_next  # without this function's own frame
        said = traceback.TracebackException(type(error), error, below, capture_locals=True).format()
        lines = [line for part in said for line in part.splitlines()]
        return Outcome(error="\n".join(line[:_LONGEST] for line in lines))


def reason(outcomes: list[Outcome | None], log: str, what: str) -> str:
    """Why a call failed: the errors of ranks, and the end of their output if one left no outcome; "" if none did."""
    failed = [f"rank {rank}:\n{each.error}" for rank, each in enumerate(outcomes) if each and each.error]
    gone = [rank for rank, each in enumerate(outcomes) if each is None]
    ends = [f"ranks {gone} left no outcome; output:\n{log[-6000:]}"] if gone else []
    return "\n\n".join([f"{what} on {len(outcomes)} ranks", *failed, *ends]) if failed or gone else ""


def settle(outcomes: list[Outcome | None], log: str, what: str) -> list[Any]:
    """What each rank has returned.

    Raises:
        pytest.fail.Exception: a rank had an error, left no outcome, or did not say the same as rank 0.
        pytest.skip.Exception: all ranks have skipped it.
    """
    if failed := reason(outcomes, log, what):
        pytest.fail(failed, pytrace=False)
    found = [each for each in outcomes if each is not None]
    if all(each.skipped for each in found):
        pytest.skip(found[0].skipped)
    if any(each.skipped for each in found):
        pytest.fail(f"{what}: some ranks alone have skipped it: {[each.skipped for each in found]}", pytrace=False)
    for rank, each in enumerate(found):
        if each.same != found[0].same:
            pytest.fail(f"{what}: {_difference(rank, found[0].same or [], each.same or [])}", pytrace=False)
    return [each.value for each in found]


def _difference(rank: int, first: list[Any], other: list[Any]) -> str:
    if len(first) != len(other):
        return f"rank 0 has said {len(first)} values that must be the same on all ranks, rank {rank} {len(other)}"
    index = next(i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b)
    return f"value {index} of same_on_ranks is {first[index]!r} on rank 0, {other[index]!r} on rank {rank}"


def write(path: Path, thing: Order | Outcome) -> None:
    """Write it so that nobody reads a part of it."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(thing))
    partial.rename(path)


def read(path: Path) -> Any:
    """What was written; None while nothing is there."""
    return pickle.loads(path.read_bytes()) if path.exists() else None
