"""What the adapter over torch.distributed saves is resumed bit for bit, by itself and by Horovod's, and vice versa."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.torch_ranks import run_torch_ranks

pytestmark = pytest.mark.parallel


def run(adapter: str, case: str, folder: Any, workers: int = 2) -> list[dict[str, Any]]:
    place = {"DGC_TEST_CHECKPOINT": str(folder)}
    name = f"ddp_state.{case}" if adapter == "DDP" else f"ddp_state_horovod.{case}"
    if adapter == "DDP":
        return [rank[name] for rank in run_torch_ranks(workers, [name], environment=place)]
    return [rank[name] for rank in run_ranks(workers, [name], environment=place)]


@pytest.mark.parametrize("writer", ["DDP", "Horovod"])
def test_resumed_bit_for_bit_by_both(writer, tmp_path):
    wanted = [{**rank, "epoch": 7} for rank in run(writer, "saved", tmp_path)]
    assert wanted[0] == wanted[1]
    assert run("DDP", "resumed", tmp_path) == wanted
    assert run("Horovod", "resumed", tmp_path) == wanted


def test_resumed_with_another_number_of_ranks(tmp_path):
    run("DDP", "saved", tmp_path)
    found = run("DDP", "resumed", tmp_path, workers=3)
    assert found[0] == found[1] == found[2] and found[0]["epoch"] == 7


def test_uncompressed(tmp_path):
    assert all(found["same"] for found in run("DDP", "uncompressed", tmp_path))


def test_records_and_flush(tmp_path):
    first, second = run("DDP", "residuals_and_flush", tmp_path)
    assert first == second and first["same"]


def test_refused(tmp_path):
    for found in run("DDP", "refused", tmp_path):
        assert "CheckpointError: saving to" in found["under way"] and "between two steps only" in found["under way"]
        assert "UnsupportedUse: pass the optimizer that was given to register()" in found["stock"]
        assert "CheckpointError" in found["missing"]
        assert "cannot be copied or pickled" in found["copy"] and "add_param_group after wrapping" in found["group"]
        assert "already wrapped" in found["again"]
