"""`dgcrun --report` of real jobs: what a page says of one with a slow rank and a step that is skipped."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dgc_horovod.tools.report import figures
from dgc_horovod.tools.report.figures import Run, read
from dgc_horovod.tools.report.page import LOOK, tiles
from tests.helpers.jobs import Finished, run
from tests.helpers.launchers import built_controllers
from tests.helpers.uneven_job import NAN_RANK, SLOW_RANK

WORKERS = 3
DGC = ["--dgc", "--density", "0.01"]
UNEVEN = [sys.executable, "-m", "tests.helpers.uneven_job", "--steps", "60", "--nan-at", "20"]
KERAS = [sys.executable, "examples/unmodified_keras.py", "--epochs", "2"]


def job(page: Path, *words: str, workers: int = WORKERS) -> Finished:
    if "gloo" not in built_controllers():
        pytest.skip("this Horovod was built without gloo")
    return run(["dgcrun", "--gloo", "-np", str(workers), "--report", str(page), *words], 280)


def last_run(page: Path) -> Run:
    return read(str(page.with_suffix(".jsonl")))[-1]


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """The page of a job with one slow rank and one gradient that is not finite, and what `dgcrun` printed."""
    page = tmp_path_factory.mktemp("report") / "page.html"
    finished = job(page, *DGC, "--dgc-warmup-steps", "20", *UNEVEN)
    assert finished.code == 0, finished.output
    return page, finished.output


def test_the_slow_rank_and_the_skipped_step_are_seen_first(uneven):
    page, output = uneven
    assert f"the report is {page}" in output and ": 60 steps, skipped 1 of 60 (applied on no rank); " in output
    found = {tile.question: tile for tile in tiles(last_run(page))}
    assert found["Slowest rank"].state == LOOK and f"rank {SLOW_RANK} " in found["Slowest rank"].answer
    assert found["Skipped steps"].state == LOOK and found["Skipped steps"].answer.startswith("1 of 60")
    assert f"step 20: a gradient was not finite on rank {NAN_RANK}," in found["Skipped steps"].more
    text = page.read_text()
    for tile in found.values():
        assert tile.answer in text, tile


def test_every_rank_has_told_of_all_its_steps(uneven):
    """Ranks end at the same time: rank 0 waits a moment for the last words of the others."""
    found = last_run(uneven[0]).ranks
    assert [rank["rank"] for rank in found] == list(range(WORKERS))
    assert [rank["timed_steps"] for rank in found] == [59] * WORKERS
    assert all(rank["residual_ratio"] > 0 and rank["host"] for rank in found)
    by_compute = sorted(found, key=lambda rank: figures.times(rank).compute)
    assert by_compute[-1]["rank"] == SLOW_RANK, "and it is the one that computes longest"


def test_the_page_knows_what_ran_and_where_each_setting_came_from(uneven):
    run = last_run(uneven[0])
    assert run.description["command"].endswith("tests.helpers.uneven_job --steps 60 --nan-at 20")
    sources = {key: source for key, _, source in run.description["settings"]}
    assert sources["density"] == "flag --density" and sources["metrics_file"] == "flag --report"
    assert sources["seed"] == "default" and {"torch", "horovod", "python"} <= run.description["versions"].keys()


def test_records_have_what_the_page_shows(uneven):
    last = last_run(uneven[0]).last
    assert last["final"] and last["replica_checks"] >= 1 and last["replica_mismatches"] == 0
    assert last["residual_norm"] > 0 and last["staleness_99"] >= last["staleness_mean"] > 0
    json.dumps(last, allow_nan=False)


@pytest.mark.slow
def test_a_keras_job(tmp_path):
    finished = job(tmp_path / "page.html", *DGC, *KERAS, workers=2)
    assert finished.code == 0, finished.output
    run = last_run(tmp_path / "page.html")
    assert len(run.ranks) == 2 and {rank["timed_steps"] for rank in run.ranks} == {run.last["steps"] - 1}
    assert run.last["residual_norm"] > 0 and 0 <= run.last["overlap"] <= 1
    text = (tmp_path / "page.html").read_text()
    assert "unmodified_keras.py" in text and "<h2>Ranks</h2>" in text


def test_a_job_that_fails_has_a_report_too(tmp_path):
    code = "import horovod.torch as hvd; hvd.init(); raise SystemExit(7)"
    finished = job(tmp_path / "page.html", "--dgc", sys.executable, "-c", code, workers=1)
    assert finished.code and "the report is" in finished.output, finished.output
