"""Settings: one row for each, its kind of value, and how a value is read from text and checked."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, TypeGuard

from dgc_horovod.errors import ConfigError, nearest, shown

CARRIED = "without NUL and without lone surrogates"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
_SWITCH = {"1": True, "on": True, "true": True, "yes": True, "0": False, "off": False, "false": False, "no": False}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?0*\d{1,3})?", re.ASCII | re.IGNORECASE)
_MOST_WHOLE, _MOST_SECONDS = 2**63, 1e9  # torch.distributed's own timeout overflows not far above


def number(text: str) -> float:
    """A finite number in ASCII digits: ``12``, ``-0.5``, ``1e-3``. Raises ValueError for anything else."""
    if not math.isfinite(value := float(_exactly(text))):
        raise ValueError
    return value


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a real number, and not NaN."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and value == value


def can_carry(text: str) -> bool:
    """Whether `text` can be in a variable of the environment, a command line or the name of a file."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # a lone surrogate that stands for no byte
        return False


def _exactly(text: str) -> Decimal:
    if not _NUMBER.fullmatch(text.strip()):
        raise ValueError
    return Decimal(text.strip())


def _no_hint(name: str, value: object) -> str:
    return ""


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of value.

    Args:
        metavar: placeholder for a value behind its flag.
        text: demand on a text, in words.
        read: function that converts a text to a value; ValueError if it cannot.
        must: demand on a value that comes from code, in words.
        allows: function that says whether a value fulfils `must`.
        plain: function that converts a value to plain Python, so that equal settings of two ranks also look equal.
        hint: function of name and value that returns what the user may have meant.
        choices: the allowed texts, if they are few; a script may add one while it runs.
    """

    metavar: str
    text: str
    read: Callable[[str], Any]
    must: str = ""
    allows: Callable[[Any], bool] = lambda value: True
    plain: Callable[[Any], Any] = str
    hint: Callable[[str, Any], str] = _no_hint
    choices: Collection[str] = ()


def in_range(must: str, allows: Callable[[float], bool], hint: Callable[[str, Any], str] = _no_hint) -> Kind:
    """A number; see `Kind`."""
    return Kind("X", "a number", number, must, lambda value: is_number(value) and allows(value), float, hint)


def whole(least: int, hint: Callable[[str, Any], str] = _no_hint) -> Kind:
    """A whole number of at least `least`; see `Kind`."""
    must = f"a whole number >= {least}"
    return Kind("N", "a whole number below 2^63", _whole, must, lambda value: _is_whole(value, least), int, hint)


def choice(allowed: Collection[str]) -> Kind:
    """One of a few texts."""
    return Kind("", "", str, "", lambda value: value in tuple(allowed), choices=allowed)


def _inverse(name: str, value: object) -> str:
    return f"; for {value:g}x compression pass {name}={1 / value:g}" if is_number(value) and 2 <= value < 1e9 else ""


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least


def _whole(text: str, unit: int = 1) -> int:
    value = _exactly(text) * unit
    if not (abs(value) < _MOST_WHOLE and value == int(value)):
        raise ValueError
    return int(value)


def read_size(text: str) -> int:
    """A whole number with a decimal unit: ``2MB``, ``500k``, ``25.6M``. Raises ValueError for anything else."""
    amount = text.upper().removesuffix("B")
    unit = amount[-1:] if amount[-1:] in _UNITS else ""
    return _whole(amount.removesuffix(unit), _UNITS[unit])


def _text(text: str) -> str:
    if not can_carry(text):
        raise ValueError
    return text


FRACTION = in_range("in (0, 1]", lambda value: 0 < value <= 1, _inverse)
POSITIVE = in_range("a positive finite number", lambda value: 0 < value <= sys.float_info.max)
SIZE = replace(
    whole(1), metavar="BYTES", text="a whole number of bytes below 2^63, such as 2MB or 500kB", read=read_size,
    must="a whole number of bytes >= 1",
)  # fmt: skip
SWITCH = Kind(
    "on|off", "on or off (1/0, true/false, yes/no)", lambda text: _SWITCH[text.lower()],
    "True or False", lambda value: isinstance(value, bool), bool,
)  # fmt: skip
SECONDS = replace(
    in_range("a positive number of seconds, at most 1e9", lambda value: 0 < value <= _MOST_SECONDS), metavar="S"
)
TEXT, PATH = Kind("TEXT", f"a text {CARRIED}", _text), Kind("PATH", f"a path {CARRIED}", _text)


def check(name: str, value: object, kind: Kind, or_none: str = "") -> Any:
    """Return `value` as plain Python. Raises ConfigError if it is not of that kind."""
    if not kind.allows(value):
        must = f"one of {', '.join(kind.choices)}" if kind.choices else kind.must
        near = nearest(value, kind.choices) if isinstance(value, str) else ""
        hint = f"; did you mean {near!r}?" if near else kind.hint(name.rpartition(": ")[2], value)
        raise ConfigError(f"{name} must be {must}{or_none}, got {shown(value)}{hint}")
    return kind.plain(value)


def read(name: str, text: str, kind: Kind) -> Any:
    """Convert `text` to a value of that kind. Raises ConfigError if it is none."""
    try:
        value = kind.read(text)
    except (KeyError, ValueError):
        raise ConfigError(f"{name} must be {kind.text}, got {shown(text)}") from None
    return check(name, value, kind)


def check_choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Raise ConfigError, which names the nearest allowed value, unless `value` is one of `allowed`."""
    check(name, value, choice(allowed))


def check_whole(name: str, value: object, least: int) -> None:
    """Raise ConfigError unless `value` is a whole number of at least `least`."""
    check(name, value, whole(least))


WHAT, WHEN, WIRE = "what is sent", "over the run: density warm-up, local steps", "how it travels"
RUNNING, BY_DGCRUN = "running", "set by dgcrun"
OF_METHODS = (WHAT, WHEN)  # groups of settings that are chosen for a method; the others depend on the cluster
ACTIVATED, EVERYWHERE = "activated", "everywhere"  # where a variable acts; docs/environment.md explains the words
OF_METHOD = "of the method"


@dataclass(frozen=True, eq=False)
class Setting:
    """One row of the table.

    Args:
        key: name in a config file; the name of the variable follows from it.
        default: value if nobody sets it; None for none.
        meaning: one line on its effect, with unit and range.
        kind: kind of its values.
        group: heading in ``dgcrun --help`` and docs/environment.md; "" if a method sets it.
        flag: flag of dgcrun; "" for none.
        field: field of DGCConfig, or of WarmupSchedule as "warmup.FIELD"; "" for none.
        method: method that it belongs to; "" for any.
        strategy: strategy that it selects, a file in ``torch/session/``; "" for none.
        by_method: whether every method sets it.
        acts: scripts in which it acts, ``ACTIVATED`` or ``EVERYWHERE``.
    """

    key: str
    default: Any
    meaning: str
    kind: Kind
    group: str = RUNNING
    flag: str = ""
    field: str = ""
    method: str = ""
    strategy: str = ""
    by_method: bool = False
    acts: str = ACTIVATED

    @property
    def name(self) -> str:
        """Name of its environment variable."""
        return "DGC_COMPRESSION" if self.key == "method" else f"DGC_{self.key.upper()}"

    @property
    def default_text(self) -> str:
        """Default as a user would write it, "" for none."""
        return OF_METHOD if self.by_method else as_text(self.default)

    @property
    def metavar(self) -> str:
        """Placeholder for a value behind its flag in a help text."""
        return self.kind.metavar or self.key.split("_")[-1].upper()

    @property
    def explained(self) -> str:
        """Meaning, with the choices."""
        return f"{self.meaning}: {', '.join(self.kind.choices)}" if self.kind.choices else self.meaning

    def parse(self, text: str, source: str = "") -> Any:
        """Convert `text` to a value; None for "none" if there is no default.

        Raises:
            ConfigError: the text is not of the kind, or the value not allowed; the message names `source`.
        """
        if self.default is None and text.lower() == "none" and not self.kind.choices:
            return None
        return read(f"{source or self.name}: {self.key}", text, self.kind)


def as_text(value: object) -> str:
    """Return a value as a user would write it."""
    return {None: "", True: "on", False: "off"}[value] if value is None or isinstance(value, bool) else str(value)


def setting(default: object, meaning: str, kind: Kind, group: str = "", **more: Any) -> Any:
    """Return a dataclass field with its row; `more`: see `Setting`."""
    row = Setting("", default, meaning, kind, group, **more)
    return dataclasses.field(default=default, metadata={"row": row})


def rows_of(record: Any, prefix: str = "") -> Iterator[Setting]:
    """Yield the rows of a record's fields; `prefix`: name of the record as a field of another one, with a dot."""
    for field in dataclasses.fields(record):
        name = f"{prefix}{field.name}"
        key, row = name.replace(".", "_"), field.metadata["row"]
        yield dataclasses.replace(row, key=key, field=name, flag=row.flag or f"--dgc-{key.replace('_', '-')}")


def normalise(record: Any, where: str = "") -> None:
    """Convert every field of a record to plain Python. Raises ConfigError for a wrong one; `where`: its begin."""
    for row in rows_of(record):
        value, optional = getattr(record, row.field), row.default is None
        if value is not None or not optional:
            value = check(f"{where}{row.field}", value, row.kind, " or None" if optional else "")
            object.__setattr__(record, row.field, value)
