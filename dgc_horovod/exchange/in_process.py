"""Rounds without a network: what every rank of one process would have received."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dgc_horovod.exchange.contract import ALLGATHER, ALLREDUCE, Round


def carry(collective: Round, buffers: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What each rank receives when rank i hands over ``buffers[i]``; sums are taken in rank order.

    Args:
        collective: round that is carried.
        buffers: buffers of all N ranks, in rank order, each of the size and dtype of the round.
    """
    if collective.kind == ALLGATHER:
        return [np.concatenate(buffers)] * len(buffers)
    if collective.kind == ALLREDUCE:
        return [sum(buffers[1:], buffers[0].copy())] * len(buffers)
    parts = [np.split(buffer, len(buffers)) for buffer in buffers]
    return [np.concatenate([mine[rank] for mine in parts]) for rank in range(len(buffers))]
