"""Comparison of replicas: every few steps the ranks compare checksums of a part of their weights."""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from dgc_horovod.config import DGCConfig
from dgc_horovod.config_check import Gatherer
from dgc_horovod.errors import ReplicaMismatch
from dgc_horovod.stats import PROCESS

_log = logging.getLogger("dgc_horovod")
_PART_BYTES = 2**24  # of weights that are compared together: 3 ms
_CAUSES = (
    "Likely causes: weights or optimizer state were not broadcast from rank 0 before the first step; an option of the "
    "optimizer (learning rate, ...) or a loss scale was not the same on all ranks; a change of weights outside of the "
    "optimizer's step (by the script, a callback, or a layer that writes to its weights in the forward pass, such as "
    "Embedding(max_norm=...) or spectral normalization); bad memory"
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
        names, sizes: name and bytes of each tensor, in an order that is the same on every rank.
        config: compression settings; ``check_every`` and ``on_mismatch`` are used.
        collectives: transport of the ranks, whose number may change.

    Attributes:
        parts: indices of the tensors that are compared together, part by part.
        stops: whether the ranks stop at a difference; else they go on with the weights of the first rank.
    """

    def __init__(self, names: Sequence[str], sizes: Sequence[int], config: DGCConfig, collectives: Gatherer) -> None:
        self._names, self._every, self._collectives = names, config.check_every, collectives
        self.stops = config.on_mismatch == "stop"
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

    def alike(self, received: np.ndarray) -> bool:
        """Return whether the records of all ranks are equal."""
        return len({record.tobytes() for record in np.split(received, self._collectives.workers)}) == 1

    def judge(self, part: int, received: np.ndarray) -> bool:
        """Return whether all ranks have the same weights; else rank 0 warns.

        Args:
            part: index of the part that is compared.
            received: records of all ranks, in rank order.

        Raises:
            ReplicaMismatch: on every rank, if weights differ and the ranks are to stop.
        """
        alike = self.alike(received)
        PROCESS.replica_checks += 1
        PROCESS.replica_mismatches += not alike
        if alike:
            return True
        records = received.view(np.uint32).reshape(self._collectives.workers, -1)
        found = _difference([self._names[i] for i in self.parts[part]], list(map(tuple, records.tolist())))
        if self.stops:
            raise ReplicaMismatch(f"{found}. {_CAUSES}. {_GO_ON}")
        if self._collectives.rank == 0:
            _log.warning("dgc_horovod: %s. All ranks go on with those of the first one. %s", found, _CAUSES)
        return False


def record(step: int, weights: Iterable[np.ndarray]) -> np.ndarray:
    """Return the record of this rank for a comparison, as bytes: the steps finished, and a CRC-32 of each tensor."""
    return np.array([step, *(checksum([weight]) for weight in weights)], np.uint32).view(np.uint8)


def _difference(names: Sequence[str], records: Sequence[tuple[int, ...]]) -> str:
    """Return in words which ranks and tensors differ.

    With two ranks either may be wrong; otherwise those differ that are not like the majority.
    """
    ((usual, _),) = Counter(records).most_common(1)
    differing = [name for i, name in enumerate(names, 1) if any(theirs[i] != usual[i] for theirs in records)]
    which = "the two ranks have different weights"
    if len(records) > 2:
        ranks = ", ".join(str(rank) for rank, theirs in enumerate(records) if theirs != usual)
        which = f"rank {ranks} has other weights than the others"
    more = f" and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
    return f"after step {usual[0]} {which}: {', '.join(map(repr, differing[:_NAMED]))}{more}"
