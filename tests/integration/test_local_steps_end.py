"""What a job with local steps says of itself: of the steps at its end, and of a script that clips."""

from __future__ import annotations

import sys

import pytest

from tests.helpers.jobs import run

TORCH = """
import sys
import torch
import horovod.torch as hvd
from dgc_horovod.torch import Compression, DistributedOptimizer

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(40, 40)
optimizer = DistributedOptimizer(
    torch.optim.SGD(model.parameters(), 0.01), model.named_parameters(), compression=Compression.local(steps=7)
)
assert sys.argv[1:] == ["--mode", "train", "--p", "1"], sys.argv
for _ in range(17):
    optimizer.zero_grad()
    model(torch.randn(8, 40)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""
KERAS = """
import sys
import horovod.keras as hvd
import keras
import numpy as np

hvd.init()
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(40)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, clipnorm=1.0)), "mse")
x = np.random.default_rng(0).normal(size=(8 * int(sys.argv[1]), 40)).astype("float32")
model.fit(x, x, batch_size=8, verbose=0)
"""


def _job(tmp_path, script, *words):
    path = tmp_path / "train.py"
    path.write_text(script)
    code, output = run(
        ["dgcrun", "--gloo", "-np", "2", *words[:-1], sys.executable, str(path), *words[-1].split()], 180
    )
    assert code == 0, output
    return output


def test_two_lines_in_a_script_tell_at_its_end_too(tmp_path):
    """Its arguments are its own, however much they look like the start of one of dgcrun's flags."""
    output = _job(tmp_path, TORCH, "--mode train --p 1")
    assert output.count("local steps at the end that were not exchanged: 3.") == 1, output
    assert output.count("sqrt(N)*1 = 1.41") == 1 and "a Compression of the script's own" in output, output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (17, ": 2 exchanges in 17 steps; "),
        (5, "has made 5 local steps, fewer than"),
    ],
)
def test_a_keras_script_as_it_is(tmp_path, steps, said):
    output = _job(tmp_path, KERAS, "--allow-inactive", "--dgc-local-steps", "7", str(steps))
    assert said in output and output.count("sqrt(N)*1 = 1.41") == 1, output
    assert output.count("local steps at the end that were not exchanged: 3.") == (steps == 17), output
