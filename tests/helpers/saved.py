"""What ranks keep, and checkpoints of it on one rank."""

from __future__ import annotations

import dataclasses

import numpy as np

from dgc_horovod.config import DGCConfig
from dgc_horovod.state import checkpoint
from dgc_horovod.state.residual_state import ResidualState


class Alone:
    """The collectives of a job of one rank."""

    rank, workers = 0, 1

    def gather_bytes(self, data: bytes, name: str) -> list[bytes]:
        return [data]


def save(folder, step: int, model: bytes, state: ResidualState | None, holds: str = "model") -> None:
    """A checkpoint of one rank."""
    config = None if state is None else DGCConfig()
    state = None if state is None else dataclasses.replace(state, step=step)
    checkpoint.save(folder, Alone(), lambda: checkpoint.Content(holds, model, state, config))


def load(folder, config: DGCConfig | None = DGCConfig(), residuals: str = checkpoint.REQUIRED):  # noqa: B008 - frozen
    """What stands there."""
    return checkpoint.load(folder, Alone(), config, True, residuals)


def state_of(rank: int, workers: int, averages: bool = True, seed: int = 0) -> ResidualState:
    rng = np.random.default_rng(seed + rank)
    tensors = {
        name: {part: rng.standard_normal(numel).astype(np.float32) for part in parts}
        for name, numel, parts in (
            ("a", 5, ("v", "u", "remainder")),
            ("b", 3, ("v", "first", "second")),
            ("empty", 0, ("v",)),
        )
    }
    state = ResidualState(rank, workers, averages, 7, 2, tensors, {"b": 4}, {"bucket": rng.standard_normal(6)})
    state.second = {"a": np.random.default_rng(seed).random(7)}  # the same on every rank
    return state


def assert_equal(one: ResidualState, other: ResidualState) -> None:
    fields = [field.name for field in dataclasses.fields(one) if field.name not in ("tensors", "thresholds", "second")]
    assert all(getattr(one, name) == getattr(other, name) for name in fields)
    flat = [
        {
            **{(name, part): x for name, arrays in each.tensors.items() for part, x in arrays.items()},
            **{("second", name): x for name, x in each.second.items()},
            **each.thresholds,
        }
        for each in (one, other)
    ]
    assert flat[0].keys() == flat[1].keys()
    for key, array in flat[0].items():
        np.testing.assert_array_equal(array, flat[1][key])


def of_node(rank: int, workers: int, node_size: int) -> ResidualState:
    """What one worker of a node keeps: a run of 12 elements, the same number for each."""
    kept, rng = 12 // node_size, np.random.default_rng([rank, workers])
    arrays = {part: rng.standard_normal(kept).astype(np.float32) for part in ("v", "u")}
    start = rank % node_size * kept
    runs = {"a": [start, 12]} if node_size > 1 else {}
    return ResidualState(rank, workers, True, 7, 2, {"a": arrays}, node_size=node_size, runs=runs)
