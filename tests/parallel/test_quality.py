"""The simulation of the learning-quality study does what real ranks do, bit by bit."""

from __future__ import annotations

import pytest

from benchmarks.quality.tasks import ALL_TASKS
from benchmarks.quality.training import Run
from benchmarks.quality.variants import LATER_LOCAL, VARIANTS
from tests.helpers.quality import STEPS, followed, in_processes
from tests.helpers.ranks import run_ranks
from tests.parallel.cases.quality import FOUR, TWO

pytestmark = [pytest.mark.parallel, pytest.mark.slow]
pytest.importorskip("sklearn", reason="the digits come from scikit-learn (extra [test])")


def test_local_steps_that_begin_later_are_dense_before():
    dense, later = in_processes(followed, [Run("transformer", name, 2) for name in ("AdamW, dense", *LATER_LOCAL)])
    assert later["losses"] == pytest.approx(dense["losses"], rel=1e-4)


@pytest.mark.parametrize(
    "runs", [pytest.param(TWO, id="two ranks"), pytest.param(FOUR, id="four ranks", marks=pytest.mark.slow)]
)
def test_simulated_and_real_ranks_have_the_same_weights_after_every_step(runs):
    ranks = [rank["quality.followed_runs"] for rank in run_ranks(runs[0].workers, ["quality.followed_runs"])]
    for run, simulated in zip(runs, in_processes(followed, runs), strict=True):
        assert len(set(simulated["weights"])) == len(simulated["weights"]) == STEPS, f"{run.key}: it does not train"
        config = VARIANTS[run.variant].config(ALL_TASKS[run.task].settings)
        each = config.local_steps if config and config.local_steps else 1  # between exchanges ranks differ
        assert ranks[0][run.key]["weights"] == simulated["weights"], run.key
        for rank in ranks:
            assert rank[run.key]["weights"][each - 1 :: each] == simulated["weights"][each - 1 :: each], run.key
            assert rank[run.key]["losses"] == pytest.approx(simulated["losses"], rel=1e-6), run.key
