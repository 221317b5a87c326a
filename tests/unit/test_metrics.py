"""What a bucket's counters say, and the forms in which they are written."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dgc_horovod import at_end, recording, stats
from dgc_horovod.config import DGCConfig
from dgc_horovod.core.bucketing import TensorSpec
from dgc_horovod.core.meters import Diagnostics
from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.errors import ConfigError
from dgc_horovod.kernels.contract import Accumulation, ErrorFeedback, MomentumCorrection
from dgc_horovod.launch.settings import resolve
from dgc_horovod.launch.summary import Outcome
from dgc_horovod.recording import RANKS_KEPT, Recording, bounded
from dgc_horovod.stats import PROCESS, ExchangeStats, bucket_stats
from tests.helpers.data import BACKENDS, as_array
from tests.helpers.engines import make_exchange

STATS = {
    "steps": 3, "method": "dgc", "bytes_sent": 100.5, "buckets": [{"age": 2, "threshold": 0.5}, {"age": 4}],
    "ranks": [{"rank": 7, "host": "a", "wait_seconds": 1.5}],
}  # fmt: skip


MOMENTUM = MomentumCorrection(0.9, False)


def exchange_of(kernels, numel: int, density: float, rank: int = 0, workers: int = 1) -> OptimizerExchange:
    config = DGCConfig(density=density, min_numel=1, compress_1d=True, values="fp32")
    return make_exchange([TensorSpec("w", (numel,))], config, kernels, rank, workers)


def sent_by(exchange: OptimizerExchange, gradient: np.ndarray, accumulation: Accumulation = MOMENTUM, clip=1.0):
    """The message of a rank, and the elements in it."""
    (engine,) = exchange.engines
    engine.add_gradient(0, as_array(engine.kernels, gradient), accumulation)
    return exchange.compress(engine, clip=clip), engine.sent


def end_step(exchange: OptimizerExchange, received: np.ndarray, applied: bool | None = True) -> None:
    """What came back of the one bucket makes a finite update; None: the step is not finished."""
    (engine,) = exchange.engines
    engine.outputs.put(0, engine.kernels.new(engine.bucket.numel))
    assert exchange.receive(engine, received) is None
    exchange.aggregate(engine)
    assert exchange.settle(engine)
    if applied is not None:
        exchange.close(applied)


@pytest.mark.parametrize("numel", [1, 100, 4096, 4097, 50_000])
def test_a_bucket_tells_what_its_last_step_was_like(kernels, numel):
    exchange, rng = exchange_of(kernels, numel, 0.01), np.random.default_rng(0)
    (engine,) = exchange.engines
    last_sent, steps = np.zeros(numel, int), 12
    for step in range(steps):
        message, sent = sent_by(exchange, rng.standard_normal(numel).astype(np.float32))
        last_sent[sent.positions] = step + 1
        least = float(np.abs(sent.values).min())
        end_step(exchange, message.payload)
    (found,) = exchange.meters.bucket_stats()
    v = kernels.to_host(engine.state.v)
    assert found["elements"] == numel and found["bytes"] == message.payload.nbytes
    assert found["density"] == message.count / numel
    assert found["residual_norm"] == pytest.approx(float(np.linalg.norm(v.astype(np.float64))))
    assert found["threshold"] in (0.0, pytest.approx(least))
    oldest = max((steps - last_sent[i] for i in np.flatnonzero(v)), default=0)
    assert found["age"] <= oldest and (numel > 4096 or found["age"] == oldest)
    assert found["age"] >= 0.9 * oldest, "thousands of samples miss the oldest by little"
    assert all(found[f"{part}_seconds"] > 0 for part in ("compress", "exchange", "decode"))


def test_a_step_that_was_not_finished_counts_in_what_was_offered_too():
    """It had counted in what was sent alone, and the summary said "density 2 on average" after one that raised."""
    exchange = exchange_of(BACKENDS[0], 100, 1.0)
    for applied in (True, None):
        message, _ = sent_by(exchange, np.ones(100, np.float32))
        end_step(exchange, message.payload, applied)
    stats = exchange.counts.stats()
    assert (stats["steps"], stats["selected"], stats["elements"]) == (1, 200, 200)


def test_a_step_that_is_looked_at_has_norms_and_overlap_of_what_was_sent(kernels):
    workers, numel, density, rng = 4, 20_000, 0.01, np.random.default_rng(0)
    ranks = [exchange_of(kernels, numel, density, rank, workers) for rank in range(workers)]
    common = rng.standard_normal(numel)  # without which the ranks' selections would hardly meet
    gradients = [(common + rng.standard_normal(numel)).astype(np.float32) for _ in ranks]
    messages, chosen = [], []
    for exchange, gradient in zip(ranks, gradients, strict=True):
        message, sent = sent_by(exchange, gradient, clip=0.5)
        messages.append(message.payload.copy())
        chosen.append(set(sent.positions.tolist()))
    shared = [len(a & b) / len(a) for i, a in enumerate(chosen) for j, b in enumerate(chosen) if i != j]
    for exchange, gradient in zip(ranks, gradients, strict=True):
        end_step(exchange, np.concatenate(messages))
        figures, v = exchange.counts.figures, kernels.to_host(exchange.engines[0].state.v)
        assert figures["gradient_norm"] == pytest.approx(0.5 * float(np.linalg.norm(gradient.astype(np.float64))))
        assert figures["residual_norm"] == pytest.approx(float(np.linalg.norm(v.astype(np.float64))))
        assert figures["residual_ratio"] == pytest.approx(figures["residual_norm"] / figures["gradient_norm"])
        assert figures["overlap"] == pytest.approx(np.mean(shared)) and 0.05 < figures["overlap"] < 0.95
        assert figures["staleness_mean"] == figures["staleness_99"] == 1, "since before the first step"


def test_steps_are_looked_at_rarely_and_a_skipped_one_leaves_no_figures():
    exchange, reads = exchange_of(BACKENDS[0], 1000, 0.1), 0
    (engine,) = exchange.engines
    plain = engine.gradients.squared_norm

    def counted():
        nonlocal reads
        reads += 1
        return plain()

    engine.gradients.squared_norm = counted
    for finite, seconds in ((False, 0), (True, 3600), (True, None)):
        if seconds is not None:
            exchange.meters.diagnostics = Diagnostics(seconds)
        message, _ = sent_by(exchange, np.ones(1000, np.float32))
        end_step(exchange, message.payload, applied=finite)
        assert bool(exchange.counts.figures) == finite
    assert reads == 2, "of three steps the third came too early"
    assert exchange.counts.stats()["skipped"] == 1 and exchange.counts.skips == [(0, "some rank")]


def test_staleness_is_the_steps_between_two_sendings():
    """Of gradients that come in turns every element is sent once in ten steps."""
    numel, turns = 1000, 10
    exchange = exchange_of(BACKENDS[0], numel, 1 / turns)
    (engine,) = exchange.engines
    for step in range(3 * turns):
        gradient = np.zeros(numel, np.float32)
        gradient[step % turns :: turns] = 1
        message, _ = sent_by(exchange, gradient, ErrorFeedback())
        end_step(exchange, message.payload)
    waits = exchange.meters.of[engine].waits
    assert set(waits[numel:].tolist()) == {turns} and waits.size == 3 * numel


def test_counts_outlive_their_exchange_and_buckets_do_not():
    exchange = exchange_of(BACKENDS[0], 100, 0.1)
    tallies = [exchange.counts]
    assert exchange.counts in PROCESS.exchanges and len(bucket_stats(tallies)) == 1
    del exchange
    assert bucket_stats(tallies) == [] and tallies[0].stats()["steps"] == 0


@pytest.fixture
def counts(monkeypatch) -> ExchangeStats:
    """Those of the only exchange of this process."""
    counts = ExchangeStats(2, 100)
    for name, value in {"exchanges": [counts], "replica_checks": 0, "replica_mismatches": 0}.items():
        monkeypatch.setattr(PROCESS, name, value)
    return counts


def outcome_of(**given: str) -> Outcome:
    return Outcome(resolve({}, {f"DGC_{name}": text for name, text in given.items()}, []))


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines(tmp_path):
    writer = recording.writer_for(str(tmp_path / "run.jsonl"))
    writer.write(STATS)
    writer.write({**STATS, "steps": 4, "time": 1.0})
    first, second = lines_of(tmp_path / "run.jsonl")
    assert first["buckets"] == STATS["buckets"] and first["time"] > 1e9
    assert (second["steps"], second["time"]) == (4, 1.0)


def test_a_script_that_changes_its_folder_has_one_metrics_file(tmp_path, monkeypatch):
    """A relative path had gone with it, and the report missed the rest."""
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    writer = recording.writer_for("run.jsonl")
    writer.write(STATS)
    monkeypatch.chdir("other")
    writer.write(STATS)
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 2 and not list(Path().iterdir())


def test_a_line_after_one_that_was_cut_off_stands_by_itself(tmp_path):
    """It had been lost with the rest of that one, and the job's report with it."""
    path = tmp_path / "run.jsonl"
    path.write_text('{"steps": 3, "seco')
    for _ in range(2):
        recording.writer_for(str(path)).write(STATS)
    cut, *whole = path.read_text().splitlines()
    assert cut == '{"steps": 3, "seco' and [json.loads(line)["steps"] for line in whole] == [3, 3]


def test_every_record_names_its_run(tmp_path):
    """Two jobs may write to one file."""
    for run in ({"id": "this", "command": "x"}, {}, {}):
        Recording(str(tmp_path / "m.jsonl"), "dgc", run, list).end()
    found = [record["id"] for record in lines_of(tmp_path / "m.jsonl")]
    assert found[:2] == ["this", "this"] and found[2] == found[3] != found[4] == found[5]


def test_a_week_of_json_lines_is_bounded(tmp_path):
    writer, path = recording.writer_for(str(tmp_path / "run.jsonl")), tmp_path / "run.jsonl"
    for seconds in range(0, 7 * 86_400, 10):
        writer.write({"seconds": seconds, "final": False})
    writer.write({"seconds": seconds + 1, "final": True})
    found = lines_of(path)
    assert 2000 < len(found) < 3000 and found[-1]["final"]
    times = np.array([record["seconds"] for record in found])
    assert np.all(np.diff(times)[times[:-1] < 4000] == 10) and np.all(np.diff(times) <= times[1:] / 400 + 10)


def test_of_many_ranks_those_that_wait_least_and_most_are_kept():
    ranks = [{"rank": rank, "wait_seconds": float((37 * rank) % 1000)} for rank in range(1000)]
    kept = bounded(ranks)
    assert len(kept) == RANKS_KEPT and [each["rank"] for each in kept] == sorted(each["rank"] for each in kept)
    waits = sorted(each["wait_seconds"] for each in kept)
    assert waits == [*range(RANKS_KEPT // 2), *range(1000 - RANKS_KEPT // 2, 1000)]
    assert bounded(ranks[:RANKS_KEPT]) == ranks[:RANKS_KEPT]


def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    writer = recording.writer_for("mlflow:demo")
    writer.write(STATS)
    writer.write({**STATS, "steps": 4, "final": True})
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("demo").experiment_id])
    assert run.info.status == "FINISHED" and run.data.metrics["dgc/bucket1/age"] == 4
    assert [point.step for point in client.get_metric_history(run.info.run_id, "dgc/bytes_sent")] == [3, 4]


def test_prometheus(tmp_path):
    parser = pytest.importorskip("prometheus_client.parser")
    writer = recording.writer_for(str(tmp_path / "run.prom"))
    writer.write({**STATS, "steps": 1})
    writer.write(STATS)
    families = parser.text_string_to_metric_families((tmp_path / "run.prom").read_text())
    found = {(s.name, tuple(s.labels.values())): s.value for family in families for s in family.samples}
    assert found == {
        ("dgc_steps", ()): 3, ("dgc_bytes_sent", ()): 100.5, ("dgc_bucket_age", ("0",)): 2,
        ("dgc_bucket_age", ("1",)): 4, ("dgc_bucket_threshold", ("0",)): 0.5, ("dgc_rank_wait_seconds", ("7",)): 1.5,
    }  # fmt: skip
    assert len(list(tmp_path.iterdir())) == 1


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    writer = recording.writer_for(f"{tmp_path}/board/")
    writer.write({**STATS, "final": True})
    (file,) = (tmp_path / "board").iterdir()
    assert b"dgc/bucket1/age" in file.read_bytes()


@pytest.mark.parametrize(
    ("path", "module"), [("x.prom", "prometheus_client"), ("x/", "tensorboardX"), ("mlflow:x", "mlflow")]
)
def test_a_missing_extra_is_named(monkeypatch, path, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"needs {module}: pip install {module}"):
        recording.writer_for(path)


def test_the_records_of_an_automatic_job_say_what_it_chose(tmp_path, counts):

    def record_of(method: str) -> dict:
        path = tmp_path / f"{counts.steps}{method}.jsonl"
        Recording(str(path), method, {}, list).end()
        return lines_of(path)[-1]

    counts.end_step()
    begun = record_of("auto")
    assert (begun["mode"], begun["stock_steps"], begun["trial_seconds"]) == ("dense", 1, {})
    counts.mode, counts.trial_seconds, counts.offered = "dense", {"dense": 0.2}, 10
    counts.end_step()
    counts.mode = "compressed"
    counts.end_step()
    chosen = record_of("auto")
    assert (chosen["mode"], chosen["stock_steps"], chosen["trial_seconds"]) == ("compressed", 2, {"dense": 0.2})
    assert "mode" not in record_of("dgc") and "stock_steps" not in record_of("dgc")
    counts.mode = ""  # a script that compresses in its own way
    assert "mode" not in record_of("auto")


def test_the_summary_is_of_the_rank_that_is_the_first_in_the_end(tmp_path, monkeypatch, capsys):
    """Where rank 0 of an elastic job had left, there was none, nor any more metrics."""
    monkeypatch.setattr(PROCESS, "is_recorded", False)
    path = tmp_path / "metrics.jsonl"
    outcome = outcome_of(COMPRESSION="dgc", METRICS_FILE=str(path))
    outcome.begin(1, 2)
    assert not path.exists()
    outcome.begin(0, 1)
    outcome.begin(0, 1)
    assert len(path.read_text().splitlines()) == 1
    outcome.end()
    assert capsys.readouterr().err.count("dgc_horovod: ") == 1
    assert [record["final"] for record in lines_of(path)] == [False, True]


def test_the_summary_says_how_many_local_steps_were_not_exchanged(counts):
    """The ranks end with weights of their own then; and a run shorter than a round had "made no step"."""
    outcome = outcome_of(LOCAL_STEPS="15")
    counts.steps_alone = counts.pending = 10
    assert "10 local steps, fewer than local_steps" in outcome.line()
    counts.steps_alone, counts.pending = 9, 0
    counts.end_step()
    counts.traffic.add(sent=10, received=10)
    counts.offered = counts.selected = 100
    assert "not exchanged" not in outcome.line()
    counts.steps_alone, counts.pending = 10, 1
    assert "not exchanged: 1" in outcome.line() and "optimizer.exchange()" in outcome.line()
    assert stats.total(PROCESS.exchanges)["bytes_dense"] == 4 * 100 * 11


def test_the_summary_says_where_training_was_not_what_it_looks_like(counts, capsys):
    """80 of 90 steps were skipped, and the last line said "90 steps ... 25x less"; so does a script without dgcrun."""
    counts.offered = counts.selected = 100
    outcome = outcome_of(COMPRESSION="dgc")
    counts.traffic.add(sent=10, received=10)
    for i in range(1000):
        counts.end_step((i, "rank 1, among 'w'") if i < 8 else None)
    at_end._at_exit(os.getpid(), DGCConfig())
    for line in (outcome.line(), capsys.readouterr().err):
        assert ": 1,000 steps, skipped 8 of 1,000 (applied on no rank); " in line
    counts.end_step((1000, "rank 1, among 'w'"))
    counts.end_step((1001, "rank 1, among 'w'"))
    assert counts.skipped_in_a_row == 2
    counts.skipped, counts.left_out = 800, 3
    PROCESS.replica_checks, PROCESS.replica_mismatches = 2, 1
    at_end._at_exit(os.getpid(), DGCConfig())
    told = capsys.readouterr().err
    for text in ("skipped 800 of 1,002", "the ranks' weights differed at 1 of 2 comparisons"):
        assert text in outcome.line() and text in told
    assert "rank 0 skipped 3 of its local steps" in outcome.line()


def test_a_script_that_compresses_by_itself_has_a_last_line_too(counts, monkeypatch, capsys):
    """DDP jobs had none."""
    counts.density, counts.offered, counts.selected = 0.01, 100, 1
    monkeypatch.setattr(PROCESS, "exchanges", [])
    at_end._at_exit(os.getpid(), DGCConfig())
    assert not capsys.readouterr().err, "nothing was taken over"
    monkeypatch.setattr(PROCESS, "exchanges", [counts])
    at_end._at_exit(os.getpid(), DGCConfig())
    assert "NOT ACTIVE: compression dgc was asked for, but its optimizer has made no step" in capsys.readouterr().err
    counts.end_step()
    counts.traffic.add(sent=10, received=10)
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    at_end._at_exit(os.getpid(), DGCConfig())
    said = capsys.readouterr().err
    assert said.startswith("dgc_horovod: dgc, density 0.01: 1 steps; ") and said.endswith(" (ended by an error)\n")


def test_the_summary_counts_the_local_steps_of_a_graph_once(counts):
    """A Keras job that ended within a round had "made no step", or left three of seventeen out."""
    counts.count_pending = lambda: 3
    outcome = outcome_of(LOCAL_STEPS="7")
    assert "has made 3 local steps" in outcome.line() and "has made 3 local steps" in outcome.line()
    assert stats.total(PROCESS.exchanges)["bytes_dense"] == 4 * 100 * 3


def test_the_summary_of_a_run_that_ended_in_its_warmup(counts):
    """It named the density to which nothing had come down."""
    counts.density, counts.offered, counts.selected, counts.density_now = 0.001, 100, 75, 0.25
    counts.end_step()
    counts.traffic.add(sent=10, received=10)
    outcome = outcome_of(COMPRESSION="dgc")
    assert "density 0.75 on average (0.25 in the end: the warm-up to 0.001 was not over)" in outcome.line()
    counts.density_now = 0.001
    assert "density 0.75 on average (0.001 in the end)" in outcome.line()


@pytest.mark.parametrize(
    ("method", "takes_part", "active"), [("dgc", True, False), ("dgc", False, True), ("fp16", True, True)]
)
def test_what_makes_its_exchange_at_the_first_step_and_makes_none_is_not_active(
    monkeypatch, method, takes_part, active
):
    """A Keras model compiled with the optimizer inside: it was said that the exchange "is not counted"."""
    monkeypatch.setattr(PROCESS, "exchanges", [])
    outcome = outcome_of(COMPRESSION=method)
    session = SimpleNamespace(distribution=SimpleNamespace(takes_part=takes_part))
    outcome.has_wrapped(SimpleNamespace(_dgc=session))
    assert ("is not counted" if active else "has exchanged nothing") in outcome.line()
    outcome.has_wrapped(SimpleNamespace())  # torch, where `auto` has taken stock Horovod's exchange
    assert bool(outcome.why_inactive()) != active


def test_seconds_of_optimizers_that_step_in_turn_count_once(monkeypatch):
    """A step of a GAN seemed to take twice as long as it does, and to wait half as much of it."""
    now = [5.0]
    monkeypatch.setattr(stats.time, "perf_counter", lambda: now[0])
    first, second = ExchangeStats(2, 1000), ExchangeStats(2, 1000)
    for _ in range(101):
        for counts in (first, second):
            counts.traffic.waiting += 0.02
            now[0] += 0.05
            counts.end_step()
    found = stats.times([first, second, ExchangeStats(2, 1000)])
    assert found["timed_steps"] == 200 and found["step_seconds"] == pytest.approx(200 * 0.05, rel=0.01)
    later = ExchangeStats(2, 1000)
    for _ in range(3):
        now[0] += 1
        later.end_step()
    both = stats.times([later, first])
    assert both["step_seconds"] == pytest.approx(first.times()["step_seconds"] + 2) and both["timed_steps"] == 102


def test_a_metrics_file_that_is_none_is_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DGC_METRICS_FILE", "none")
    monkeypatch.setattr(PROCESS, "tells_at_end", True)  # this process is no job
    recording.begin_as_environment_says(DGCConfig())
    assert not list(tmp_path.iterdir())
