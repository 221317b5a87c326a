"""The page of a run: what it says of known records, and that nothing in them can become markup."""

from __future__ import annotations

import base64
import itertools
import json
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dgc_horovod import envvars
from dgc_horovod.advice import MOST_LOST, Straggler, on_ranks
from dgc_horovod.errors import ConfigError
from dgc_horovod.launch.settings import Job, resolve
from dgc_horovod.tools.report import command, figures, plots
from dgc_horovod.tools.report.figures import Run, read
from dgc_horovod.tools.report.page import GOOD, LOOK, page, tiles
from tests.helpers.records import STEPS_A_RECORD, rank, records, write
from tests.helpers.sealed import JUNK, places, replaced

SLOW = (0.06, 0.06, 0.01, 0.06)  # rank 2 waits least
HOSTILE = "<script>alert('x')</script><img src=https://example.org/x onerror=alert(1)>\"'&$\\alpha$\x00\ud800"

DRAWN = "data:image/svg+xml;base64,"

WITHOUT_MATPLOTLIB = (
    "import sys; sys.modules['matplotlib'] = None; from dgc_horovod.tools.report.command import main; sys.exit(main())"
)


def reported(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "dgc_horovod.report", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **more)


def without_matplotlib(path: str, out: Path, **more: Any) -> str:
    """The page that it writes then."""
    subprocess.run([sys.executable, "-c", WITHOUT_MATPLOTLIB, path, "-o", str(out)], check=True, **more)
    return out.read_text(encoding="utf-8")


@pytest.fixture
def no_plots(monkeypatch):
    """They take a second each."""
    monkeypatch.setattr(plots, "_PLOTS", {})


class Seen(HTMLParser):
    """Every element, attribute and text of a page, as a browser would read it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def images(text: str) -> list[str]:
    """The SVG of every image of a page, which has no other kind."""
    found = [attributes["src"] or "" for tag, attributes in Seen(text).elements if tag == "img"]
    assert all(uri.startswith(DRAWN) for uri in found)
    return [base64.b64decode(uri.removeprefix(DRAWN), validate=True).decode() for uri in found]


def answers(run: Run) -> dict[str, tuple[str, str, str]]:
    return {tile.question: (tile.answer, tile.more, tile.state) for tile in tiles(run)}


def test_a_file_may_hold_several_runs_and_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, records(SLOW, 3), records(SLOW, 2), records(SLOW, 4)[:-1], records(SLOW, 5))
    with path.open("a") as file:
        file.write('{"steps": 3, "seco')
    runs = read(str(path))
    assert [len(run.records) for run in runs] == [3, 2, 3, 5]
    assert [run.ended for run in runs] == [True, True, False, True]
    path.write_text("# HELP dgc_steps steps\n")
    with pytest.raises(ConfigError, match="holds no record"):
        read(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read(str(tmp_path / "none"))


def test_a_file_of_jobs_that_ran_at_the_same_time(tmp_path):
    """Their records come in turns, and had been taken for those of one run."""
    jobs = {name: [{**record, "id": name} for record in records(SLOW, count)] for name, count in (("a", 4), ("b", 3))}
    old = records(SLOW, 2)
    mixed = [*old, *itertools.chain(*itertools.zip_longest(*jobs.values(), fillvalue={}))]
    runs = read(write(tmp_path / "m.jsonl", mixed, jobs["a"]))
    assert [run.records for run in runs] == [old, jobs["a"], jobs["b"], jobs["a"]]


def test_the_straggler_is_the_rank_that_waits_least():
    run = Run(records(SLOW))
    slowest = run.straggler
    assert slowest.figures["rank"] == 2 and slowest.lost == pytest.approx(0.05) and slowest.share == pytest.approx(0.5)
    assert answers(run)["Slowest rank"][0] == "rank 2 (host2) is slow" and answers(run)["Slowest rank"][2] == LOOK
    even = Run(records((0.05, 0.051, 0.05, 0.049)))
    assert answers(even)["Slowest rank"][2] == GOOD
    assert "Slowest rank" not in answers(Run(records((0.05,)))), "one rank cannot be compared"


@pytest.mark.parametrize("share", [0.9 * MOST_LOST, 1.1 * MOST_LOST])
def test_advice_on_ranks_is_given_beyond_its_limit_alone(share):
    ranks = [rank(n, "h", 100, 0.05 + (share * 0.1 if n else 0)) for n in range(4)]
    assert bool(on_ranks(ranks)) == (share > MOST_LOST)
    assert not on_ranks([rank(n, "h", 10, 0.09 if n else 0.0) for n in range(4)]), "too few steps"
    assert Straggler(ranks).share == pytest.approx(share)


def test_the_times_between_records_add_up_to_those_of_the_run():
    run = Run(records(SLOW))
    for told, points in zip(run.ranks, figures.series(run).values(), strict=True):
        ends = [0.0, *(step - 1 for step, _ in points)]
        lengths = [now - before for before, now in itertools.pairwise(ends)]
        assert sum(times.wait * steps for steps, (_, times) in zip(lengths, points, strict=True)) == pytest.approx(
            told["wait_seconds"]
        )
        whole = figures.times(told)
        assert whole.compute + whole.compress + whole.decode + whole.wait == pytest.approx(whole.step)


def test_a_skipped_step_and_a_replica_that_differed_are_seen_first():
    last = {"skipped": 1, "skips": [[100, "rank 1, among 'w'"]], "replica_mismatches": 1, "advice": ["rank 2 is slow"]}
    run = Run(records(SLOW, **last))
    found = answers(run)
    assert (
        found["Skipped steps"][0].startswith("1 of 250")
        and "step 100: a gradient was not finite on rank 1" in found["Skipped steps"][1]
    )
    assert found["Replicas"][2] == found["Advice"][2] == LOOK and "rank 2 is slow" in found["Advice"][1]
    assert any("skipped: step 100" in drawn for drawn in images(page(run)))
    assert found["The run"][0].endswith(", skipped 1 of them") and found["The run"][2] == LOOK


def test_what_strangers_wrote_is_text():
    """Hostnames, commands and settings come from ranks and command lines: nothing of them may become an element."""
    given = records(SLOW, host=HOSTILE, advice=[HOSTILE], skipped=1, skips=[[3, HOSTILE]], method=HOSTILE)
    given[0]["run"] = {
        "command": HOSTILE, "hosts": HOSTILE, "versions": {HOSTILE: HOSTILE}, "settings": [[HOSTILE] * 3],
        "started": HOSTILE, "folder": HOSTILE,
    }  # fmt: skip
    text = page(Run(json.loads(json.dumps(given))))
    seen = Seen(text)
    assert {"script", "iframe", "link", "object"}.isdisjoint(tag for tag, _ in seen.elements)
    for tag, attributes in seen.elements:
        refused = ("action",) if tag == "img" else ("src", "action")
        assert not any(name.startswith("on") or name in refused for name in attributes)
        assert (attributes.get("href") or "#").startswith("#"), "nothing is loaded from anywhere"
    assert images(text) and not any("script" in drawn or "onerror" in drawn for drawn in images(text))
    assert seen.text.count("<script>alert('x')</script>") > 10
    assert "default-src 'none'" in text and "https://example.org" not in text.replace(
        "&lt;img src=https://example.org", ""
    )


@pytest.mark.parametrize("broken", [
    [{"steps": 1}], [{"steps": "x", "seconds": None, "ranks": 3, "buckets": {}, "skips": [1], "advice": 2, "run": []}],
    [{"steps": 1, "ranks": [1, {}, {"rank": float("nan"), "wait_seconds": "a"}], "buckets": [1], "run": {"versions": 1,
      "settings": [1]}}],
])  # fmt: skip
def test_a_record_of_another_kind_makes_a_shorter_page(broken):
    assert "<h1>" in page(Run(broken))


def test_junk_in_any_field_of_a_file_is_a_page_or_our_error(tmp_path, no_plots):
    """Every field of a record in turn, with what JSON can hold; and lines that are none."""
    given = json.loads(json.dumps(records(SLOW)[-1:]))
    given[0]["run"] = {"command": "a", "hosts": "b", "versions": {"a": "b"}, "settings": [["a", "b", "c"]], "id": "c"}
    kinds = {tuple(0 if isinstance(key, int) else key for key in path): path for path in places(given)}
    file = tmp_path / "m.jsonl"
    for path in kinds.values():
        for junk in (*JUNK, json.loads("[" * 400 + "]" * 400)):
            file.write_text("\n".join(map(json.dumps, replaced(given, path, junk))))
            try:
                assert all("<h1>" in page(run) for run in read(str(file)))
            except ConfigError as error:
                assert str(file) in str(error)
    deep = b"[" * 10**5
    for line in (b"\xff\xfe", b"\0", deep, b'{"steps": ' + deep, b'{"steps":' + b"9" * 5000 + b"}", b"1", b"null"):
        file.write_bytes(line)
        with pytest.raises(ConfigError, match="holds no record"):
            read(str(file))
    for name in ("a\0b", "\ud800"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read(name)


@pytest.mark.parametrize("odd", [10**400, math.nan, "10", [10]], ids=lambda odd: str(odd)[:5])
def test_a_figure_that_is_no_number_is_left_out(odd, no_plots):
    given = records(SLOW, residual_ratio=odd)
    given[-1]["ranks"][0]["residual_ratio"] = odd
    cells = re.findall("<td>([^<]*)</td>", page(Run(given)))
    assert cells.count("-") == 2 and "nan" not in cells


def automatic(mode: str, stock: int, **seconds: float) -> Run:
    """A run of compression auto, without comparisons of weights."""
    return Run(records(SLOW, mode=mode, stock_steps=stock, trial_seconds=seconds, replica_checks=0))


@pytest.mark.parametrize(
    ("run", "answer", "more"),
    [
        (
            automatic("compressed", 20, dense=0.2, compressed=0.1),
            "compressed",
            "compressed 100",
        ),
        (automatic("dense", 250), "uncompressed", "No times were compared. 250 of 250 steps were uncompressed."),
    ],
)
def test_what_an_automatic_job_chose_is_said(run, answer, more):
    assert answers(run)["Exchange"][0] == answer and more in answers(run)["Exchange"][1]
    assert "Exchange" not in answers(Run(records(SLOW))), "a job that was told what to take chooses nothing"


def test_stock_steps_are_not_taken_for_compressed_ones(no_plots):
    told, short, half = Run(records(SLOW)), automatic("compressed", 20), automatic("compressed", 125)
    assert "Density over the run, warm-up included: 1%" in page(told)
    assert "Density of the 230 steps that were compressed, warm-up included: 1%" in page(short)
    assert "uncompressed ones compare no weights" in answers(half)["Replicas"][1]
    assert answers(told)["Skipped steps"][1] != answers(half)["Skipped steps"][1], "uncompressed steps look at none"


def job_with(metrics: str) -> Job:
    return resolve({}, {"DGC_COMPRESSION": "dgc", "DGC_METRICS_FILE": metrics}, [])


def test_whatever_goes_wrong_with_a_page_is_said_and_raises_nothing(tmp_path, monkeypatch, capsys):
    """A traceback would take the place of the job's exit code."""
    given = records(SLOW)
    given[0]["run"] = {"id": "this"}

    def page_of(run):
        raise RuntimeError("no font")

    monkeypatch.setattr(command, "page", page_of)
    metrics, out = write(tmp_path / "m.jsonl", given), tmp_path / "page.html"
    command.write_page(job_with(metrics), str(out), {"id": "this"})
    assert "dgcrun: no report: RuntimeError: no font." in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize("before", [3, 1], ids=["it had gone on", "it had only begun"])
def test_the_page_is_of_the_last_process_that_was_rank_0(before, tmp_path, no_plots, capsys):
    """A new one appends a run with the id of the same job, and counts from nothing."""
    runs = [records(SLOW, 4), records(SLOW, 5)[:before], records(SLOW, 6)]
    for run, name in zip(runs, ("other", "this", "this"), strict=True):
        run[0]["run"] = {"id": name}
    metrics, out = write(tmp_path / "m.jsonl", *runs), tmp_path / "page.html"
    command.write_page(job_with(metrics), str(out), {"id": "this"})
    assert "250 steps in 50 s" in out.read_text()
    assert f"and the {STEPS_A_RECORD * (before - 1)} steps before are not in it" in capsys.readouterr().err


def test_without_matplotlib_the_tables_are_there(tmp_path):
    text = without_matplotlib(write(tmp_path / "m.jsonl", records(SLOW)), tmp_path / "page.html")
    assert "<img" not in text and "pip install matplotlib" in text and "rank 2 (host2) is slow" in text
    assert text.count("<table>") == 5


@pytest.mark.parametrize(
    ("page", "metrics"),
    [("a/report.html", "report.jsonl"), ("x.htm", "x.jsonl"), ("lr0.1", "lr0.1.jsonl"), ("lr0.2", "lr0.2.jsonl")],
)
def test_every_page_has_a_metrics_file_of_its_own(page, metrics, tmp_path):
    """--report lr0.1 and --report lr0.2 had shared lr0.jsonl."""
    path = tmp_path / page
    path.parent.mkdir(exist_ok=True)
    job = command.with_metrics(resolve({"DGC_COMPRESSION": "dgc"}, {}), str(path))
    assert job.get(envvars.METRICS_FILE) == str(path.with_name(metrics))


def test_a_page_that_cannot_be_written_is_refused_before_the_start(tmp_path, monkeypatch):
    """It had taken the place of the metrics file, or been missed after the job."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.html").symlink_to("m")
    for path, metrics, said in (
        ("m", "m", "would overwrite"), (f"{tmp_path}/m", "./m", "would overwrite"),
        ("link.html", "m", "would overwrite"),
        ("x.jsonl", "none", "would overwrite"), (".", "none", "is a folder"), ("/", "none", "is a folder"),
        ("no/x.html", "none", "no such folder"), ("x" * 999, "none", "too long"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"the page .*{said}"):
            command.with_metrics(job_with(metrics), path)
    for variable, source in (({}, r"flag --dgc-metrics-file"), ({"DGC_METRICS_FILE": "m.prom"}, "environment")):
        flags = {"DGC_COMPRESSION": "dgc", **({} if variable else {"DGC_METRICS_FILE": "m.prom"})}
        with pytest.raises(ConfigError, match=rf"'m.prom' \({source}.*\); give it another name, or none"):
            command.with_metrics(resolve(flags, variable), "x.html")


def test_a_page_is_in_the_encoding_that_it_names(tmp_path):
    """Whatever the machine's own is."""
    path = write(tmp_path / "m.jsonl", records(SLOW, host="höst"))
    latin = {**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    assert "höst2" in without_matplotlib(path, tmp_path / "page.html", env=latin)


def test_the_command_says_what_is_wrong(tmp_path):
    finished = reported(str(tmp_path / "none"))
    assert finished.returncode == 2 and "cannot be read" in finished.stderr and "Traceback" not in finished.stderr
    path = write(tmp_path / "m.jsonl", records(SLOW), records(SLOW))
    before = (tmp_path / "m.jsonl").read_bytes()
    refused = reported(path, "-o", path)
    assert refused.returncode == 2 and "would overwrite" in refused.stderr
    assert (tmp_path / "m.jsonl").read_bytes() == before
    done = reported(path, "-o", f"{tmp_path}/p.html")
    assert done.returncode == 0 and f"{5 * STEPS_A_RECORD} steps; 1 earlier ones" in done.stdout


def test_the_command_prints_numbers_of_a_foreign_file_only(tmp_path):
    """What stood in the place of the number of steps had ended it with a traceback."""
    path = write(tmp_path / "m.jsonl", [{**record, "steps": "\ud800"} for record in records(SLOW)])
    done = reported(path, "-o", f"{tmp_path}/p.html")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path}/p.html: 0 steps\n", "")
