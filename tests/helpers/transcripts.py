"""What a change of the insides must leave as it was, bit for bit: runs, and the hashes of all that they made.

``python -m tests.helpers.transcripts [GROUP...]`` records them anew for this kind of machine, and with ``--fixtures``
first the checkpoints that are loaded in them. Frameworks round differently on different processors: a change is
compared with the record of a machine on which runs without compression have the same bits.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
import json
import platform
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dgc_horovod import WarmupSchedule
from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from tests.helpers.on_ranks import on_ranks

FOLDER = Path(__file__).parents[1] / "parallel" / "transcripts"  # a file for each kind of machine
_SMALL: dict[str, Any] = {"density": 0.02, "min_numel": 16, "bucket_bytes": 12_000}

# Name -> preset and its fields. From three ranks on nothing may go by allreduce, the order of whose sums is not ours.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "dgc": ("dgc", _SMALL),
    "dgc, warm-up": ("dgc", {**_SMALL, "warmup": WarmupSchedule(steps=12)}),
    "dgc, clipped": ("dgc", {**_SMALL, "clip_norm": 0.5}),
    "dgc, no masking, 1-D too": ("dgc", {**_SMALL, "factor_masking": False, "compress_1d": True}),
    "dgc, fp32": ("dgc", {**_SMALL, "values": "fp32", "dense_values": "bf16"}),
    "dgc, fp16": ("dgc", {**_SMALL, "values": "fp16"}),
    "dgc, 8bit": ("dgc", {**_SMALL, "values": "8bit"}),
    "dgc, 4bit": ("dgc", {**_SMALL, "values": "4bit"}),
    "dgc, 2bit": ("dgc", {**_SMALL, "values": "2bit"}),
    "topk": ("topk", _SMALL),
    "sampled": ("sampled", _SMALL),
    "gaussian": ("gaussian", _SMALL),
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
    return getattr(presets, run[0])(**run[1])


class Transcript:
    """Hashes of what one rank has sent while it is entered, by bucket: threads may take turns among buckets."""

    def __init__(self) -> None:
        self._sent: dict[int, Any] = {}
        self._stock = OptimizerExchange.message

    def __enter__(self) -> Transcript:
        stock = self._stock

        @functools.wraps(stock)
        def message(exchange: OptimizerExchange, engine: Any) -> Any:
            taken = stock(exchange, engine)
            self._sent.setdefault(engine.bucket.index, hashlib.sha256()).update(taken.payload.tobytes())
            return taken

        OptimizerExchange.message = message  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        OptimizerExchange.message = self._stock  # type: ignore[method-assign]

    def packets(self) -> str:
        """Hash of them."""
        return _short(hashlib.sha256("".join(self._sent[index].hexdigest() for index in sorted(self._sent)).encode()))

    def hashes(self, weights: np.ndarray, residuals: Mapping[str, Any]) -> dict[str, str]:
        """Of the packets, the weights, and what this rank keeps, u and v of each tensor."""
        return {
            "packets": self.packets(),
            "weights": hash_of([("", weights)]),
            "residuals": hash_of(parts_of(residuals["tensors"])),
        }


def parts_of(tensors: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Any]]:
    """Those of ``residual_state_dict()["tensors"]`` in an order, for `hash_of`."""
    return [(f"{name} {part}", x) for name in sorted(tensors) for part, x in sorted(tensors[name].items())]


def hash_of(parts: Iterable[tuple[str, Any]]) -> str:
    """Hash of arrays and their names."""
    found = hashlib.sha256()
    for name, values in parts:
        found.update(name.encode() + np.ascontiguousarray(values).tobytes())
    return _short(found)


def _short(found: Any) -> str:
    return str(found.hexdigest()[:16])


@dataclass(frozen=True)
class Group:
    """Runs on real ranks.

    Args:
        adapter: "torch", "ddp" or "keras"; `tests.helpers` has a module of its runs.
        function: of that module, which makes them: name of a run -> what is compared; "stock" has nothing of ours.
        workers: number of ranks.
        nodes: on how many nodes they are.
        slow: whether it takes minutes.
    """

    adapter: str
    function: str
    workers: int = 2
    nodes: int = 1
    slow: bool = False

    def run(self, folder: Path) -> dict[str, list[Any]]:
        """Run -> what each rank has found; checkpoints go to `folder`."""
        function = getattr(importlib.import_module(f"tests.helpers.{self.adapter}_transcripts"), self.function)
        given = {"DGC_TEST_FOLDER": str(folder)}
        ranks = on_ranks(function, self.workers, self.adapter, nodes=self.nodes, environment=given, timeout=600)
        return {name: [rank[name] for rank in ranks] for name in ranks[0]}


_ADAPTERS = ("torch", "ddp", "keras")


def _groups() -> dict[str, Group]:
    groups = {}
    for adapter in _ADAPTERS:
        for workers in () if adapter == "ddp" else (2, 3, 4):
            slow = workers > 2 or adapter == "keras"
            groups[f"{adapter}, {workers} ranks"] = Group(adapter, "all_runs", workers, slow=slow)
        groups[f"{adapter}, ways"] = Group(adapter, "ways")
        if adapter == "keras":
            groups["keras, more ways"] = Group(adapter, "more_ways", slow=True)
        groups[f"{adapter}, on nodes"] = Group(adapter, "on_nodes", 4, nodes=2, slow=True)
        for workers in (2, 3):
            groups[f"{adapter}, fixtures, {workers} ranks"] = Group(adapter, "fixtures", workers, slow=workers > 2)
    return groups


GROUPS = _groups()
_WRITING = (*(Group(adapter, "write") for adapter in _ADAPTERS), Group("torch", "write_on_nodes", 4, nodes=2))


def difference(before: Mapping[str, list[Any]], now: Mapping[str, list[Any]]) -> list[str]:
    """What differs: runs, ranks, and parts of what these have found."""
    found = []
    for name in {**before, **now}:
        ranks = itertools.zip_longest(before.get(name, []), now.get(name, []), fillvalue={})
        for rank, (then, later) in enumerate(ranks):
            parts = [part for part in {**then, **later} if then.get(part) != later.get(part)]
            found += [f"{name}, rank {rank}: {', '.join(parts)}"] if parts else []
    return found


def recorded() -> list[dict[str, dict[str, list[Any]]]]:
    """Group -> run -> what each rank has found, for each kind of machine."""
    return [json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))]


def _this_machine() -> str:
    """Maker, family and model of the processor."""
    cpu = Path("/proc/cpuinfo")
    fields = (
        dict(re.findall(r"(?m)^(vendor_id|cpu family|model)\s*:\s*(\w+)$", cpu.read_text())) if cpu.exists() else {}
    )
    return "-".join(fields.values()) or platform.machine()


def record(names: Iterable[str]) -> None:
    """Run those groups, or all, and write what they have found."""
    file = FOLDER / f"{_this_machine()}.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    for name in list(names) or GROUPS:
        with tempfile.TemporaryDirectory(prefix="dgc-transcripts-") as folder:
            known[name] = GROUPS[name].run(Path(folder))
        file.write_text(_as_lines({name: known[name] for name in GROUPS if name in known}))
        print(f"recorded {name} in {file}", flush=True)


def _as_lines(groups: Mapping[str, Mapping[str, list[Any]]]) -> str:
    """JSON, a rank of a run in each line."""
    text = re.sub(r",\n {4,}", ", ", json.dumps(groups, indent=1))
    return re.sub(r"\n( {4,}|   (?=\}))", "", text) + "\n"


if __name__ == "__main__":
    if "--fixtures" in sys.argv:
        for each in _WRITING:
            each.run(Path())
    record(name for name in sys.argv[1:] if name != "--fixtures")
