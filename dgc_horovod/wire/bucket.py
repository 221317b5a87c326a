"""A bucket: a flat run of parameters that are exchanged together; and runs in it that elements are selected from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """One parameter inside a bucket: elements ``start`` to ``start + numel``."""

    name: str
    start: int
    numel: int

    @property
    def place(self) -> slice:
        """Its elements among those of the bucket."""
        return slice(self.start, self.start + self.numel)


@dataclass(frozen=True)
class Bucket:
    """A flat run of parameters exchanged as one message.

    Args:
        index: index of the bucket among all, from 0.
        segments: parameters of the bucket, one after another.
        uncompressed: whether every element is sent, none selected: small tensors whose values are coded.
        values: value codec of an uncompressed bucket; "" otherwise.
    """

    index: int
    segments: tuple[Segment, ...]
    uncompressed: bool = False
    values: str = ""

    @property
    def name(self) -> str:
        """Name of its collective."""
        return f"bucket{self.index}"

    @property
    def numel(self) -> int:
        last = self.segments[-1]
        return last.start + last.numel


@dataclass(frozen=True)
class SelectionRange:
    """A run of a bucket from which `k` elements are selected together."""

    start: int
    numel: int
    k: int

    @property
    def place(self) -> slice:
        """Its elements among those of the bucket."""
        return slice(self.start, self.start + self.numel)
