"""A checkpoint of workers that share nodes, loaded on the same nodes with other buckets, and on others."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dgc_horovod.config import DGCConfig
from dgc_horovod.core.bucketing import TensorSpec
from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.errors import CheckpointError
from dgc_horovod.state import checkpoint
from dgc_horovod.state.residual_state import RESIDUAL
from tests.helpers.engines import make_exchange

NODES, SIZE = 2, 2
WORKERS = NODES * SIZE
SPECS = [TensorSpec(name, shape) for name, shape in (("a", (64, 64)), ("b", (64, 32)), ("c", (10,)))]
CONFIG = {"density": 0.01, "exchange": "hierarchical", "dense_values": "8bit", "bucket_bytes": 2**26}


class Meeting:
    """The collectives of ranks that are threads."""

    workers = WORKERS
    data: list[bytes] = [b""] * WORKERS
    barrier = threading.Barrier(WORKERS, timeout=30)

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def gather_bytes(self, data: bytes, name: str) -> list[bytes]:
        self.data[self.rank] = data
        self.barrier.wait()
        gathered = list(self.data)
        self.barrier.wait()
        return gathered


def made(**fields) -> list[OptimizerExchange]:
    """The buckets of a model on every rank; something waits in each of them."""
    config, ranks = DGCConfig(**{**CONFIG, **fields}), range(WORKERS)
    found = [make_exchange(SPECS, config, rank=rank, workers=WORKERS, node_size=SIZE) for rank in ranks]
    for number, engine in enumerate(engine for each in found for engine in each.engines):
        for i, segment in enumerate(engine.bucket.segments):
            if segment.name:  # no padding
                engine.state.v[segment.place] = np.random.default_rng([number, i]).standard_normal(segment.numel)
    return found


def waiting(exchanges: list[OptimizerExchange]) -> dict[str, np.ndarray]:
    """The residual of each tensor, on average over nodes; also of those that are in no bucket."""
    found = {spec.name: np.zeros(spec.numel) for spec in SPECS}
    for each in exchanges:
        for name, (engine, i) in each.place.items():
            kept = engine.bucket.segments[i]
            found[name][kept.offset :][: kept.numel] += engine.state.read(i)[RESIDUAL] / NODES
        for name, v in each.dense_residuals.items():
            found[name] += v / WORKERS
    return found


def together(rank_does, exchanges: list[OptimizerExchange]) -> None:
    """Every rank in a thread of its own."""
    with ThreadPoolExecutor(WORKERS) as ranks:
        list(ranks.map(rank_does, exchanges))


def handed_over(folder, old: list[OptimizerExchange], new: list[OptimizerExchange]) -> None:
    """A checkpoint of `old`, loaded into `new`."""

    def save(each: OptimizerExchange) -> None:
        content = checkpoint.Content("model", b"model", each.residuals(), each.config)
        checkpoint.save(folder, Meeting(each.rank), lambda: content)

    def load(each: OptimizerExchange) -> None:
        each.load(checkpoint.load(folder, Meeting(each.rank), each.config, True, node_size=SIZE).state)

    together(save, old)
    together(load, new)


OTHERS = ({"bucket_bytes": 2**14}, {"dense_values": "bf16"}, {"dense_values": "fp32"})


@pytest.mark.parametrize("changed", [*OTHERS, {"bucket_bytes": 2**14, "dense_values": "fp32"}], ids=str)
def test_the_same_nodes_go_on_with_other_buckets(tmp_path, changed):
    """Each worker took its own slice for that of the new bucket, and was refused or lost what it had of the others."""
    old, new = made(), made(**changed)
    handed_over(tmp_path, old, new)
    found, expected = waiting(new), waiting(old)
    for name, v in expected.items():
        assert np.count_nonzero(v) == v.size
        np.testing.assert_allclose(found[name], v, rtol=0, atol=1e-6)
    assert all(("c" in each.dense_residuals) == (changed.get("dense_values") == "fp32") for each in new)


def test_the_same_buckets_go_on_bit_for_bit(tmp_path):
    old, new = made(), made(density=0.02)
    handed_over(tmp_path, old, new)
    assert not any(each.dense_residuals for each in new)
    for one, other in zip(old, new, strict=True):
        for part in zip(one.engines, other.engines, strict=True):
            assert part[0].state.v.tobytes() == part[1].state.v.tobytes()


@pytest.mark.parametrize("changed", [{"bucket_bytes": 2**14}, {"dense_values": "fp32"}], ids=str)
def test_a_record_of_other_buckets_is_refused_in_words(changed):
    for old, new in zip(made(), made(**changed), strict=True):
        with pytest.raises(CheckpointError, match="saved with other buckets"):
            new.load(old.residuals())
