"""What all ranks together have kept, for a flush."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

from dgc_horovod.config_check import Gatherer
from dgc_horovod.core.optimizer_exchange import OptimizerExchange

Combined = TypeVar("Combined")  # a vector of a framework


def left_of_all(
    buckets: OptimizerExchange,
    collectives: Gatherer,
    combine: Callable[[np.ndarray, str], Combined],
    others: Iterable[str] = (),
) -> tuple[list[dict[str, Combined]], list[str]]:
    """What all ranks have kept of each bucket, by part, and the names of what any has elsewhere; here u and v end.

    Args:
        buckets: all that this rank keeps.
        collectives: transport of the ranks.
        combine: function that averages or sums a vector over the ranks under a name, as gradients are; it is called
            for every part that any rank has.
        others: names of what this rank has in no bucket.
    """
    own = {"parts": [engine.state.parts for engine in buckets.engines], "others": sorted(others)}
    theirs = [json.loads(data) for data in collectives.gather_bytes(json.dumps(own).encode(), "parts")]
    left: list[dict[str, Combined]] = [{} for _ in buckets.engines]
    for engine, found, *every in zip(buckets.engines, left, *(each["parts"] for each in theirs), strict=True):
        for part in sorted({part for one in every for part in one}):
            whole = engine.as_one_of_all(part)
            buckets.counts.traffic.count_allreduce(whole.nbytes, buckets.workers)
            found[part] = combine(whole, f"left.{engine.bucket.index}.{part}")
    buckets.empty()
    return left, sorted({name for each in theirs for name in each["others"]})
