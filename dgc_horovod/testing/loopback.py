"""N ranks of one process that take turns: the collectives of a torch exchange, without a network.

Each rank has a `Loopback`, and they share a `Board`. In one step every rank first posts, in rank order, all that it
starts; then each may wait for what comes out. ``board.clear()`` ends the step, as names are those of the step before.

    board = Board()
    ranks = [Loopback(rank, workers, board) for rank in range(workers)]
    pending = [each.allreduce(gradients[each.rank], "w", averages=True) for each in ranks]
    means = [each.wait(its) for each, its in zip(ranks, pending)]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.torch.gradients.collectives import Collectives, Pending


class Message:
    """One collective of a step: what each rank has put in, and what comes out."""

    def __init__(self, combine: Callable[[list[Tensor]], Tensor]) -> None:
        self.parts: list[Tensor] = []
        self._combine = combine
        self._result: Tensor | None = None

    def result(self) -> Tensor:
        """What comes out, the same object for every rank."""
        if self._result is None:
            self._result = self._combine(self.parts)
        return self._result


Board = dict[str, Message]  # of one step, by name


class Loopback(Collectives):
    """The collectives of one of N ranks of this process, which post in rank order and wait when all have posted.

    Args:
        rank: index of this rank, 0 <= rank < workers.
        workers: N >= 1.
        board: the messages of the present step, which all N share.
    """

    def __init__(self, rank: int, workers: int, board: Board) -> None:
        super().__init__(rank, workers, tag="loopback")
        self._board = board

    def allgather(self, packet: Tensor, name: str) -> Pending:
        """Post a part of what is put together in rank order."""
        return self._post(packet, name, torch.cat)

    def allreduce(
        self, tensor: Tensor, name: str, averages: bool = False, prescale: float = 1.0, postscale: float = 1.0
    ) -> Pending:
        """Post a term of what is summed in rank order."""
        factor = postscale / self.workers if averages else postscale
        return self._post(tensor * prescale, name, lambda parts: sum(parts[1:], parts[0]) * factor)

    def alltoall(self, tensor: Tensor, name: str) -> Pending:
        """Post N equal parts, of which each rank gets its own from everybody."""
        return self._post(tensor, name, lambda parts: torch.stack([p.view(self.workers, -1) for p in parts], 1))

    def broadcast(self, tensor: Tensor, name: str, root: int = 0) -> Pending:
        """Post what only that of rank `root` counts of."""
        return self._post(tensor, name, lambda parts: parts[root])

    def _is_done(self, handle: Message) -> bool:
        if len(handle.parts) != self.workers:
            raise UnsupportedUse(f"{len(handle.parts)} of {self.workers} ranks have posted: all must, before one waits")
        return True

    def _result(self, handle: Message) -> Tensor:
        """What comes out; a rank may write to it."""
        result = handle.result()
        return (result[self.rank].reshape(-1) if result.dim() == 3 else result).clone()  # of an alltoall: one's own

    def _post(self, part: Tensor, name: str, combine: Callable[[list[Tensor]], Tensor]) -> Pending:
        message = self._board.setdefault(name, Message(combine))
        message.parts.append(part)
        return Pending(message, part, name)
