"""What an owner of elements does: add what it is sent, pick the largest sums, keep the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dgc_horovod.exchange.shards import Shards
from dgc_horovod.kernels.contract import Elements, Kernels, State
from dgc_horovod.wire.bucket import Bucket, Segment

_LOWER = 0.9  # of the last step's smallest sum: above it the next step's largest are looked for


class Owner:
    """The remainder of one rank, and what a step has changed of it.

    Args:
        rank: index of this worker, 0 <= rank < N.
        state: state of the bucket; `State.remainder` is made at first use.
        shards: which worker owns which elements.
        kernels: backend on the device that holds the remainder.
    """

    def __init__(self, rank: int, state: State, shards: Shards, kernels: Kernels) -> None:
        self.rank, self._state, self._kernels = rank, state, kernels
        self._numel = shards.size
        self._sums = kernels.outputs(Bucket(0, (Segment("shard", 0, shards.size),)))
        self._before: list[Elements] = []  # in the order in which they were overwritten
        self._guess = 0.0

    @property
    def _remainder(self) -> Any:
        if self._state.remainder is None:
            self._state.remainder = self._kernels.new(self._numel)
        return self._state.remainder

    def add(self, parts: Sequence[Elements]) -> bool:
        """``r += parts``, in rank order. False if r has left the range of fp32: then it starts again from nothing."""
        self.rollback()
        r, positions = self._remainder, np.concatenate([part.positions for part in parts])
        self._before.append(Elements(positions, self._kernels.take(r, positions)))
        self._sums.put(0, r)
        finite = self._kernels.aggregate_into(self._sums, parts, 1.0, fresh=False)
        self._sums.clear()
        if not finite:
            self._kernels.fill_zero(r)
            self.commit()
        return finite

    def largest(self, k: int) -> Elements:
        """The k largest sums exactly. Cost: a read of r, where the last step's smallest is a good guess."""
        if self._guess:
            found = self._kernels.at_least(self._remainder, self._guess)
            if found.values.size >= k:
                return self._kernels.keep_largest(found, k)
        return self._kernels.top_k(self._remainder, k)

    def send(self, elements: Elements, decoded: np.ndarray) -> None:
        """``r -= decoded``: these are sent on."""
        self._guess = _LOWER * float(np.abs(elements.values).min()) if elements.values.size else 0.0
        self._before.append(elements)
        kept = State(self._remainder)
        self._kernels.update_residual(kept, elements, decoded, None)
        kept.settle()

    def commit(self) -> None:
        """Nothing is to be taken back any more."""
        self._before.clear()

    def rollback(self) -> None:
        """Let r be as before `add`."""
        while self._before:
            self._kernels.put(self._remainder, self._before.pop())
