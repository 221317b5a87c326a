"""Process sets, sub-communicators, and what Horovod's timeline saw."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.metrics_file import check_metrics_file
from tests.helpers.on_ranks import on_ranks, same_on_ranks
from tests.helpers.regression import sgd
from tests.helpers.run import everything
from tests.helpers.timeline import operations
from tests.helpers.training import UNROUNDED, distance, fingerprint, made, smooth_model, train, weights

pytestmark = pytest.mark.parallel


def _of_pair() -> Any:
    """The process set of ranks 0 and 1."""
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    return pair


@pytest.mark.on_ranks(3)
def test_process_set_subset():
    """Ranks 0 and 1 exchange, the others train alone: as stock with the same process set."""
    pair, ends = _of_pair(), []
    for compression in (None, everything()):
        model, optimizer = made(compression, sgd, process_set=pair)
        train(model, optimizer, 20)
        ends.append(model)
    # without state: ranks outside the set broadcast nothing, nor may those in it
    _, plain = made(Compression.dgc(0.1), partial(sgd, momentum=0), process_set=pair)
    hvd.broadcast_optimizer_state(plain, 0)
    plain.set_backward_passes_per_step(2)
    first, second, other = hvd.allgather_object(fingerprint(ends[1]))  # a rank that ends early ends the process sets
    assert first == second != other
    assert distance(*(weights(model) for model in ends)) < 1e-5
    stats = optimizer.compression_stats()
    assert stats["steps"] == 20 if hvd.rank() < 2 else stats == {}


@pytest.mark.slow
@pytest.mark.on_ranks(3)
def test_overlapping_process_sets():
    """An optimizer on ranks 0 and 1, then one on all ranks over the same parameter names."""
    train(*made(Compression.dgc(0.1), process_set=_of_pair()), 2)
    model, optimizer = made(Compression.dgc(0.1))
    train(model, optimizer, 5)
    same_on_ranks(fingerprint(model))


def _train_with_a_marker() -> None:
    """Steps in which a marker is sent right after backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(400, 400), nn.Tanh())])
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = DistributedOptimizer(sgd, model.named_parameters(), Compression.dgc(0.01, bucket_bytes=400 * 400 * 4))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(256, 400)).pow(2).mean().backward()
        hvd.allreduce(torch.zeros(1), name="backward_ended")
        optimizer.step()
    hvd.shutdown()  # closes the timeline


def _negotiations(timeline: Path) -> dict[str, list[int]]:
    """When each operation was begun, by the last part of its name."""
    started: dict[str, list[int]] = {}
    for name, asked, _ in operations(timeline):
        started.setdefault(name.removesuffix(".packets").rsplit(".", 1)[-1], []).append(asked)
    return started


def test_exchange_starts_before_backward_ends(tmp_path):
    timeline, metrics = tmp_path / "timeline.json", tmp_path / "metrics.jsonl"
    flags, given = ("--timeline-filename", str(timeline)), {"DGC_METRICS_FILE": str(metrics)}
    on_ranks(_train_with_a_marker, launcher_flags=flags, environment=given)
    check_metrics_file(metrics, "dgc")
    started = _negotiations(timeline)
    steps = min(len(times) for times in started.values())
    assert steps >= 1, "the timeline holds no whole step"
    for step in range(steps):
        buckets_before = sum(started[f"bucket{i}"][step] < started["backward_ended"][step] for i in range(8))
        assert buckets_before >= 6, f"step {step}: only {buckets_before} of 8 buckets started during backward"


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.on_ranks(3, controller="mpi", fresh=True)
def test_sub_communicator_through_mpi4py():
    """``hvd.init(comm=...)`` on ranks 0 and 1, checked through mpi4py with arithmetic of its own."""
    mpi4py = pytest.importorskip("mpi4py", reason="extra [mpi] is not installed")
    mpi4py.rc.initialize = False  # Horovod initialises MPI with the thread level it needs
    from mpi4py import MPI

    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    world = MPI.COMM_WORLD
    assert world.Get_size() == 3
    inside = world.Get_rank() < 2
    pair = world.Split(0 if inside else 1, world.Get_rank())
    if inside:
        hvd.init(comm=pair)
        assert hvd.size() == 2
        _check_against_mpi4py(pair)
        hvd.shutdown()
    world.Barrier()
    MPI.Finalize()


def _positions(payload: np.ndarray, numel: int, k: int) -> list[int]:
    """Elias-Fano behind a header of 36 bytes: low bits in whole words, then bit (high part + i) for the i-th."""
    low = int(np.log2(numel / k))
    words = -(-k * low // 32)
    bits = np.unpackbits(payload[36 : -4 * k], bitorder="little")
    highs = np.flatnonzero(bits[32 * words :]) - np.arange(k)
    lows = bits[: k * low].reshape(k, low) @ (1 << np.arange(low))
    return (highs * 2**low + lows).tolist()


def _check_against_mpi4py(pair: Any) -> None:
    """Every step is recomputed from the gradients alone in NumPy.

    Momentum, residual, the k largest by a full sort, the mean of what both ranks sent (exchanged by mpi4py).
    """
    model = smooth_model()
    momentum, k = 0.9, 50
    matrices = {name: p for name, p in model.named_parameters() if p.ndim > 1 and p.numel() >= 1024}
    numel = sum(p.numel() for p in matrices.values())
    compression = Compression.dgc(k / numel * 0.999, **UNROUNDED)  # the ceiling makes it k
    sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=momentum)
    optimizer = DistributedOptimizer(sgd, model.named_parameters(), compression)
    exchange, order = session(optimizer).exchange, list(reversed(matrices))  # of the only bucket
    u, v = np.zeros(numel, np.float32), np.zeros(numel, np.float32)
    generator = torch.Generator().manual_seed(hvd.rank())
    gradients: dict[str, np.ndarray] = {}  # before they are taken in, which leaves zeros in their memory
    for name, p in matrices.items():
        p.register_hook(lambda g, name=name: gradients.update({name: g.numpy().ravel().copy()}))
    for _ in range(10):
        optimizer.zero_grad()
        x = torch.randn(16, 32, generator=generator)
        F.mse_loss(model(x), x[:, :4].sum(1, keepdim=True)).backward()
        g = np.concatenate([gradients[name] for name in order])
        optimizer.step()

        u = np.float32(momentum) * u + g
        v = v + u
        chosen = np.sort(np.argsort(-np.abs(v), kind="stable")[:k])
        mine = (chosen.astype(np.int32), v[chosen].copy())
        u[chosen] = v[chosen] = 0
        update = np.zeros(numel, np.float32)
        for positions, values in pair.allgather(mine):
            update[positions] += values * np.float32(0.5)
        arrays, payload = exchange.state_arrays(), exchange.engines[0].exchange._packet.copy()
        assert (np.concatenate([arrays[name]["u"] for name in order]) == u).all()
        assert (np.concatenate([arrays[name]["v"] for name in order]) == v).all()
        assert (np.concatenate([matrices[name].grad.numpy().ravel() for name in order]) == update).all()
        assert _positions(payload, numel, k) == mine[0].tolist()
        assert payload[-4 * k :].tobytes() == mine[1].tobytes()
    first, second = pair.allgather(weights(model).numpy().tobytes())
    assert first == second
