"""What a change of the insides must leave as it was, bit for bit: runs, and the hashes of all that they made.

``python -m tests.helpers.transcripts`` records them anew.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dgc_horovod import WarmupSchedule
from dgc_horovod.core.optimizer_exchange import OptimizerExchange

FILE = Path(__file__).parents[1] / "parallel" / "transcripts.json"
WORKERS = (2, 3, 4)
_SMALL: dict[str, Any] = {"density": 0.02, "min_numel": 16, "bucket_bytes": 12_000}

# Name -> preset and its fields. From three ranks on nothing may go by allreduce, the order of whose sums is not ours.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "dgc": ("dgc", _SMALL),
    "dgc, warm-up": ("dgc", {**_SMALL, "warmup": WarmupSchedule(steps=12)}),
    "dgc, clipped": ("dgc", {**_SMALL, "clip_norm": 0.5}),
    "dgc, clipped, per tensor": ("dgc", {**_SMALL, "clip_norm": 0.5, "scope": "tensor"}),
    "dgc, no masking, 1-D too": ("dgc", {**_SMALL, "factor_masking": False, "compress_1d": True}),
    "dgc, fp32": ("dgc", {**_SMALL, "values": "fp32", "dense_values": "bf16"}),
    "dgc, fp16": ("dgc", {**_SMALL, "values": "fp16"}),
    "dgc, 8bit": ("dgc", {**_SMALL, "values": "8bit"}),
    "dgc, 4bit": ("dgc", {**_SMALL, "values": "4bit"}),
    "dgc, 2bit": ("dgc", {**_SMALL, "values": "2bit"}),
    "topk": ("topk", _SMALL),
    "sampled": ("sampled", _SMALL),
    "gaussian": ("gaussian", _SMALL),
    "random": ("random", _SMALL),
    "threshold": ("threshold", {**_SMALL, "density": 0.001, "value": 0.02, "max_density": 0.05}),
    "one bucket": ("dgc", {"density": 0.01}),
}
WITH_ALLREDUCE: dict[str, tuple[str, dict[str, Any]]] = {
    "densified": ("dgc", {**_SMALL, "density": 0.9, "values": "fp32"}),
    "densified in the warm-up": ("dgc", {**_SMALL, "warmup": WarmupSchedule(steps=12, first_density=0.8)}),
    "dense fp32": ("dgc", {**_SMALL, "min_numel": 1024, "dense_values": "fp32"}),
    "dense fp16, clipped": ("topk", {**_SMALL, "min_numel": 1024, "dense_values": "fp16", "clip_norm": 0.5}),
}


def runs(workers: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Those that are the same every time with so many ranks."""
    return {**RUNS, **WITH_ALLREDUCE} if workers == 2 else RUNS


def made(presets: Any, run: tuple[str, dict[str, Any]]) -> Any:
    """The compression of a run."""
    return getattr(presets, run[0])(
        **{name: value for name, value in run[1].items() if name != "density" or run[0] != "threshold"}
    )


class Transcript:
    """Hashes of what one rank has sent while it is entered, by bucket: threads may take turns among buckets."""

    def __init__(self) -> None:
        self._sent: dict[int, Any] = {}
        self._stock = OptimizerExchange.compress

    def __enter__(self) -> Transcript:
        stock = self._stock

        @functools.wraps(stock)
        def compress(exchange: OptimizerExchange, engine: Any, *args: Any, **kwargs: Any) -> Any:
            message = stock(exchange, engine, *args, **kwargs)
            self._sent.setdefault(engine.bucket.index, hashlib.sha256()).update(message.payload.tobytes())
            return message

        OptimizerExchange.compress = compress  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        OptimizerExchange.compress = self._stock  # type: ignore[method-assign]

    def hashes(self, weights: np.ndarray, residuals: Mapping[str, Any]) -> dict[str, str]:
        """Of the packets, the weights, and what this rank keeps, u and v of each tensor."""
        kept = hashlib.sha256()
        for name in sorted(residuals["tensors"]):
            for part, values in sorted(residuals["tensors"][name].items()):
                kept.update(f"{name} {part}".encode() + np.ascontiguousarray(values).tobytes())
        packets = "".join(self._sent[index].hexdigest() for index in sorted(self._sent))
        return {
            "packets": hashlib.sha256(packets.encode()).hexdigest()[:16],
            "weights": hashlib.sha256(np.ascontiguousarray(weights).tobytes()).hexdigest()[:16],
            "residuals": kept.hexdigest()[:16],
        }


def transcripts() -> dict[str, Any]:
    """Every run on real ranks: "framework, ranks" -> run -> hashes of each rank."""
    from tests.helpers.ranks import run_ranks

    found: dict[str, Any] = {}
    for framework in ("torch", "keras"):
        case = f"{'keras_' if framework == 'keras' else ''}transcripts.all_runs"
        for workers in WORKERS:
            ranks = [rank[case] for rank in run_ranks(workers, [case], timeout=600)]
            found[f"{framework}, {workers} ranks"] = {name: [rank[name] for rank in ranks] for name in ranks[0]}
    return found


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    where.write_text(json.dumps(transcripts(), indent=1) + "\n")
    print(f"recorded {where}")
