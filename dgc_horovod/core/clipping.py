"""Local gradient clipping: the norm to which each rank clips (DGC 3.1)."""

from __future__ import annotations

import math


def clip_limit(c: float, workers: int, averages: bool) -> float:
    """DGC 3.1, local gradient clipping: the norm to which one rank's gradient is clipped.

    The paper's ``c * N**-0.5`` is for a gradient already divided by N; with Horovod a rank's gradient is the mean over
    its own shard, so the same rule is ``sqrt(N)*c`` (for a sum ``c/sqrt(N)``). Of M nodes whose workers average first
    each has one gradient, the mean over its workers' shards: there the rule is ``sqrt(M)*c``.

    Args:
        c: threshold of the averaged gradient, > 0.
        workers: number of gradients that are averaged, N or M.
        averages: whether they are averaged or summed.
    """
    root = math.sqrt(workers)
    return c * root if averages else c / root
