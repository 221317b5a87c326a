"""Comparison of settings between the ranks, once, before the first step."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from dgc_horovod.errors import CheckpointError, DGCError, RankMismatch
from dgc_horovod.stats import PROCESS

_DIGEST_BYTES = 8
_NOTHING = "nothing"  # the text of no error
_PART = 2**28  # bytes in one message, far below the limit of a collective


class Gatherer(Protocol):
    """The collectives of an adapter that are needed here."""

    rank: int
    workers: int

    def gather_bytes(self, data: bytes, name: str) -> list[bytes]:
        """The `data` of every rank, of any length, in rank order."""


def cut(everything: bytes, sizes: Iterable[int]) -> list[bytes]:
    """Split `everything`, the ranks' data one after another, into one piece for each rank."""
    stream = io.BytesIO(everything)
    return [stream.read(size) for size in sizes]


def _digest(text: str) -> bytes:
    """A short fingerprint of `text`."""
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


def unique_tag(names: str) -> str:
    """Prefix for an optimizer's collectives: equal on all its ranks, different for each optimizer of a process.

    Optimizers over the same `names` (process set and parameters) are numbered in the order in which they are
    made, which is the same on every rank of the set; optimizers over other names do not disturb the count.
    """
    base = _digest(names).hex()[:6]
    return f"{base}.{PROCESS.next_number(base)}"


def check_agreement(collectives: Gatherer, fields: Mapping[str, str]) -> None:
    """Raise the same RankMismatch on every rank if the ranks differ in any of `fields`.

    One allgather of one digest per field; only on a difference, which all ranks see, a second exchange
    brings the texts.

    Args:
        collectives: transport of the process set, under a tag that does not depend on `fields`.
        fields: texts by name, the same names in the same order on every rank of one version.
    """
    if collectives.workers == 1:
        return
    own = b"".join(_digest(text) for text in fields.values())
    gathered = collectives.gather_bytes(own, "agreement")
    if all(theirs == own for theirs in gathered):
        return
    texts = collectives.gather_bytes(json.dumps(dict(fields)).encode(), "disagreement")
    raise RankMismatch("\n".join(_describe([json.loads(text) for text in texts])))


@contextmanager
def _compared(compare: Callable[[str], None]) -> Iterator[None]:
    """Run something, then call `compare` on every rank with "nothing" or the text of this rank's error."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    try:
        compare(_NOTHING if problem is None else _words_of(problem))
    except Exception as mismatch:
        raise mismatch from problem  # the reason why others are missing, if it is that they are
    if problem is not None:
        raise problem


def refused_alike(collectives: Gatherer | None, fields: Mapping[str, str]) -> AbstractContextManager[None]:
    """Run the checks of a rank; an error on one rank stops every rank.

    Args:
        collectives: transport of the ranks; None: they do not compare.
        fields: texts that must be equal on every rank too, see `check_agreement`.

    Raises:
        RankMismatch: on every rank, if not all have the same error, or the same `fields`.
    """

    def compare(own: str) -> None:
        if collectives is not None:
            check_agreement(collectives, {"refused": own, **fields})

    return _compared(compare)


def together(collectives: Gatherer, what: str) -> AbstractContextManager[None]:
    """Run work that each rank does by itself; if it fails on one rank, every rank raises the same error.

    Args:
        collectives: transport of the group whose ranks do the work.
        what: name of the work, for the message.

    Raises:
        CheckpointError: on every rank, if an exception was raised inside on any.
    """

    def compare(own: str) -> None:
        texts = [json.loads(data) for data in collectives.gather_bytes(json.dumps(own).encode(), "together")]
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text != _NOTHING]
        if failed:
            raise CheckpointError(f"{what} failed; " + "; ".join(failed))

    return _compared(compare)


def shared_from(collectives: Gatherer, data: bytes, name: str, root: int = 0) -> bytes:
    """Return the `data` of rank `root` on every rank; that of the others is ignored. Blocks; in parts of 256 MiB."""
    own = data if collectives.rank == root else b""
    size = int(collectives.gather_bytes(str(len(own)).encode(), f"{name}.size")[root])
    parts = []
    for start in range(0, size, _PART):
        piece = own[start : start + _PART] if collectives.rank == root else b"-"
        parts.append(collectives.gather_bytes(piece, name)[root])
    return b"".join(parts)


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
    lengths = f"{len(left)} entries", f"{len(right)} entries"
    return next((pair for pair in zip(left, right, strict=False) if pair[0] != pair[1]), lengths)


def _words_of(error: Exception) -> str:
    return str(error) if isinstance(error, DGCError) else f"{type(error).__name__}: {error}"
