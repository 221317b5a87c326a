"""What a job with local steps says of itself: of the steps at its end, and of a script that clips."""

from __future__ import annotations

import sys

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


def test_two_lines_in_a_script_tell_at_its_end_too(tmp_path):
    """Its arguments are its own, however much they look like the start of one of dgcrun's flags."""
    path = tmp_path / "train.py"
    path.write_text(TORCH)
    words = ["dgcrun", "--gloo", "-np", "2", sys.executable, str(path), "--mode", "train", "--p", "1"]
    code, output = run(words, 180)
    assert code == 0 and output.count("local steps at the end that were not exchanged: 3.") == 1, output
    assert output.count("sqrt(N)*1 = 1.41") == 1 and "a Compression of the script's own" in output, output
