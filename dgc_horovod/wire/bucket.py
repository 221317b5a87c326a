"""A bucket, a flat run of parameters that are exchanged together."""

from __future__ import annotations

from dataclasses import dataclass, replace

PADDING = ""


@dataclass(frozen=True)
class Segment:
    """One parameter inside a bucket, or a part of one: elements ``start`` to ``start + numel``.

    Args:
        name: name of the parameter; `PADDING` for zeros that belong to none.
        start: index of its first element in the bucket.
        numel: number of its elements in the bucket.
        offset: index in the parameter of the segment's first element.
    """

    name: str
    start: int
    numel: int
    offset: int = 0

    @property
    def place(self) -> slice:
        """The segment's elements, as a slice of the bucket."""
        return slice(self.start, self.start + self.numel)


@dataclass(frozen=True)
class Bucket:
    """A flat run of parameters exchanged as one message.

    Args:
        index: index of the bucket among all, from 0.
        segments: parameters of the bucket, one after another.
        uncompressed: whether every element is sent, without selection: a bucket of small tensors with coded values.
        values: value codec of an uncompressed bucket; "" otherwise.
    """

    index: int
    segments: tuple[Segment, ...]
    uncompressed: bool = False
    values: str = ""

    @property
    def name(self) -> str:
        """Name of the bucket's collective."""
        return f"bucket{self.index}"

    @property
    def numel(self) -> int:
        last = self.segments[-1]
        return last.start + last.numel

    def slices(self, count: int) -> tuple[Bucket, ...]:
        """Cut the bucket into `count` buckets of ``ceil(numel / count)`` elements each; the last ones are padded.

        Args:
            count: G >= 1, number of workers of a node; each keeps one slice.
        """
        if count == 1:
            return (self,)
        size = -(-self.numel // count)
        return tuple(self._slice(i * size, (i + 1) * size) for i in range(count))

    def _slice(self, low: int, high: int) -> Bucket:
        segments = []
        for each in self.segments:
            start, stop = max(low, each.start), min(high, each.start + each.numel)
            if start < stop:
                segments.append(Segment(each.name, start - low, stop - start, each.offset + start - each.start))
        if high > self.numel:
            first = max(low, self.numel)
            segments.append(Segment(PADDING, first - low, high - first))
        return replace(self, segments=tuple(segments))
