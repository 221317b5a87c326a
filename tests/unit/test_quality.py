"""The arithmetic of the learning-quality study: what is compared with what, and what counts as a difference."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from benchmarks.quality import analysis, runs, selection, tables
from benchmarks.quality.tasks import TASKS
from benchmarks.quality.training import Run
from benchmarks.quality.variants import ABLATION, OPTIMIZERS, VARIANTS


def kept(variant: str, losses: list[float | None], **more):
    """What the file keeps of runs of several seeds; None diverged."""
    found = {}
    for seed, loss in enumerate(losses):
        run = Run("lstm", variant, seed=seed, **more)
        accuracy = None if loss is None else 1 - loss / 10
        curve = [] if loss is None else [[run.steps, loss, accuracy]]
        found[run.key] = {
            "run": dataclasses.asdict(run), "curve": curve, "diverged": loss is None, "loss": loss, "accuracy": accuracy
        }  # fmt: skip
        if variant != "dense":
            found[run.key].update(selected=[[0.9, 1.0, 1.0]], traffic=0.01)
    return found


def test_gaps_are_to_the_dense_run_of_the_same_seed():
    results = {**kept("dense", [1.0, 2.0, 3.0]), **kept("dgc", [1.1, 2.2, None])}
    (row,) = analysis.rows(analysis.outcomes(results), lambda run: run.variant == "dgc")
    assert row.loss_gap == pytest.approx([0.1, 0.2, math.inf])
    assert row.accuracy_gap[:2] == pytest.approx([-1.0, -2.0])
    assert row.diverged == 1
    assert tables.spread(row.loss, ".2f") == "1 of 3 diverged"
    assert "1 of 3 diverged" in tables.runs_of(results)


def test_a_difference_is_clear_where_the_seeds_agree():
    steps = list(ABLATION)[1:]
    results = {
        **kept(steps[0], [3.0, 3.2, 2.8]),
        **kept(steps[1], [2.5, 2.7, 2.31]),
        **kept(steps[2], [2.9, 2.4, 2.3]),
        **kept(steps[3], [None, 2.0, 2.0]),
        **kept(steps[4], [3.0, 3.1, 3.0]),
        **kept(steps[5], [3.2, 3.3, 3.2]),
    }
    verdicts = [step.verdict for step in analysis.differences(analysis.outcomes(results), "lstm")]
    expected = ["as published", "within the noise", "diverges", "as published: does not diverge any more"]
    assert verdicts == [*expected, "**the other way**"]


def test_every_optimizer_is_compared_with_its_own_dense_run():
    assert {analysis.baseline(name) for name in OPTIMIZERS} == {"Nesterov, dense", "AdamW, dense"}
    assert analysis.baseline("dgc, values=4bit") == "dense"


def test_runs_have_names_of_their_own_and_one_dense_run_each():
    plan = {run for study in runs.STUDIES.values() for run in study([0, 1])}
    assert len({run.key for run in plan}) == len(plan)
    for run in plan:
        assert run.variant in VARIANTS
        assert dataclasses.replace(run, variant=analysis.baseline(run.variant)) in plan
        assert run.batch * run.workers == 4 * TASKS[run.task].settings.batch


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("task", TASKS)
def test_every_variant_has_a_valid_compression(task, name):
    settings = TASKS[task].settings
    config = VARIANTS[name].config(settings, length=4.0)
    if config is None:
        assert "dense" in name
        return
    if "density" in name:
        assert config.density != settings.density or f"density {100 * settings.density:g}%" in name
    if config.warmup is not None:
        stages = config.warmup.stages(config.density)
        assert config.warmup.steps == pytest.approx(4 * settings.stage * stages * VARIANTS[name].warmup, abs=1)
    assert (config.clip_norm is not None) <= (settings.clip_norm is not None)


def test_the_remainder_of_top_k_is_what_sorting_says():
    x = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    squares = np.sort(x.astype(np.float64) ** 2)
    count, left = selection.selected(x, 50, "exact")
    assert count == 50
    assert left == pytest.approx(squares[:-50].sum() / squares.sum(), rel=1e-6)
    assert left < (1 - 50 / 5000) ** 2
    assert selection.selected(x, 50, "random")[1] > (1 - 50 / 5000) ** 2
