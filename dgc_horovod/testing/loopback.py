"""Collectives of a torch exchange between N ranks of one process that take turns, without a network.

Each rank has a `Loopback`, and all share a `Board`. In one step every rank first starts its collectives, in rank
order; then each rank may wait for results. ``board.clear()`` ends the step, since names are reused in the next one.

    board = Board()
    ranks = [Loopback(rank, workers, board) for rank in range(workers)]
    pending = [each.allreduce(gradients[each.rank], "w", averages=True) for each in ranks]
    means = [each.wait(its) for each, its in zip(ranks, pending)]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.torch.gradients.collectives import Collectives, Pending, Scales


class Message:
    """One collective of a step: each rank's part, and the result."""

    def __init__(self, combine: Callable[[list[Tensor]], Tensor]) -> None:
        self.parts: list[Tensor] = []
        self._combine = combine

    @cached_property
    def result(self) -> Tensor:
        """The result, the same object for every rank, once all have given their parts."""
        return self._combine(self.parts)


Board = dict[str, Message]  # the messages of one step, by name


class Loopback(Collectives):
    """The collectives of one of N ranks of this process; ranks start them in rank order and wait after all started.

    Args:
        rank: index of this rank, 0 <= rank < workers.
        workers: N >= 1.
        board: messages of the present step, shared by all N ranks.
    """

    def __init__(self, rank: int, workers: int, board: Board) -> None:
        super().__init__(rank, workers, tag="loopback")
        self._board = board

    def allgather(self, packet: Tensor, name: str) -> Pending:
        """Start an allgather; the result has the parts in rank order."""
        return self._post(packet, name, torch.cat)

    def allreduce(self, tensor: Tensor, name: str, averages: bool = False, scales: Scales = (1.0, 1.0)) -> Pending:
        """Start a sum, taken in rank order."""
        before, after = scales
        factor = after / self.workers if averages else after
        return self._post(tensor * before, name, lambda parts: sum(parts[1:], parts[0]) * factor)

    def alltoall(self, tensor: Tensor, name: str) -> Pending:
        """Start an exchange of N equal parts; each rank gets its part from every rank."""
        return self._post(tensor, name, lambda parts: torch.stack([p.view(self.workers, -1) for p in parts], 1))

    def broadcast(self, tensor: Tensor, name: str, root: int = 0) -> Pending:
        """Start a broadcast from rank `root`; parts of other ranks are ignored."""
        return self._post(tensor, name, lambda parts: parts[root])

    def _is_done(self, handle: Message) -> bool:
        if len(handle.parts) != self.workers:
            raise UnsupportedUse(
                f"{len(handle.parts)} of {self.workers} ranks have started this collective; start it on all, then wait"
            )
        return True

    def _result(self, pending: Pending) -> Tensor:
        """Return a copy of the result, which a rank may write to."""
        result = pending.handle.result
        return (result[self.rank].reshape(-1) if result.dim() == 3 else result).clone()  # alltoall: this rank's part

    def _post(self, part: Tensor, name: str, combine: Callable[[list[Tensor]], Tensor]) -> Pending:
        message = self._board.setdefault(name, Message(combine))
        message.parts.append(part)
        return Pending(message, part, name)
