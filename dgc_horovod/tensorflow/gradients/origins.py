"""From when on a rank's own moments of Adam are averages: what they are divided by, as they began with zeros."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

_ALL = "origin"  # in a record: the optimizer's iterations when moments were empty; of all that it does not name


class Origins:
    """The optimizer's iterations at which the moments of each tensor were empty, by its number, as in a record.

    Those of an optimizer's slots were at 0. Where none is known the moments are empty now. They go with the moments
    wherever these go: a tensor may be exchanged with others when a layer is frozen.
    """

    def __init__(self, known: Mapping[str, int] | None = None) -> None:
        self._known = dict(known or {})

    def of(self, number: str, iterations: int) -> int:
        """That of tensor `number`, in the step after `iterations` others."""
        return self._known.setdefault(number, iterations)

    def take_slots(self, number: str, slots: Sequence[np.ndarray]) -> None:
        """The moments of a tensor are taken from `slots`, which are empty if it has none, or has them elsewhere."""
        if any(np.any(slot) for slot in slots):
            self._known[number] = 0

    def forget(self, numbers: Iterable[str]) -> None:
        """The moments of these tensors are empty."""
        for number in numbers:
            self._known.pop(number, None)

    def move_in(self, number: str, other: Origins, its_number: str) -> None:
        """The moments of a tensor come from where it has another number."""
        if its_number in other._known:
            self._known[number] = other._known.pop(its_number)

    def for_record(self, iterations: int) -> dict[str, int]:
        """As `from_record` reads it."""
        return {_ALL: iterations, **self._known}

    @classmethod
    def from_record(cls, record: Mapping[str, int], numbers: Iterable[str]) -> Origins:
        """Those of `numbers` in a record that `is_in` it."""
        return cls({number: record.get(number, record[_ALL]) for number in numbers} if cls.is_in(record) else {})

    @staticmethod
    def is_in(record: Mapping[str, int]) -> bool:
        """Whether the moments that belong to a record are in it, and not in the optimizer's slots."""
        return _ALL in record
