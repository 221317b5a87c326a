"""The ranks compare what they are about to do, once, before the first step."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from dgc_horovod.errors import RankMismatch

_DIGEST_BYTES = 8
_made_before: dict[str, Iterator[int]] = defaultdict(itertools.count)


class Gatherer(Protocol):
    """An adapter's collectives, as far as they are needed here."""

    workers: int

    def gather_bytes(self, data: bytes, name: str) -> list[bytes]:
        """The `data` of every rank, of any length, in rank order."""


def cut(everything: bytes, sizes: Iterable[int]) -> list[bytes]:
    """What the ranks sent, one after another in `everything`, apart again."""
    data = memoryview(everything)
    parts = []
    for size in sizes:
        parts.append(bytes(data[:size]))
        data = data[size:]
    return parts


def digest(text: str) -> bytes:
    """A short fingerprint of `text`."""
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


def unique_tag(names: str) -> str:
    """Prefix for an optimizer's collectives: equal on all its ranks, different for each optimizer of a process.

    Optimizers over the same `names` (process set and parameters) are numbered in the order in which they are
    made, which is the same on every rank of the set; optimizers over other names do not disturb the count.
    """
    base = digest(names).hex()[:6]
    return f"{base}.{next(_made_before[base])}"


def check_agreement(collectives: Gatherer, fields: Mapping[str, str]) -> None:
    """Raise the same RankMismatch on every rank if the ranks differ in any of `fields`.

    One allgather of one digest per field; only on a difference, which all ranks see, a second exchange
    brings the texts.

    Args:
        collectives: of the process set, under a tag that does not depend on `fields`.
        fields: name -> text, the same names in the same order on every rank of one version.
    """
    if collectives.workers == 1:
        return
    own = b"".join(digest(text) for text in fields.values())
    gathered = collectives.gather_bytes(own, "agreement")
    if all(theirs == own for theirs in gathered):
        return
    texts = collectives.gather_bytes(json.dumps(dict(fields)).encode(), "disagreement")
    raise RankMismatch("\n".join(_describe([json.loads(text) for text in texts])))


def _describe(texts: list[dict[str, str]]) -> list[str]:
    lines = ["the ranks disagree, so training would diverge; every rank stops here:"]
    for field, expected in texts[0].items():
        for rank, theirs in enumerate(texts):
            if theirs.get(field) != expected:
                ours, other = _first_difference(expected, str(theirs.get(field)))
                lines.append(f"  {field}: rank 0 has {ours}, rank {rank} has {other}")
    lines.append("give every rank the same model, optimizer, compression and dgc_horovod version")
    return lines


def _first_difference(a: str, b: str) -> tuple[str, str]:
    """The first entries in which two newline-separated lists differ, or the texts if they have one entry."""
    left, right = a.split("\n"), b.split("\n")
    for x, y in zip(left, right, strict=False):
        if x != y:
            return x, y
    return f"{len(left)} entries", f"{len(right)} entries"
