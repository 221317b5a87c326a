"""The arithmetic of the benchmarks, and that the pages say what the files of results say."""

from __future__ import annotations

import pytest

from benchmarks import page, report
from benchmarks.exchange import against, tables
from benchmarks.exchange.__main__ import Cell
from benchmarks.kernels import __main__ as kernels
from benchmarks.kernels import speed
from benchmarks.quality import runs
from benchmarks.report import OtherMachine, check_machine
from benchmarks.shapes import SHAPES, Gradients, numel

PARAMETERS = {
    "resnet50": (161, 25_557_032),
    "vgg16": (32, 138_357_544),
    "alexnet": (16, 61_100_840),
    "lstm-ptb": (11, 66_034_000),
    "bert-base": (199, 109_482_240),
}


def row(method: str, workers: int, ms: float, rate: str = "1gbit", **more):
    """What the exchange study keeps of a method."""
    phases = {"compress": 15.0, "decode": 6.0, "wait": 2.0} if method == "dgc" else {}
    return {
        "model": "resnet50", "parameters": 25_557_032, "workers": workers, "rate": rate, "method": method,
        "ms": {"p10": 0.9 * ms, "p50": ms, "p90": 1.1 * ms}, "phases_ms": phases, "bytes": 10**6, **more,
    }  # fmt: skip


@pytest.mark.parametrize("model", SHAPES)
def test_shapes_are_those_of_the_model(model):
    shapes = SHAPES[model]()
    assert (len(shapes), numel(shapes)) == PARAMETERS[model]
    assert len({name for name, _ in shapes}) == len(shapes)


def test_gradients_differ_over_ranks_and_steps_but_not_over_calls():
    shapes = [(30, 40), (7,)]
    source = Gradients(shapes)
    first = source.of(rank=0, step=0)
    assert [tuple(g.shape) for g in first] == shapes
    assert all((a == b).all() for a, b in zip(first, source.of(0, 0), strict=True))
    for other in (source.of(1, 0), source.of(0, 1)):
        assert all((a != b).any() for a, b in zip(first, other, strict=True))
    assert len({g.untyped_storage().data_ptr() for g in first}) == len(shapes)  # as a backward pass leaves them


def test_times_are_compared_with_dense_of_the_same_rate():
    rows = [
        row("dense", 2, 1000.0),
        row("dgc", 2, 25.0),
        row("dense", 2, 300.0, "10gbit"),
        row("dgc", 2, 20.0, "10gbit"),
    ]
    lines = tables.times(rows).splitlines()
    assert lines[0] == "| resnet50, N = 2 | sent a step | 1 Gbps | 10 Gbps |"
    assert lines[3] == "| dgc | 1,000 kB | 25.0 (40×) | 20.0 (15×) |"


def test_ratios_are_medians_of_each_launchs_own():
    """Not of the medians of all: launches differ by more than what is compared."""
    flat, other = (
        row(name, 2, ms[1], launch_medians_ms=ms, ranks=2, state_bytes=1)
        for name, ms in (("flat", [100.0, 200.0, 400.0]), ("hierarchical", [200.0, 300.0, 440.0]))
    )
    assert " 1.50× (1.10–2.00) " in tables.node_table([flat, other])
    phases, rounds = {"compress": 1.0}, {"dgc": [10.0, 20.0, 40.0], "memory alone": [10.0, 10.0, 40.0]}
    rows = [
        {"package": package, "method": method, "ms": 20.0, "processor_ms": 1.0, "phases_ms": phases, "rounds_ms": ms}
        for package in ("before", "now")
        for method, ms in {**rounds, "published DGC": [100.0, 100.0, 100.0]}.items()
    ]
    cells = against.table({"resnet50": {"rows": rows}}).splitlines()[-1].split(" | ")
    assert cells[1] == "20.0 → 20.0, 1.00× (1.00–1.00)"
    assert cells[5:] == ["1.00× (1.00–2.00)", "5.00× (2.50–10.00) |"]


def test_pages_show_what_was_measured(monkeypatch):
    """As after `python -m benchmarks.page`, also on a machine whose Python has other sources, the GPT's text."""
    monkeypatch.setattr(runs, "digest", lambda: "another text")
    for (file, marker), text in page.texts().items():
        assert f"<!-- {marker}: begin -->\n{text}\n<!-- {marker}: end -->" in file.read_text(), marker
    assert all(row["checked"] and row["steps"] >= 2 for row in page.exchange_rows())


def compressed(model: str, widest: str):
    """What the study of the kernels keeps of a model, on a processor whose widest instructions these are."""
    own = {"model": model, "rule": "exact", "density": 0.001, "floor_ms": 8.0}
    plans = [("plain", 1), (widest, 1), (widest, 2)]
    ours = [{**own, "instructions": name, "threads": threads, "ms": 10.0} for name, threads in plans]
    peers = [{"model": model, "rule": "peer", "density": 0.001, "threads": n, "ms": 40.0} for n in (1, 2)]
    return [*ours, *peers]


def test_one_model_measured_on_a_machine_without_avx512(monkeypatch, capsys, tmp_path):
    """It had been a KeyError: its rows were looked up under the instructions of the models before it."""
    rows = [*compressed("vgg16", "AVX-512"), *compressed("resnet50", "AVX2")]
    assert speed.compress_table(rows).count("4.0×") == 4
    measured = {"compress, resnet50": lambda: compressed("resnet50", "AVX2")}
    monkeypatch.setitem(kernels.STUDIES, "compress", (measured, speed.compress_table))
    monkeypatch.setattr(report, "environment", lambda: {"processor": "another"})
    command = ["kernels", "compress"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit, match=r"of another machine.*--file ANOTHER"):
        kernels.COMMAND.main()
    monkeypatch.setattr("sys.argv", [*command, "--file", str(tmp_path / "kernels.json")])
    kernels.COMMAND.main()
    assert "| resnet50, peer |  | 2 | 40.0 |  | 4.0× |" in capsys.readouterr().out


def test_a_cell_is_of_one_run_and_of_one_machine(tmp_path, monkeypatch):
    file, cell = tmp_path / "exchange.json", Cell("resnet50", 2, "1gbit", 0.001)
    here = {"processor": "this", "torch": "2"}
    monkeypatch.setattr(report, "environment", lambda: here)
    report.keep(file, cell.key, {"rows": [row("dense", 2, 900.0), row("dgc", 2, 30.0)]})
    report.complete(file, {cell.key: lambda: pytest.fail("it is kept already")})
    report.keep(file, cell.key, {"rows": [row("dgc", 2, 31.0)]})
    assert [each["ms"]["p50"] for each in report.read_results(file)[cell.key]["rows"]] == [31.0]
    check_machine(file, [here])
    with pytest.raises(OtherMachine, match="--file ANOTHER"):
        check_machine(file, [here, {**here, "processor": "another"}])
