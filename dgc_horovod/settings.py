"""What a setting is: a row of the one table that `DGCConfig`, `WarmupSchedule` and ``envvars`` hold together.

Fields of the records, variables, flags of `dgcrun`, keys of a ``compression:`` section, ``dgcrun --help`` and
docs/environment.md are all made of these rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dgc_horovod.errors import ConfigError
from dgc_horovod.kinds import Kind, check

WHAT, WHEN, WIRE = "what is sent", "over the run: density warm-up, local steps", "how it travels"
RUNNING, BY_DGCRUN = "running", "set by dgcrun"
OF_METHODS = (WHAT, WHEN)  # the groups of what is chosen for a method; the others are a matter of the cluster
ACTIVATED, EVERYWHERE = "activated", "everywhere"  # where a variable acts; docs/environment.md explains the words
OF_METHOD = "of the method"


@dataclass(frozen=True, eq=False)
class Setting:
    """One row of the table.

    Args:
        key: its name in a config file; that of its variable follows from it.
        default: value where nobody sets it; None for none.
        meaning: one line on what it does, with unit and range.
        kind: kind of its values.
        group: heading that it stands under in ``dgcrun --help`` and docs/environment.md; "" if a method sets it.
        flag: flag of dgcrun; "" for none.
        field: field of DGCConfig, or of WarmupSchedule as "warmup.FIELD"; "" for none.
        method: method that it is for; "" for any.
        by_method: whether every method says what it is.
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
    by_method: bool = False
    acts: str = ACTIVATED

    @property
    def name(self) -> str:
        """Its variable in the environment."""
        return "DGC_COMPRESSION" if self.key == "method" else f"DGC_{self.key.upper()}"

    @property
    def default_text(self) -> str:
        """Its default as a user would write it, "" for none."""
        return OF_METHOD if self.by_method else as_text(self.default)

    @property
    def metavar(self) -> str:
        """What stands behind its flag in a help text."""
        return self.kind.metavar or self.key.split("_")[-1].upper()

    @property
    def explained(self) -> str:
        """Its meaning, with the choices."""
        return f"{self.meaning}: {', '.join(self.kind.choices)}" if self.kind.choices else self.meaning

    def parse(self, text: str, source: str = "") -> Any:
        """`text` as a value; None for "none" where there is no default.

        Raises:
            ConfigError: it is not of the kind, or none of the choices; the message names `source`.
        """
        if self.default is None and text.lower() == "none" and not self.kind.choices:
            return None
        name = f"{source or self.name}: {self.key}"
        if self.kind.choices:
            return check(name, text, self.kind)
        try:
            return self.kind.read(text)
        except (KeyError, ValueError):
            raise ConfigError(f"{name} must be {self.kind.text}, got {text!r}") from None


def as_text(value: Any) -> str:
    """A value as a user would write it."""
    return {None: "", True: "on", False: "off"}[value] if value is None or isinstance(value, bool) else str(value)


def setting(default: Any, meaning: str, kind: Kind, group: str = "", **more: Any) -> Any:
    """A field of a record, with its row; `more`: see `Setting`."""
    row = Setting("", default, meaning, kind, group, **more)
    return dataclasses.field(default=default, metadata={"row": row})


def rows_of(record: Any, prefix: str = "") -> Iterator[Setting]:
    """The rows of a record's fields; `prefix`: of its own name where it is a field of another, with a dot."""
    for field in dataclasses.fields(record):
        name = f"{prefix}{field.name}"
        key, row = name.replace(".", "_"), field.metadata["row"]
        yield dataclasses.replace(row, key=key, field=name, flag=row.flag or f"--dgc-{key.replace('_', '-')}")


def normalise(record: Any, where: str = "") -> None:
    """Make every field of a record plain Python. Raises ConfigError for one that is not of its kind; `where`: of it."""
    for row in rows_of(record):
        value, optional = getattr(record, row.field), row.default is None
        if value is not None or not optional:
            value = check(f"{where}{row.field}", value, row.kind, " or None" if optional else "")
            object.__setattr__(record, row.field, value)
