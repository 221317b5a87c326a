"""The simulation of the learning-quality study does what real ranks do, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.quality.tasks import ALL_TASKS
from benchmarks.quality.training import Run
from benchmarks.quality.variants import LATER_LOCAL, VARIANTS
from benchmarks.quality.worker import RealRank
from tests.helpers.on_ranks import on_ranks
from tests.helpers.quality import STEPS, followed, in_processes

pytestmark = [pytest.mark.parallel, pytest.mark.slow]
pytest.importorskip("sklearn", reason="the digits come from scikit-learn (extra [test])")
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


def test_local_steps_that_begin_later_are_dense_before():
    dense, later = in_processes(followed, [Run("transformer", name, 2) for name in ("AdamW, dense", *LATER_LOCAL)])
    assert later["losses"] == pytest.approx(dense["losses"], rel=1e-4)


def _followed_by_ranks(runs: list[Run]) -> list[dict[str, Any]]:
    return [followed(run, RealRank) for run in runs]


@pytest.mark.parametrize("runs", [pytest.param(TWO, id="two ranks"), pytest.param(FOUR, id="four ranks")])
def test_simulated_and_real_ranks_have_the_same_weights_after_every_step(runs):
    ranks = on_ranks(_followed_by_ranks, runs[0].workers, arguments={"runs": runs})
    for run, simulated, *real in zip(runs, in_processes(followed, runs), *ranks, strict=True):
        assert len(set(simulated["weights"])) == len(simulated["weights"]) == STEPS, f"{run.key}: it does not train"
        config = VARIANTS[run.variant].config(ALL_TASKS[run.task].settings)
        each = config.local_steps if config and config.local_steps else 1  # between exchanges ranks differ
        assert real[0]["weights"] == simulated["weights"], run.key
        for rank in real:
            assert rank["weights"][each - 1 :: each] == simulated["weights"][each - 1 :: each], run.key
            assert rank["losses"] == pytest.approx(simulated["losses"], rel=1e-6), run.key
