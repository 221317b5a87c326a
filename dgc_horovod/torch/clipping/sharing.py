"""Norms that ranks tell each other, in messages of one size: what a rank measures alone makes no other one wait."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import torch

from dgc_horovod.torch.gradients.collectives import Collectives

MOST = 16  # norms that a message has room for


class SharedNorms:
    """Norms of one step, on their way to all ranks.

    Args:
        squares: square of each norm of this rank, by a number of 64 bits that says of what it is one, the same on every
            rank; of the first `MOST` the others are told.
        collectives: transport of all ranks, each of which makes one of these.
    """

    def __init__(self, squares: Mapping[int, float], collectives: Collectives) -> None:
        self._own, self._collectives = list(squares)[:MOST], collectives
        message = torch.zeros(2, MOST, dtype=torch.int64)
        for i, what in enumerate(self._own):
            message[0, i] = what
            message[1].view(torch.float64)[i] = squares[what]
        collectives.traffic.count(message.nbytes, (collectives.workers - 1) * message.nbytes)
        self._pending = collectives.allgather(message.view(-1), "clip.norms")

    def wait(self) -> dict[int, float]:
        """The root mean square, over the ranks that have measured it, of each norm of this rank's that was told."""
        gathered = self._collectives.wait(self._pending).view(-1, 2, MOST)
        found = defaultdict(list)
        for what, square in zip(gathered[:, 0].flatten().tolist(), _numbers(gathered[:, 1]), strict=True):
            found[what].append(square)
        return {what: math.sqrt(math.fsum(found[what]) / len(found[what])) for what in self._own}


def _numbers(words: torch.Tensor) -> list[float]:
    """What lies in integers of 64 bits as floating-point numbers."""
    found: list[float] = words.contiguous().view(torch.float64).flatten().tolist()
    return found
