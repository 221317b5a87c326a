"""The arithmetic of the learning-quality study: what is compared with what, and what counts as a difference."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from benchmarks import report
from benchmarks.quality import page, runs, tables
from benchmarks.quality.__main__ import COMMAND
from benchmarks.quality.tasks import ALL_TASKS, TASKS
from benchmarks.quality.training import Run, is_hopeless, train
from benchmarks.quality.variants import ABLATION, AUTOMATIC, OPTIMIZERS, VARIANTS
from dgc_horovod.planning.trial import SETTLING, TIMED
from tests.helpers.quality import in_processes, selected


def kept(variant: str, losses: list[float | None], task: str = "lstm", first: int = 0, **more):
    """What the file keeps of runs of several seeds; None diverged."""
    found = {}
    for seed, loss in enumerate(losses, start=first):
        run = Run(task, variant, seed=seed, **more)
        accuracy = None if loss is None else 1 - loss / 10
        curve = [] if loss is None else [[run.steps, loss, accuracy]]
        found[run.key] = {
            "run": dataclasses.asdict(run), "curve": curve, "diverged": loss is None, "loss": loss, "accuracy": accuracy
        }  # fmt: skip
        if variant != "dense":
            found[run.key]["traffic"] = 0.01
    return found


def test_gaps_are_to_the_dense_run_of_the_same_seed():
    results = {**kept("dense", [1.0, 2.0, 3.0]), **kept("dgc", [1.1, 2.2, None])}
    (row,) = tables.rows_of(tables.outcomes(results), lambda run: run.variant == "dgc")
    assert row.loss_gap == pytest.approx([0.1, 0.2, math.inf])
    assert row.accuracy_gap[:2] == pytest.approx([-1.0, -2.0])
    assert row.diverged == 1
    assert report.spread(row.loss, ".2f") == "1 of 3 diverged"
    larger = {**kept("AdamW, dense", [1.5], "gpt"), **kept("AdamW, dgc", [1.75], "gpt")}
    text = tables.every_run({**results, **larger})
    assert "1 of 3 diverged" in text
    assert "GPT of 5.1 M, N = 4" in text and "+0.250" in text


def test_bytes_are_those_of_the_runs_that_ended():
    results = kept("dgc", [1.0, None])
    results["lstm, dgc, N = 4, ×1, seed 1"]["traffic"] = 0.5
    (row,) = tables.rows_of(tables.outcomes(results), lambda run: True)
    assert row.traffic == 0.01
    assert tables.every_run(kept("dgc", [None])).endswith("| 1 of 1 diverged | 1 of 1 diverged |  |  |  |")


def test_all_columns_of_local_steps_are_of_the_seeds_that_every_run_has():
    results = {
        **kept("AdamW, dense", [1.0, 1.1, 1.2], "gpt"),
        **kept("AdamW, averaged every 15", [1.3, 1.5, 1.6], "gpt"),
        **kept("AdamW, local, 15 steps, 6%", [1.5, 1.7], "gpt", first=1),
    }
    cells = page.local_steps(tables.outcomes(results)).splitlines()[-1].split(" | ")
    averaged, compressed, added = (float(cell.split(" ± ")[0]) for cell in cells[1:4])
    assert (averaged, compressed, added) == pytest.approx((0.4, 0.45, 0.05))
    assert cells[4] == "2"


def test_compressed_adamw_is_compared_with_the_better_of_both_momenta():
    place = {"task": "transformer", "first": runs.ADAM_SEED, "length": 4.0}
    results = {
        **kept("AdamW, dense", [1.0, 1.2], **place),
        **kept("AdamW, dense, b1 0.5", [1.1, 1.0], **place),
        **kept("AdamW, dgc", [1.3, 1.3], **place),
        **kept("AdamW, dense", [0.5], task="transformer", length=4.0),  # of another study
    }
    found = tables.outcomes(results)
    run = Run("transformer", "AdamW, dgc", length=4.0)
    assert page.to_dense(found, run) == pytest.approx([0.3, 0.1])
    assert page.to_dense(found, run, runs.FIRST_DENSE) == pytest.approx([0.3, 0.3])
    made = page.blocks([], found)
    cells = made["adam"].splitlines()[-1].split(" | ")
    assert cells == ["| N = 4, 1,600 steps", "1%", "+0.200 ± 0.141", "+0.300 ± 0.000", "1/100.0", "2 |"]


def test_a_study_of_adamw_without_a_run_makes_pages_all_the_same():
    assert page.blocks([], [])["adam"] == page.NOTHING


def test_a_dense_run_of_another_momentum_and_a_compressed_one_have_settings_of_their_own():
    names = ("AdamW, dense", "AdamW, dense, b1 0.5", "AdamW, dense, b2 0.999", "AdamW, dgc", "AdamW, dgc, b2 0.999")
    assert len({runs.settings(Run("transformer", name)) for name in names}) == len(names)
    bare = VARIANTS["AdamW, dgc"].make_optimizer(torch.nn.Linear(1, 1), TASKS["transformer"].settings)
    assert bare.param_groups[0]["betas"] == (0.9, 0.99)


def second_moments(run):
    """What each rank knows of Adam's second moment, step by step."""
    known = []

    def watch(ranks, step, loss):
        known.append([exchange.second.packed() for exchange in ranks.exchanges])

    train(run, steps=10, points=0, watch=watch)
    return known


def test_simulated_ranks_know_the_same_of_adams_second_moment():
    (known,) = in_processes(second_moments, [Run("transformer", "AdamW, dgc", 2)])
    assert all(np.array_equal(first, other) for first, other in known)
    first, *_, last = (of_step[0] for of_step in known)
    assert first.any() and not np.array_equal(first, last)


def test_runs_of_other_settings_are_counted(tmp_path):
    file = tmp_path / "quality.json"
    found = kept("dgc", [1.0, 1.1])
    for each, name in zip(found.values(), (runs.settings(Run("lstm", "dgc")), "older"), strict=True):
        each["settings"] = name
    report.write_results(file, found)
    table = COMMAND.table(COMMAND.parser().parse_args(["--file", str(file)]))
    assert table.endswith("1 more runs are of other settings than today's: they are left out.")


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
    verdicts = [step.verdict for step in tables.differences(tables.outcomes(results), "lstm")]
    expected = ["as published", "within the noise", "diverges", "as published: does not diverge any more"]
    assert verdicts[:4] == expected
    assert verdicts[4:] == 2 * ["**the other way**"]  # the last one is from residual to masking


def test_every_optimizer_is_compared_with_its_own_dense_run():
    kinds = ("Nesterov", "AdamW", "RMSprop", "Adafactor", "Lion", "Muon")
    assert {tables.baseline(name) for name in OPTIMIZERS} == {f"{kind}, dense" for kind in kinds}
    assert tables.baseline("dgc, values=4bit") == "dense"


def test_runs_have_names_of_their_own_and_one_dense_run_each():
    plan = {run for study in runs.STUDIES.values() for run in study([0, 1])}
    assert len({run.key for run in plan}) == len(plan)
    for run in plan:
        assert run.variant in VARIANTS
        assert dataclasses.replace(run, variant=tables.baseline(run.variant), real=False) in plan
        assert run.batch * run.workers == max(4 * ALL_TASKS[run.task].settings.batch, run.workers)


@pytest.mark.parametrize("task", TASKS)
def test_every_variant_has_a_valid_compression(task):
    settings = TASKS[task].settings
    for name, variant in VARIANTS.items():
        config = variant.config(settings, 64)
        if config is None:
            assert "dense" in name or variant.power_sgd
            continue
        if config.warmup is not None and not variant.falls:
            stages = config.warmup.stages(config.density)
            steps = SETTLING + TIMED if name in AUTOMATIC else settings.stage * stages * variant.warmup
            assert config.warmup.steps == pytest.approx(steps, abs=1), name
        warms = variant.warmup or (name in AUTOMATIC and not variant.dense_steps)
        assert (config.warmup is None) == (not warms or config.density >= 0.25), name
        assert (config.clip_norm is None) == (settings.clip_norm is None or variant.clips != "locally"), name


@pytest.mark.parametrize("numel", [5000, 4656])
def test_the_remainder_of_top_k_is_what_sorting_says(numel):
    density, x = 0.005, np.random.default_rng(0).standard_normal(numel).astype(np.float32)
    squares, k = np.sort(x.astype(np.float64) ** 2), math.ceil(density * numel)
    count, left = selected(x, density, "exact")
    assert count == k
    assert left == pytest.approx(squares[:-k].sum() / squares.sum(), rel=1e-6)
    assert left < (1 - k / numel) ** 2


def test_a_study_goes_on_where_it_stopped_and_repeats_what_has_changed(tmp_path, monkeypatch):
    file, done = tmp_path / "quality.json", []

    class Inline:
        """A pool of this process."""

        def submit(self, make):
            future = Future()
            future.set_result(make())
            return future

    def trained(run):
        done.append(run.seed)
        return {"curve": [[1, 1.0, 0.5]], "diverged": False, "loss": 1.0, "accuracy": 0.5}

    monkeypatch.setattr(report, "pool", lambda processes: contextlib.nullcontext(Inline()))
    monkeypatch.setattr(runs, "train", trained)
    plan = [Run("lstm", "dgc", seed=seed) for seed in range(4)]
    runs.complete(plan[:2], file, 1)
    runs.complete([*plan, plan[0]], file, 1)
    assert done == [0, 1, 2, 3]
    assert set(runs.load(file)) == {run.key for run in plan}
    monkeypatch.setitem(VARIANTS, "dgc", dataclasses.replace(VARIANTS["dgc"], warmup=0.5))
    assert runs.load(file) == {}, "results of another warm-up"
    runs.complete(plan[:1], file, 1)
    assert done == [0, 1, 2, 3, 0]
    monkeypatch.setattr(report, "environment", lambda: {"torch": "another"})
    with pytest.raises(report.OtherMachine):
        runs.complete(plan, file, 1)


def test_what_the_longest_runs_lose_has_the_right_sign():
    results = {
        **kept("dense", [1.0, 1.2], length=10.0),
        **kept("dgc", [1.03, 1.23], length=10.0),
        **kept("topk (TopK-SGD)", [1.5, 1.7], length=10.0),
    }
    lines = tables.blocks(tables.outcomes(results))["longer"].splitlines()
    by_variant = {line.split(" | ")[1]: line.split(" | ")[2:] for line in lines[2:]}
    assert by_variant["dense"][:3] == ["", "", "1.100 ± 0.141"]
    assert by_variant["dgc"][:4] == ["", "", "+0.030 ± 0.000", "0.02: MISSED"]
    assert by_variant["topk (TopK-SGD)"][3] == ""
    better = {**kept("dense", [1.0], length=10.0), **kept("dgc", [0.9], length=10.0)}
    assert "0.02: met" in tables.blocks(tables.outcomes(better))["longer"]
    assert "-0.100" in tables.by_length(tables.outcomes(better))


def test_what_is_kept_is_of_todays_settings():
    kept = runs.load()
    left = [run.key for run in runs.STUDIES["ablation"]([0, 1, 2]) if run.key not in kept]
    assert not left, "a setting has another default, or a variant other settings"


@pytest.mark.parametrize(
    ("loss", "accuracy", "hopeless"), [(2.31, 0.84, False), (2.31, 0.3, True), (2.29, 0.1, False), (7.9, 0.27, True)]
)
def test_a_model_that_is_right_and_overconfident_has_not_diverged(loss, accuracy, hopeless):
    assert is_hopeless(loss, accuracy, classes=10) == hopeless
