"""The examples run with the choices of compression, and their last line says what it should.

Two epochs each: how good they become is measured by ``python -m benchmarks.scripts examples``.
"""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.helpers.jobs import run
from tests.helpers.launchers import torchrun

pytest.importorskip("sklearn", reason="the digits come from scikit-learn (extra [test])")

CHOICES = {
    "torch_digits": ["none", "fp16", "dgc", "topk", "gaussian"],
    "ddp_digits": ["none", "fp16", "dgc", "topk"],
    "torch_lstm": ["none", "dgc", "topk"],
    "keras_digits": ["dgc"],
    "keras_loop": ["dgc"],
}
# All slow: CI runs torch_digits, torch_lstm and keras_digits to their end, as commands of the README and docs/guide.md,
# and ddp_digits in ci/check_install; what keras_loop does, test_keras_tape.py tries.
RUNS = [(example, choice, "") for example, choices in CHOICES.items() for choice in choices]


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize("library", ["accelerate", "lightning"])
def test_recipe(library):
    pytest.importorskip(library, reason=f"{library} is not installed (extra [{library}])")
    code, log = run([*torchrun(2), f"examples/ddp_{library}.py", "--epochs", "6"], 150)
    found = re.search(r"accuracy ([\d.]+)%, (\d+)x less sent", log)
    assert code == 0 and found, log
    assert float(found[1]) > 60 and int(found[2]) > 50


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize(("example", "compression", "option"), [*RUNS, ("keras_loop", "topk", "--tape")])
def test_example(example, compression, option):
    if example.startswith("keras"):
        pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")
    launcher = torchrun(2) if example == "ddp_digits" else ["horovodrun", "--gloo", "-np", "2", sys.executable]
    command = [*launcher, f"examples/{example}.py", "--epochs", "2"]
    options = ["--compression", compression, "--warmup-epochs", "0", *option.split()]
    done = run([*command, *options], 200)
    assert done.code == 0, done.output
    results = re.findall(r"RESULT (\{.*\})", done.output)
    assert len(results) == 1, "rank 0 alone reports"
    result = json.loads(results[0])
    least, most = {"none": (1, 1), "fp16": (2, 2)}.get(compression, (20, 250))
    assert least <= result["ratio"] <= most
    assert result["bytes_dense"] == pytest.approx(result["ratio"] * result["bytes_sent"])
    if example != "torch_lstm":
        assert 0.05 < result["quality"] <= 1
    else:
        assert 1.5 < result["quality"] < 4.7  # log(97) is what a model that knows nothing gets
    assert "epoch/s" in done.output, "no progress was shown"
