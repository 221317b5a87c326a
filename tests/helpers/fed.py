"""Gradients that both frameworks are fed, and what is compared between their engines."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

SHAPES = {"a": (40, 60), "b": (60,), "c": (60, 33), "d": (7, 3), "e": (33, 80)}
STEPS = 8
# name -> fields of Compression.dgc beyond density and min_numel, and options of SGD
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dgc": ({}, {"momentum": 0.9}),
    "nesterov, clipped": ({"clip_norm": 2.0}, {"momentum": 0.8, "nesterov": True}),
    "gaussian, 4 bit, small buckets": ({"rule": "gaussian", "values": "4bit", "bucket_bytes": 9000}, {"momentum": 0.9}),
    "residual only": ({"momentum_correction": False, "factor_masking": False}, {"momentum": 0.9}),
    "scattered": ({"density": 0.4}, {"momentum": 0.9}),
}
DENSITY, MIN_NUMEL, RATE = 0.03, 16, 0.1
LOOKED_AT = ("u", "v", "sent", "non-zero")


def gradients(rank: int) -> list[dict[str, np.ndarray]]:
    """A few steps' gradients of one rank; those of step 5 hold an infinity on rank 1."""
    rng = np.random.default_rng(100 + rank)
    steps = [
        {name: rng.standard_normal(shape).astype(np.float32) * np.float32(i + 1) for i, (name, shape) in
         enumerate(SHAPES.items())}
        for _ in range(STEPS)
    ]  # fmt: skip
    if rank == 1:
        steps[5]["c"][3, 4] = np.inf
    return steps


def looked_at(buckets: Any) -> dict[str, str]:
    """Hashes of u, v and what every rank sent, of the step that has just ended."""

    def hashed(arrays: Any) -> str:
        digest = hashlib.sha256()
        for array in arrays:
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]

    state = buckets.state_arrays()
    names = sorted(state, key=lambda name: name.split()[-1])  # the adapters name tensors differently, in one order
    found = {"u": hashed(state[name]["u"] for name in names), "v": hashed(state[name]["v"] for name in names)}
    sent = [part for e in buckets.engines for c in e.exchange.contributions for part in c]
    return {**found, "sent": hashed(sent), "non-zero": str(sum(int(np.count_nonzero(x)) for x in sent))}
