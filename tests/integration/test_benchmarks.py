"""The long benchmarks at a size that says whether they still work; what they measure here means nothing."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.gpu import page
from tests.helpers.jobs import run


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        pytest.param("exchange", "| dgc |", marks=pytest.mark.slow),
        pytest.param("quality", "| dgc |", marks=pytest.mark.slow),
    ],
)
def test_quick_run_ends_with_a_table(name, shown):
    ended = run([sys.executable, "-m", f"benchmarks.{name}", "--quick"], timeout=170)
    assert ended.code == 0, ended.output
    assert shown in ended.output, ended.output


@pytest.mark.slow
def test_gpu_check_without_a_gpu(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed (Linux only)")
    command = [sys.executable, "-m", "benchmarks.gpu", str(tmp_path), "--interpret"]
    ended = run([*command, "--only", "models", "steps"], timeout=170)
    assert ended.code == 0, ended.output
    for row in ("| tiny |", "| tiny | AdamW |"):
        assert row in ended.output, ended.output
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert set(found["figures"]) == {"models", "steps"}
    kept = run([sys.executable, "-m", "benchmarks.gpu.page", str(tmp_path)], timeout=60)
    assert kept.code != 0 and "on no GPU" in kept.output


def test_gpu_check_says_which_bars_are_met():
    found = {"models": [{
        "model": "small", "numel": 10**6, "floor_ms": 1.0, "compress": {"ms": 1.9}, "decode": {"ms": 1.0},
        "launches": 9.0, "busy_ms": 1.7,
        **{flow: {"ms": 25.0} for flow in (page.TOPK, page.PUBLISHED, page.GAUSSIAN)},
    }], "steps": [
        {"model": "GPT", "optimizer": "AdamW", "alone": {"ms": 100.0}, "compressed": {"ms": 103.0}},
    ]}  # fmt: skip
    lines = page.verdicts(found)
    assert len(lines) == 7 and [line for line in lines if line.startswith("MISSED")] == [
        "MISSED small: decode, times compress: 0.53 (at most 0.5)",
        "MISSED small: faster than published DGC: 13.16 (at least 20)",
        "MISSED small: the device waits for the host, percent: 10.53 (at most 5)",
        "MISSED GPT: added to a step, percent: 3.00 (at most 2)",
    ]


def test_gpu_quality_compares_with_the_dense_run_of_the_same_seed():
    def found(variant, seed, loss, **more):
        run = {"variant": variant, "workers": 4, "seed": seed}
        same = {"steps": 1500, "rate": 6e-4, "text": "a", "device": "a GPU", "diverged": False}
        return {"run": run, "loss": loss, **same, **more}

    compressed = {"traffic": 0.01}
    runs = {"0": found("dense", 0, 2.0), "1": found("dense", 1, 3.0), "2": found("dgc", 0, 2.1, **compressed),
            "3": found("dgc", 1, 3.3, **compressed), "4": found("dgc", 2, 9.0, **compressed)}  # fmt: skip
    table = page.quality_table(runs)
    assert "seed 0, a GPU | 1,500 | 2.0000 | 2.1000 | +0.1000 | 1/100.0 |" in table
    assert "seed 2" not in table, "there is no dense run of that seed"
    assert table.endswith("- dgc: +0.2000 ± 0.1414 nats, 2 runs")
