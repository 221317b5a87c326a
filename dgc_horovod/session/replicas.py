"""Comparison of replicas: every few steps the ranks compare checksums of a part of their weights."""

from __future__ import annotations

import json
import logging
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import numpy as np

from dgc_horovod.config import DGCConfig
from dgc_horovod.config_check import Gatherer
from dgc_horovod.errors import ReplicaMismatch
from dgc_horovod.stats import PROCESS

_log = logging.getLogger("dgc_horovod")
_PART_BYTES = 2**24  # of weights that are compared together: 3 ms
_BROADCAST = "Broadcast weights and optimizer state from rank 0 before the first step"
_WRITERS = (
    "a change of weights outside of the optimizer's step (by the script, a callback, or a layer that writes to its "
    "weights in the forward pass, such as Embedding(max_norm=...) or spectral normalization); an option of the "
    "optimizer or a loss scale that was different on some rank for a time; bad memory"
)
_GO_ON = 'on_mismatch="broadcast" goes on with the weights of the first rank, but does not remove the cause'
_NAMED = 3  # tensors in a message


def checksum(data: Iterable[np.ndarray]) -> int:
    """CRC-32 of contiguous arrays, one after another. 6 GB/s."""
    found = 0
    for array in data:
        found = zlib.crc32(array.reshape(-1).view(np.uint8).data, found)
    return found


class ReplicaCheck:
    """Schedule of the comparisons of one optimizer's weights, and the reaction to a difference.

    Args:
        sizes: bytes of each tensor, in an order that is the same on every rank.
        config: compression settings; ``check_every`` and ``on_mismatch`` are used.
        collectives: transport of the ranks, whose number may change.

    Attributes:
        parts: indices of the tensors that are compared together, part by part.
        stops: whether the ranks stop at a difference; else they go on with the weights of the first rank.
        own_options: whether the inner optimizer, with its options, is each rank's own.
    """

    def __init__(self, sizes: Sequence[int], config: DGCConfig, collectives: Gatherer) -> None:
        self._every, self._collectives = config.check_every, collectives
        self.stops, self.own_options = config.on_mismatch == "stop", config.exchanges_weights
        self.alike_after: dict[int, int] = {}  # number of steps, by part
        self.parts: list[list[int]] = []
        filled = _PART_BYTES
        for i, nbytes in enumerate(sizes):
            if not self.parts or filled + nbytes > _PART_BYTES:
                self.parts.append([])
                filled = 0
            self.parts[-1].append(i)
            filled += nbytes

    def due(self, step: int) -> int:
        """Return the part that is compared after `step` steps, each in turn; -1: none. The first step counts too."""
        every, alone = self._every, self._collectives.workers == 1
        if alone or not every or not self.parts or not step or (step != 1 and step % every):
            return -1
        return step // every % len(self.parts)

    def note(self, part: int, step: int, alike: bool) -> bool:
        """Note that `part` was compared after `step` steps; returns `alike`, whether the ranks were equal."""
        PROCESS.replica_checks += 1
        PROCESS.replica_mismatches += not alike
        if alike:
            self.alike_after[part] = step
        return alike

    def stop_or_tell(self, found: Difference, told: Sequence[Circumstances]) -> None:
        """Raise ReplicaMismatch if the ranks are to stop; else warn on rank 0. Both texts contain `why`."""
        if self.stops:
            raise ReplicaMismatch(f"{found.text}. {why(found.names, told)}. {_GO_ON}")
        if self._collectives.rank == 0:
            reasons = why(found.names, told)
            _log.warning("dgc_horovod: %s. All ranks go on with those of the first one. %s", found.text, reasons)


def record(step: int, found: int) -> np.ndarray:
    """Return the record of this rank for a comparison, as bytes."""
    return np.array([step, found], np.uint32).view(np.uint8)


def same(received: np.ndarray) -> bool:
    """Whether the records of all ranks are equal."""
    return len(set(received.view(np.uint64).tolist())) == 1


class Difference(NamedTuple):
    """A difference between the ranks: what differs, in words, and the names of the tensors."""

    text: str
    names: list[str]


def compared(step: int, names: Sequence[str], sums: Sequence[Sequence[int]]) -> Difference | None:
    """Return the ranks and tensors that differ; None if all are equal.

    With two ranks either may be wrong; otherwise those differ that are not like the majority.

    Args:
        step: number of steps finished.
        names: names of the tensors that are compared.
        sums: records of the ranks, in rank order: the step, and a CRC-32 for each of `names`.
    """
    usual, count = Counter(map(tuple, sums)).most_common(1)[0]
    if count == len(sums):
        return None
    differing = [name for i, name in enumerate(names, 1) if any(theirs[i] != usual[i] for theirs in sums)]
    which = "the two ranks have different weights"
    if len(sums) > 2:
        ranks = ", ".join(str(rank) for rank, theirs in enumerate(sums) if tuple(theirs) != usual)
        which = f"rank {ranks} has other weights than the others"
    more = f" and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
    text = f"after step {step} {which}: {', '.join(map(repr, differing[:_NAMED]))}{more}"
    return Difference(text, differing)


@dataclass
class Circumstances:
    """Facts of one rank that may explain a difference of weights.

    Args:
        options: what its optimizer steps with (learning rate, loss scale, ...), as text, by name.
        writers: layers that change weights in the forward pass, in words, by the tensor's name.
        before: checksums of tensors before the first step, if they were taken.
        alike_after: number of steps after which these tensors were last equal on all ranks; 0: never.
        record: see `compared`.
    """

    options: dict[str, str] = field(default_factory=dict)
    writers: dict[str, str] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)
    alike_after: int = 0
    record: list[int] = field(default_factory=list)


def ask(collectives: Gatherer, own: Circumstances) -> list[Circumstances]:
    """Return the facts of all ranks, in rank order; called on every rank if `same` is false. A small collective."""
    data = json.dumps(asdict(own)).encode()
    return [Circumstances(**json.loads(text)) for text in collectives.gather_bytes(data, "replicas.why")]


def why(names: list[str], told: Sequence[Circumstances]) -> str:
    """Describe why the ranks differ, or possible reasons if none is known.

    Args:
        names: names of the tensors that differ.
        told: facts of each rank, in rank order.
    """
    first = told[0]
    reasons: list[str] = []
    for name, ours in first.options.items():
        other = next((rank for rank, each in enumerate(told) if each.options.get(name) != ours), None)
        if other is not None and len(reasons) < _NAMED:
            reasons.append(f"The {name} is {ours} on rank 0 and {told[other].options.get(name)} on rank {other}")
    if reasons:
        reasons.append(
            "Give every rank the same; schedulers and GradScalers must not depend on values of one rank alone"
        )
    reasons += [first.writers[name] for name in names if name in first.writers][:1]
    known = [name for name in names if all(name in each.before for each in told)]
    begun = [name for name in known if name not in first.writers]
    if any(each.before[name] != first.before[name] for name in begun for each in told):
        reasons.append(f"They differed before the first step was applied. {_BROADCAST}")
    if reasons:
        return ". ".join(reasons)
    same = ". The optimizer's options (learning rate, ...) are the same on all ranks now" if first.options else ""
    if names == known or first.alike_after:
        when = f"after step {first.alike_after}" if first.alike_after else "before the first step"
        return f"They were equal {when}{same}. Possible causes: {_WRITERS}"
    return f"Perhaps the weights of rank 0 were never broadcast. {_BROADCAST}{same}. Other possible causes: {_WRITERS}"
