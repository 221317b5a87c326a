"""Process sets, sub-communicators, and what Horovod's timeline saw."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.training import UNROUNDED, distance, fingerprint, smooth_model, train, weights


def process_set_subset() -> dict[str, Any]:
    """Ranks 0 and 1 exchange, the others train alone: as stock with the same process set."""
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    results = []
    for ours in (False, True):
        model = smooth_model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if ours:
            compression = Compression.dgc(1.0, factor_masking=False, min_numel=1, **UNROUNDED)
            optimizer = DistributedOptimizer(sgd, model.named_parameters(), compression, process_set=pair)
        else:
            optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), process_set=pair)
        train(model, optimizer, 20)
        results.append(model)
    model = smooth_model()  # whose optimizer has no state: ranks outside the set broadcast nothing, nor may those in it
    plain = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.05), model.named_parameters(), Compression.dgc(0.1), process_set=pair
    )
    hvd.broadcast_optimizer_state(plain, 0)
    plain.set_backward_passes_per_step(2)
    hvd.allreduce(torch.zeros(1), name="all_done")  # a rank that leaves early takes the process sets with it
    return {
        "distance": distance(weights(results[0]), weights(results[1])),
        "fingerprint": fingerprint(results[1]),
        "stats": optimizer.compression_stats(),
    }


def overlap() -> None:
    """One training step in which a marker is sent right after backward: the test reads the timeline."""
    hvd.init()
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


def sub_communicator() -> dict[str, Any]:
    """``hvd.init(comm=...)`` on ranks 0 and 1 of 3, checked through mpi4py with arithmetic of its own.

    Every step is recomputed from the gradients alone in NumPy: momentum, residual, the k largest by a
    full sort, the mean of what both ranks sent (exchanged by mpi4py).
    """
    import mpi4py

    mpi4py.rc.initialize = False  # Horovod initialises MPI with the thread level it needs
    from mpi4py import MPI

    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    world = MPI.COMM_WORLD
    inside = world.Get_rank() < 2
    pair = world.Split(0 if inside else 1, world.Get_rank())
    results: dict[str, Any] = {"inside": inside}
    if inside:
        hvd.init(comm=pair)
        results |= _check_against_mpi4py(pair)
        hvd.shutdown()
    world.Barrier()
    MPI.Finalize()
    return results


def _positions(payload: np.ndarray, numel: int, k: int) -> list[int]:
    """Elias-Fano behind a header of 36 bytes: low bits in whole words, then bit (high part + i) for the i-th."""
    low = int(np.log2(numel / k))
    words = -(-k * low // 32)
    bits = np.unpackbits(payload[36 : -4 * k], bitorder="little")
    highs = np.flatnonzero(bits[32 * words :]) - np.arange(k)
    lows = bits[: k * low].reshape(k, low) @ (1 << np.arange(low))
    return (highs * 2**low + lows).tolist()


def _check_against_mpi4py(pair: Any) -> dict[str, Any]:
    model = smooth_model()
    momentum, k = 0.9, 50
    matrices = {name: p for name, p in model.named_parameters() if p.ndim > 1 and p.numel() >= 1024}
    numel = sum(p.numel() for p in matrices.values())
    compression = Compression.dgc(k / numel * 0.999, **UNROUNDED)  # the ceiling makes it k
    sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=momentum)
    optimizer = DistributedOptimizer(sgd, model.named_parameters(), compression)
    order = list(reversed(matrices))  # of the only bucket
    u, v = np.zeros(numel, np.float32), np.zeros(numel, np.float32)
    generator = torch.Generator().manual_seed(hvd.rank())
    agreed = {"u": True, "v": True, "update": True, "packets": True}
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
        everyone = pair.allgather(mine)
        for positions, values in everyone:
            update[positions] += values * np.float32(0.5)
        arrays = session(optimizer).exchange.state_arrays()
        payload = session(optimizer).exchange.engines[0].exchange._packet.copy()
        agreed["u"] &= bool((np.concatenate([arrays[name]["u"] for name in order]) == u).all())
        agreed["v"] &= bool((np.concatenate([arrays[name]["v"] for name in order]) == v).all())
        grads = np.concatenate([matrices[name].grad.numpy().ravel() for name in order])
        agreed["update"] &= bool((grads == update).all())
        agreed["packets"] &= _positions(payload, numel, k) == mine[0].tolist()
        agreed["packets"] &= payload[-4 * k :].tobytes() == mine[1].tobytes()
    replicas = pair.allgather(weights(model).numpy().tobytes())
    return {**agreed, "replicas": replicas[0] == replicas[1], "size": hvd.size()}
