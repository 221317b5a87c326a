"""What one rank keeps of gradients that the model has not had yet: a record to save, to load, and to hand on.

It names tensors, not buckets: the layout may be another one when it is loaded. The rules that draw at random need no
state: they are seeded by rank and step.
"""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import math
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dgc_horovod.config import FROZEN, OWN
from dgc_horovod.errors import CheckpointError
from dgc_horovod.exchange.topology import Topology

_log = logging.getLogger("dgc_horovod")
FORMAT = 1
# residual v, momentum u, Adam's moments, what the rank owes of what it owns (zero where others own), and a second
# moment that all ranks have
RESIDUAL, MOMENTUM, FIRST, SECOND, REMAINDER, SHARED = PARTS = ("v", "u", "first", "second", "remainder", "shared")
_HEAD, _GUESS = "head", "thresholds"
FROZEN_SINCE = (  # what may be behind it where other tensors are trained than before, and what to do
    "a layer was frozen or thawed since they were saved, or it is another model. Train the same layers, call flush() "
    'before saving to change them, or pass residuals="ignored": what was not sent is lost then'
)
UNDECIDED = "undecided"  # mode of a job that chooses an exchange by its clock, and has not
Arrays = dict[str, np.ndarray]  # by one of PARTS; flat float32


def combining(averages: bool) -> str:
    """In words, what the ranks do with their gradients."""
    return "averaging" if averages else "summing"


@dataclass
class ResidualState:
    """The state of one rank.

    Args:
        rank, workers: index of the rank, 0 <= rank < workers, and N.
        averages: whether the ranks' gradients are averaged or summed.
        step: number of steps finished, >= 0.
        epoch: last epoch that the density warm-up was told, from 0, or None.
        tensors: arrays kept of each tensor, flat float32, by name of the tensor and part, one of `PARTS`.
        directions: number of Adam's steps so far, by name of the tensor.
        thresholds: `BucketEngine.thresholds`, by bucket; they matter to the Gaussian rule, and are dropped where the
            layout is another one.
        node_size: number of workers of a node, each of which keeps a part of it, G >= 1.
        runs: [index of the first element kept, number of elements of the tensor], by name, of those that are sliced.
        mode: name of the exchange that was at work, where a job chooses among several; else "".
        settled_at: step at which the dense steps ended since Adam's second moment had settled, or None.
        measured: what that is judged by, see `core.settling.Settling`.
        clips: what the script clips, see `torch.clipping.local.records_of`; the same on every rank. In a checkpoint it
            is in the manifest.
        method: what the residuals hold, see `state.method.method_of`; "" in records of earlier versions.
    """

    rank: int
    workers: int
    averages: bool
    step: int = 0
    epoch: int | None = None
    tensors: dict[str, Arrays] = field(default_factory=dict)
    directions: dict[str, int] = field(default_factory=dict)
    thresholds: dict[str, np.ndarray] = field(default_factory=dict)
    node_size: int = 1
    runs: dict[str, list[int]] = field(default_factory=dict)
    mode: str = ""
    settled_at: int | None = None
    measured: list[list[float]] = field(default_factory=list)
    clips: list[list[Any]] = field(default_factory=list)
    method: str = ""

    def __post_init__(self) -> None:
        if self.epoch is not None:
            self.epoch = math.floor(self.epoch)  # a script's may be a float, or NumPy's

    @property
    def clock(self) -> dict[str, Any]:
        """What is the same on every rank, and newcomers take over, by field: where the schedules are."""
        return {name: getattr(self, name) for name in ("step", "epoch", "settled_at", "measured", "mode")}

    def to_dict(self) -> dict[str, Any]:
        """As a dict of plain values and arrays."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> ResidualState:
        """What `to_dict` was called on.

        Raises:
            CheckpointError: it is no such dict.
        """
        try:
            state = cls(**record)
            for name, kind in _KINDS.items():
                _checked(getattr(state, name), kind)
            for name, arrays in state.tensors.items():
                for part, array in arrays.items():
                    _check_array(f"{part!r} of {name!r}", part, array)
            for bucket, thresholds in state.thresholds.items():
                _check_array(f"{_GUESS!r} of {bucket!r}", _GUESS, thresholds)
            _optional(state.settled_at)
            state._check()
            return state
        except (TypeError, ValueError, OverflowError, AttributeError, LookupError) as error:
            raise CheckpointError(f"this is no dict of residual_state_dict() ({error})") from None

    def to_bytes(self) -> bytes:
        """As the bytes of an ``.npz`` file, which holds arrays and no code."""
        head = {name: getattr(self, name) for name in _HEAD_FIELDS}
        names, buckets = list(self.tensors), list(self.thresholds)
        arrays = {f"{i}.{part}": array for i, name in enumerate(names) for part, array in self.tensors[name].items()}
        arrays |= {f"{i}.{_GUESS}": self.thresholds[bucket] for i, bucket in enumerate(buckets)}
        text = json.dumps({"format": FORMAT, **head, "names": names, "buckets": buckets})
        out = io.BytesIO()
        np.savez(out, **{_HEAD: np.frombuffer(text.encode(), np.uint8)}, **arrays)  # type: ignore[arg-type]
        return out.getvalue()

    def carried_on(self, rank: int, workers: int) -> ResidualState:
        """What this rank goes on with as `rank` of `workers`, so that its part of the combined residual stays."""
        if (rank, workers) == (self.rank, self.workers):
            return self
        changed = dataclasses.replace(self.as_one_of_all(), rank=rank, workers=workers)
        if workers == self.workers:
            return changed
        scale = np.float32(workers / self.workers if self.averages else 1.0)
        scaled = {
            name: {part: x * scale if is_linear(part, arrays) else x for part, x in arrays.items() if part != SHARED}
            for name, arrays in changed.tensors.items()
        }
        return dataclasses.replace(changed, tensors=scaled, thresholds={})

    @classmethod
    def from_bytes(cls, data: bytes) -> ResidualState:
        """What `to_bytes` was called on.

        Raises:
            CheckpointError: these are no such bytes.
        """
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                return cls._read({name: arrays[name] for name in arrays.files})
        except CheckpointError:
            raise
        except (
            ValueError, LookupError, TypeError, AttributeError, OSError, EOFError, RuntimeError, MemoryError,
            SyntaxError, NotImplementedError, OverflowError, zipfile.BadZipFile, zlib.error,
        ) as error:  # fmt: skip
            raise CheckpointError(f"a residual file is damaged ({type(error).__name__}: {error})") from None

    @classmethod
    def _read(cls, arrays: Arrays) -> ResidualState:
        head = json.loads(arrays.pop(_HEAD).tobytes())
        if head["format"] != FORMAT:
            raise CheckpointError(f"a residual file has format {head['format']!r}; this version reads {FORMAT}")
        names, buckets = ([_checked(name, str) for name in head[kind]] for kind in ("names", "buckets"))
        state = cls(
            _checked(head["rank"], int),
            _checked(head["workers"], int),
            _checked(head["averages"], bool),
            _checked(head["step"], int),
            head["epoch"],
            {name: {} for name in names},
            {_checked(name, str): _checked(steps, int) for name, steps in head["directions"].items()},
            node_size=_checked(head.get("node_size", 1), int),  # records of earlier versions know no nodes
            runs={name: [_checked(x, int) for x in run] for name, run in head.get("runs", {}).items()},
            mode=_checked(head.get("mode", ""), str),
            settled_at=_optional(head.get("settled_at")),
            measured=[[float(x) for x in each] for each in head.get("measured", [])],
            method=_checked(head.get("method", ""), str),
        )
        for key, array in arrays.items():
            number, part = key.split(".")
            _check_array(key, part, array)
            if part == _GUESS:
                state.thresholds[buckets[int(number)]] = array
            else:
                state.tensors[names[int(number)]][part] = array
        state._check()
        return state

    def _check(self) -> None:
        """Raise ValueError or KeyError unless ranks, steps and runs are possible."""
        if not 0 <= self.rank < self.workers or self.step < 0:
            raise ValueError(f"rank {self.rank} of {self.workers}, step {self.step}")
        if self.node_size < 1 or self.workers % self.node_size:
            raise ValueError(f"nodes of {self.node_size} of {self.workers} workers")
        for name, run in self.runs.items():
            sizes = {array.size for array in self.tensors[name].values()}
            if len(run) != 2 or any(not 0 <= run[0] <= run[0] + size <= run[1] for size in sizes):
                raise ValueError(f"{name!r} keeps {sizes} elements of the run {run}")

    def check_fits(self, name: str, numel: int | None, first: int, last: int) -> None:
        """Raise CheckpointError unless the record has what a rank keeps of a tensor.

        Args:
            name: name of the tensor.
            numel: number of its elements in the model; None: there is no such tensor.
            first, last: index of the first element that is kept, and that behind the last; equal where none is.
        """
        sizes = {array.size for array in self.tensors[name].values()}
        size = max(sizes, default=0)
        start, whole = self.runs.get(name, (0, size))
        if numel is None:
            raise CheckpointError(f"there are residuals of {name!r}, which is not trained now: {FROZEN_SINCE}")
        if len(sizes) != 1 or whole != numel:
            raise CheckpointError(
                f"the residual of {name!r} has {sorted(sizes)} elements, the model's tensor has {numel}; they must be "
                "of the same model"
            )
        if first < last and not start <= first < last <= start + size:
            raise CheckpointError(
                f"this rank keeps {last - first} elements of {name!r} from {first} on, and the residuals have {size} "
                f"from {start} on: they were kept in other buckets. With another bucket_bytes or dense_values "
                "load_checkpoint hands them on; parameter groups must be those of before"
            )

    def as_one_of_all(self) -> ResidualState:
        """The same as a rank keeps it that has no node: zero where the other workers of its node keep something.

        The mean over all ranks is then the mean over nodes that it was, the sum the sum over nodes. What is owed of
        elements that are owned is residual: of other ranks each owns others.
        """
        every = {name: released(arrays) for name, arrays in self.tensors.items()}
        if self.node_size == 1:
            return dataclasses.replace(self, tensors=every)
        tensors: dict[str, Arrays] = {}
        for name, arrays in every.items():
            if name not in self.runs:  # a dense tensor's, the same on all workers of the node
                tensors[name] = arrays
                continue
            start, numel = self.runs[name]
            for part, array in arrays.items():
                is_mean = self.averages or not is_linear(part, arrays)
                whole = tensors.setdefault(name, {})[part] = np.zeros(numel, np.float32)
                whole[start : start + array.size] = array * np.float32(self.node_size if is_mean else 1)
        return dataclasses.replace(self, node_size=1, tensors=tensors, runs={}, thresholds={})


def is_linear(part: str, arrays: Arrays) -> bool:
    """Whether the ranks' arrays of a part add up to what is applied: not those of Adam's own moments.

    The first moment does where there is no second beside it: that is the same on all ranks then.
    """
    return part in (RESIDUAL, MOMENTUM) or (part == FIRST and SECOND not in arrays)


def released(arrays: Arrays) -> Arrays:
    """The arrays of a tensor with the remainder made residual."""
    if REMAINDER not in arrays:
        return arrays
    kept = {part: array for part, array in arrays.items() if part != REMAINDER}
    return {**kept, RESIDUAL: arrays[RESIDUAL] + arrays[REMAINDER]}


def check_moments(state: ResidualState, keeps_second: bool) -> None:
    """Raise CheckpointError where a rank has kept Adam's second moment and will not keep one now, or the reverse."""
    for name, arrays in state.tensors.items():
        if FIRST in arrays and (SECOND in arrays) != keeps_second:
            then, now = (OWN, FROZEN) if SECOND in arrays else (FROZEN, OWN)
            raise CheckpointError(
                f"the residual of {name!r} was kept with second_moment={then!r}, and it is {now!r} now; load it as it "
                'was saved, or pass residuals="ignored" to go on without what the ranks have kept'
            )


_HEAD_FIELDS = (
    "rank", "workers", "averages", "step", "epoch", "node_size", "runs", "directions", "settled_at", "measured", "mode",
    "method",
)  # fmt: skip
_KINDS = {
    "rank": int, "workers": int, "averages": bool, "step": int, "node_size": int, "tensors": dict, "runs": dict,
    "directions": dict, "thresholds": dict, "measured": list, "mode": str, "clips": list, "method": str,
}  # fmt: skip


def _check_array(key: str, part: str, array: np.ndarray) -> None:
    """Raise ValueError unless `array` is one that is kept as `part`, or the thresholds of a bucket."""
    # squares may overflow; of a moment that all have, infinite means never learnt, of a threshold not known
    sound = not np.isnan(array).any() if part in (SECOND, SHARED, _GUESS) else np.isfinite(array).all()
    dtype = np.float64 if part == _GUESS else np.float32
    if part not in (*PARTS, _GUESS) or array.dtype != dtype or array.ndim != 1 or not sound:
        raise ValueError(f"array {key!r} is not a finite {np.dtype(dtype)} vector of a known kind")


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _optional(number: Any) -> int | None:
    return None if number is None else int(_checked(number, int))


def shares(rank: int, workers: int, before: int, averages: bool) -> dict[int, float]:
    """How much of each old rank's residual a new rank takes over, by old rank.

    The old ranks' residuals lie beside each other on [0, 1), the new ranks' too; a new one takes what lies under it.
    The combined residual does not change: ``(1/N) * sum of v`` if gradients are averaged, ``sum of v`` if they are
    summed. From 4 to 2 ranks it is the mean (the sum) of pairs, from 2 to 4 copies (halves).

    Args:
        rank, workers: index of the new rank, 0 <= rank < workers, and number of ranks now; or of the node, and nodes.
        before: number of ranks before, >= 1.
        averages: whether gradients are averaged.
    """
    scale = before if averages else workers
    found = {}
    for old in range(before):  # in units of 1 / (before * workers)
        overlap = min((old + 1) * workers, (rank + 1) * before) - max(old * workers, rank * before)
        if overlap > 0:
            found[old] = overlap / scale
    return found


def needed(topology: Topology, before: int, node_size: int, cut_alike: bool = True) -> list[int]:
    """The old ranks whose states a worker goes on from.

    Args:
        topology: place of the worker now.
        before, node_size: number of ranks before, and of those of a node.
        cut_alike: whether the buckets are those of before, and with them what each worker of a node keeps.
    """
    if _goes_on(topology, before, node_size, cut_alike):
        return [topology.rank]
    return list(shares(topology.node, topology.nodes, before, averages=True))


def _goes_on(topology: Topology, before: int, node_size: int, cut_alike: bool) -> bool:
    """Whether a worker goes on from its own state; what is kept whole fits into any buckets."""
    return (before, node_size) == (topology.workers, topology.node_size) and (cut_alike or node_size == 1)


def handed_on(states: Mapping[int, ResidualState], topology: Topology, cut_alike: bool = True) -> ResidualState:
    """The state of a worker, from those of the old ranks that `needed` names.

    Where it shares its node, it is that of all its workers together: each takes what it keeps of it.

    Args:
        states: states of old ranks, by rank, at least one; one that is lost is left out, and counts as zero.
        topology: place of the worker now.
        cut_alike: see `needed`.
    """
    rank, workers, one = topology.rank, topology.workers, next(iter(states.values()))
    if _goes_on(topology, one.workers, one.node_size, cut_alike) and rank in states:
        return states[rank]
    made = ResidualState(rank, workers, one.averages, one.step, one.epoch, node_size=topology.node_size)
    made.settled_at, made.measured, made.mode, made.method = one.settled_at, one.measured, one.mode, one.method
    weights = shares(topology.node, topology.nodes, one.workers, one.averages)
    means = shares(topology.node, topology.nodes, one.workers, averages=True)  # Adam's moments are never summed
    anew = set() if _of_whole_nodes(states, means) else _with_second(states)
    if anew and rank == 0:
        _log.warning(
            "dgc_horovod: Adam's moments are dropped, and learnt anew: each worker of a node has kept a part of them, "
            "and the workers are placed otherwise now"
        )
    for old, state in states.items():
        for name, count in state.directions.items():
            if name not in anew:
                made.directions[name] = max(count, made.directions.get(name, 0))
        for name, arrays in state.as_one_of_all().tensors.items():
            for part, array in arrays.items():
                if part == SHARED:  # the optimizer's own slots have it; a mean would not have its bits
                    continue
                if part in (FIRST, SECOND) and name in anew:  # a second moment of zeros would make huge steps
                    continue
                weight = (weights if is_linear(part, arrays) else means).get(old, 0.0)
                ours = made.tensors.setdefault(name, {})
                taken = array * np.float32(weight)
                ours[part] = ours[part] + taken if part in ours else taken
    return made


def _of_whole_nodes(states: Mapping[int, ResidualState], shares_of: Mapping[int, float]) -> bool:
    """Whether all workers of a node come together, in equal shares: what is no residual is whole then only."""
    size = next(iter(states.values())).node_size
    for start in {old // size * size for old in shares_of}:
        if len({shares_of.get(old, 0.0) if old in states else 0.0 for old in range(start, start + size)}) > 1:
            return False
    return True


def _with_second(states: Mapping[int, ResidualState]) -> set[str]:
    """Names of the tensors of which any has a second moment of its own."""
    return {name for state in states.values() for name, arrays in state.tensors.items() if SECOND in arrays}
