"""torchrun starts a job again that has lost a rank: it goes on from its checkpoint, as if nothing had happened."""

from __future__ import annotations

import json

import pytest

from tests.helpers.jobs import run
from tests.helpers.launchers import torchrun

pytestmark = [pytest.mark.parallel, pytest.mark.slow]


def trained(folder, how):
    folder.mkdir()
    command = [*torchrun(2, "--max-restarts=1"), "-m", "tests.helpers.ddp_elastic_job", str(folder), how]
    code, log = run(command, 150, {"DGC_TIMEOUT": "20", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    assert code == 0, log[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("how", ["dies", "raises"])
def test_started_again_from_a_checkpoint(how, tmp_path):
    wanted, found = trained(tmp_path / "whole", "never"), trained(tmp_path / "cut", how)
    for before, after in zip(wanted, found, strict=True):
        assert after["attempt"] >= 1 and after["first"] == 4 and after["weights"] == before["weights"]
