"""The learning-quality study's runs on real ranks."""

from __future__ import annotations

import horovod.torch as hvd

from benchmarks.quality.training import Run
from benchmarks.quality.worker import RealRank
from tests.helpers.quality import followed

# With two ranks Horovod's sums have one order only, so that whatever is exchanged is the same to the last bit.
TWO = [
    Run("images", "dense", 2),
    Run("images", "dgc, no warm-up", 2),
    Run("lstm", "dgc, rule=gaussian", 2),
    Run("lstm", "+ warm-up (DGC)", 2),  # clips; small tensors by allreduce
    Run("images", "top-k, no residual", 2),
    Run("images", "+ residual (TopK-SGD)", 2),
    Run("transformer", "AdamW, dgc", 2),
    Run("transformer", "AdamW, local, 5 steps", 2),
]
# With four, packets are still added in rank order.
FOUR = [Run("images", "dgc, no warm-up", 4), Run("transformer", "dgc, values=2bit", 4)]


def followed_runs() -> dict[str, dict]:
    """Each run's weights and losses, step by step."""
    hvd.init()
    return {run.key: followed(run, RealRank) for run in (TWO if hvd.size() == 2 else FOUR)}
