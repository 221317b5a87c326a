"""What the adapter over torch.distributed saves is resumed bit for bit, by itself and by Horovod's, and vice versa."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.sealed import check_sealed
from tests.helpers.torch_ranks import run_torch_ranks

pytestmark = pytest.mark.parallel


def run(adapter: str, case: str, folder: Any, workers: int = 2) -> list[dict[str, Any]]:
    name = f"ddp_state.{case}" if adapter == "DDP" else f"ddp_state_horovod.{case}"
    launch = run_torch_ranks if adapter == "DDP" else run_ranks
    return [rank[name] for rank in launch(workers, [name], folder=folder)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A checkpoint of each adapter, and what each makes of it; ranks of one adapter are up at a time."""
    folders = {adapter: tmp_path_factory.mktemp("checkpoint") for adapter in ("DDP", "Horovod")}
    wanted = {adapter: run(adapter, "saved", folder) for adapter, folder in folders.items()}
    resumed = {
        (writer, reader): run(reader, "resumed", folder)
        for reader in ("Horovod", "DDP")
        for writer, folder in folders.items()
    }
    return folders, wanted, resumed


@pytest.mark.parametrize("reader", ["DDP", "Horovod"])
@pytest.mark.parametrize("writer", ["DDP", "Horovod"])
def test_resumed_bit_for_bit_by_both(checkpoints, writer, reader):
    _, saved, resumed = checkpoints
    wanted = [{**rank, "epoch": 7} for rank in saved[writer]]
    assert wanted[0] == wanted[1]
    assert resumed[writer, reader] == wanted


def test_uncompressed(tmp_path):
    assert all(found["same"] for found in run("DDP", "uncompressed", tmp_path))


def test_residuals_beside_another_checkpoint(tmp_path):
    """As frameworks save: their own checkpoints lost residuals, and nobody said so."""
    for rank, found in enumerate(run("DDP", "residuals_apart", tmp_path)):
        for name, (same, said, later) in found.items():
            assert same and not later, name
            assert len(said) == (rank == 0) and all("state_dict() holds no residuals" in text for text in said)


def test_records_and_flush(tmp_path):
    first, second = run("DDP", "residuals_and_flush", tmp_path)
    assert first == second and first["same"]


def test_refused(tmp_path):
    for found in run("DDP", "refused", tmp_path):
        assert "CheckpointError: saving to" in found["under way"] and "between two steps only" in found["under way"]
        assert "UnsupportedUse: pass the optimizer that was passed to register()" in found["stock"]
        assert "CheckpointError" in found["missing"]
        assert "cannot be copied or pickled" in found["copy"] and "add_param_group after wrapping" in found["group"]
        assert "already wrapped" in found["again"]


def test_what_was_changed_and_sealed_again_is_one_error_and_changes_nothing(tmp_path):
    check_sealed(run("DDP", "sealed", tmp_path))


@pytest.mark.slow
def test_resumed_with_another_number_of_ranks(checkpoints):
    found = run("DDP", "resumed", checkpoints[0]["DDP"], workers=3)
    assert found[0] == found[1] == found[2] and found[0]["epoch"] == 7
