"""Kinds of values of the fields of a file, and their check, before anything of the file is used."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dgc_horovod.errors import CheckpointError, shown

_MOST = 2**63


@dataclass(frozen=True)
class Kind:
    """A kind of value.

    Args:
        words: description of the kind, for a message.
        holds: function that says whether a value is of the kind.
    """

    words: str
    holds: Callable[[Any], bool]


def whole(least: int) -> Kind:
    """Whole numbers from `least` on; no truth values."""
    return Kind(f"a whole number from {least} on, below 2^63", lambda x: type(x) is int and least <= x < _MOST)


def optional(kind: Kind) -> Kind:
    """`kind`, or None."""
    return Kind(f"{kind.words}, or null", lambda x: x is None or kind.holds(x))


def one_of(*choices: str) -> Kind:
    """One of these texts."""
    return Kind(f"one of {', '.join(map(repr, choices))}", lambda x: type(x) is str and x in choices)


def list_of(kind: Kind, distinct: bool = False) -> Kind:
    """Lists of entries of `kind`; `distinct`: no entry may occur twice."""
    words = f"a list, each entry of which is {kind.words}{', none of them twice' if distinct else ''}"
    return Kind(words, lambda x: _all(x, kind) and not (distinct and len(set(x)) < len(x)))


def tuple_of(*kinds: Kind) -> Kind:
    """Lists of one entry of each of `kinds`."""

    def holds(x: object) -> bool:
        return (
            isinstance(x, (list, tuple))
            and len(x) == len(kinds)
            and all(k.holds(y) for k, y in zip(kinds, x, strict=True))
        )

    return Kind(f"a list of {len(kinds)}: {'; '.join(kind.words for kind in kinds)}", holds)


def mapping_of(kind: Kind) -> Kind:
    """Mappings from texts to values of `kind`."""
    return Kind(
        f"a mapping, each value of which is {kind.words}",
        lambda x: isinstance(x, Mapping) and all(TEXT.holds(key) and kind.holds(value) for key, value in x.items()),
    )


def _all(x: object, kind: Kind) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, (str, bytes)) and all(map(kind.holds, x))


def _is_number(x: object) -> bool:
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        return False
    return not math.isnan(x) if isinstance(x, float) else abs(x) < _MOST


TEXT = Kind("a text", lambda x: type(x) is str and x.encode(errors="ignore").decode() == x)  # as Unicode has it
SWITCH = Kind("true or false", lambda x: type(x) is bool)
NUMBER = Kind("a number", _is_number)
MAPPING = Kind("a mapping", lambda x: isinstance(x, Mapping))
NAMED = Kind("a mapping from texts to values", lambda x: isinstance(x, Mapping) and all(map(TEXT.holds, x)))


def checked(
    what: str, record: object, kinds: Mapping[str, Kind], missing: Collection[str] = (), within: str = ""
) -> dict[str, Any]:
    """Return the fields of `record` that `kinds` names.

    Args:
        what: begin of the message, with the name of the file.
        record: content that was read.
        kinds: kind of each field.
        missing: names of optional fields.
        within: place of the record in the file, before the name of a field.

    Raises:
        CheckpointError: `record` is no mapping, lacks a field, or has one of another kind; names the field.
    """
    if not isinstance(record, Mapping):
        raise CheckpointError(f"{what}: {within.rstrip('.') or 'its content'} must be a mapping, got {shown(record)}")
    for name, kind in kinds.items():
        if name not in record and name not in missing:
            raise CheckpointError(f"{what}: {within}{name} is missing")
        if name in record and not kind.holds(record[name]):
            raise CheckpointError(f"{what}: {within}{name} must be {kind.words}, got {shown(record[name])}")
    return {name: record[name] for name in kinds if name in record}
