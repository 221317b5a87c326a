"""The record of one rank's residuals, which is saved, loaded, and redistributed to other ranks.

It names tensors, not buckets: the layout may be different when it is loaded. Rules that draw at random need no state:
they are seeded by rank and step.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dgc_horovod.errors import CheckpointError, shown
from dgc_horovod.state import kinds
from dgc_horovod.state.kinds import SWITCH, TEXT, Kind, checked, list_of, mapping_of, whole

FORMAT = 1
# residual v, momentum u, moments of Adam with local steps, remainder of a shard owner (zero where others own)
RESIDUAL, MOMENTUM, FIRST, SECOND, REMAINDER = PARTS = ("v", "u", "first", "second", "remainder")
_HEAD, _GUESS, _FACTORED = "head", "thresholds", "factored"
FROZEN_SINCE = (  # the probable cause if other tensors are trained than before, and what to do
    "a layer was frozen or thawed since they were saved, or it is another model. Train the same layers, call flush() "
    'before saving to change them, or pass residuals="ignored", which drops them'
)
UNDECIDED = "undecided"  # mode of a job of compression auto before its choice
EARLIER_FP16 = "fp16"  # stock's exchange in half precision, which earlier versions may have chosen
MODES = ("", UNDECIDED, EARLIER_FP16, "dense", "compressed")  # the others are those of `planning.trial`
Arrays = dict[str, np.ndarray]  # by one of PARTS; flat float32


def combining(averages: bool) -> str:
    """Return "averaging" or "summing", for messages."""
    return "averaging" if averages else "summing"


@dataclass
class ResidualState:
    """The state of one rank.

    Args:
        rank, workers: index of the rank, 0 <= rank < workers, and N.
        averages: whether the ranks' gradients are averaged or summed.
        step: number of steps finished, >= 0.
        epoch: last epoch that the density warm-up was told, from 0, or None.
        tensors: state of each tensor, flat float32 arrays, by name of the tensor and part, one of `PARTS`.
        directions: number of Adam's steps so far, by name of the tensor, with local steps.
        thresholds: `BucketEngine.thresholds`, by bucket; they matter to the Gaussian rule, and are dropped if the
            layout is different.
        node_size: number of workers of a node, each of which has a slice of it, G >= 1.
        runs: [index of the first element here, number of elements of the tensor], by name, of sliced tensors.
        mode: name of the exchange in use, if a job chooses among several; else "".
        second: Adam's second moment, see `core.second_moment`, by name of the tensor; the same on every rank.
        clips: clipping by the script, see `put` in `torch.gradients.clipping`; the same on every rank. A checkpoint has
            it in the manifest.
        method: content of the residuals, see `state.parts`; "" in records of earlier versions.
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
    second: Arrays = field(default_factory=dict)
    clips: list[list[Any]] = field(default_factory=list)
    method: str = ""

    @property
    def shared(self) -> dict[str, Any]:
        """Fields that are equal on every rank, and that newcomers take over."""
        return {name: getattr(self, name) for name in ("step", "epoch", "mode", "second", "clips")}

    def renamed(self, name_of: Callable[[str], str]) -> ResidualState:
        """Return a copy with other names of tensors."""
        every = {name: getattr(self, name) for name in ("tensors", "runs", "second")}
        renamed: dict[str, Any] = {name: {name_of(tensor): x for tensor, x in of.items()} for name, of in every.items()}
        return dataclasses.replace(self, **renamed)

    def to_dict(self) -> dict[str, Any]:
        """Return it as a dict of plain values and arrays."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> ResidualState:
        """Make a record from the dict of `to_dict`.

        Raises:
            CheckpointError: it is no such dict.
        """
        state = cls(**checked(_NO_DICT, record, _OF_DICT, _EARLIER))
        if unknown := [name for name in record if name not in _OF_DICT]:
            raise CheckpointError(f"{_NO_DICT}: there is no field {shown(unknown[0])}")
        for name, arrays in state.tensors.items():
            for part, array in arrays.items():
                _check_array(_NO_DICT, f"tensors.{name}.{part}", part, array)
        for bucket, thresholds in state.thresholds.items():
            _check_array(_NO_DICT, f"thresholds.{bucket}", _GUESS, thresholds)
        for name, second in state.second.items():
            _check_array(_NO_DICT, f"second.{name}", _FACTORED, second)
        state._check(_NO_DICT)
        return state

    def to_bytes(self) -> bytes:
        """Return it as the bytes of an ``.npz`` file, which holds arrays and no code."""
        head = {name: getattr(self, name) for name in _OF_RECORD}
        names, buckets = list(self.tensors), list(self.thresholds)
        arrays = {f"{i}.{part}": array for i, name in enumerate(names) for part, array in self.tensors[name].items()}
        arrays |= {f"{i}.{_GUESS}": self.thresholds[bucket] for i, bucket in enumerate(buckets)}
        arrays |= {f"{i}.{_FACTORED}": self.second[name] for i, name in enumerate(names) if name in self.second}
        return to_npz({"format": FORMAT, **head, "names": names, "buckets": buckets}, arrays)

    def carried_on(self, rank: int, workers: int) -> ResidualState:
        """Return the record for this rank as `rank` of `workers`, with the same part of the combined residual."""
        if (rank, workers) == (self.rank, self.workers):
            return self
        changed = dataclasses.replace(self.as_one_of_all(), rank=rank, workers=workers)
        if workers == self.workers:
            return changed
        scale = np.float32(workers / self.workers if self.averages else 1.0)
        scaled = {
            # not the moments of an optimizer with local steps, which are this rank's own
            name: {part: x * scale if part in (RESIDUAL, MOMENTUM) else x for part, x in arrays.items()}
            for name, arrays in changed.tensors.items()
        }
        return dataclasses.replace(changed, tensors=scaled, thresholds={})

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "a residual file") -> ResidualState:
        """Read a record from the bytes of `to_bytes`.

        Args:
            data: bytes of the file.
            name: name of the file, for messages.

        Raises:
            CheckpointError: the bytes are not those of a record.
        """
        what = f"{name} is damaged"
        head, arrays = from_npz(what, data)
        fields = checked(what, head, _OF_HEAD, _EARLIER)
        if fields.pop("format") != FORMAT:
            raise CheckpointError(f"{name} has format {head['format']}; this version reads {FORMAT}")
        names, buckets = fields.pop("names"), fields.pop("buckets")
        state = cls(**fields, tensors={each: {} for each in names})
        for key, array in arrays.items():
            number, _, part = key.partition(".")
            owners = buckets if part == _GUESS else names
            if not (number.isdecimal() and number.isascii() and int(number) < len(owners)):
                raise CheckpointError(f"{what}: array {key!r} is of none of its {len(owners)} names")
            _check_array(what, key, part, array)
            if part == _GUESS:
                state.thresholds[buckets[int(number)]] = array
            elif part == _FACTORED:
                state.second[names[int(number)]] = array
            else:
                state.tensors[names[int(number)]][part] = array
        state._check(what)
        return state

    def _check(self, what: str) -> None:
        """Raise CheckpointError unless the fields go together. `what`: begin of the message."""
        if self.rank >= self.workers:
            raise CheckpointError(f"{what}: rank {self.rank} must be below workers, {self.workers}")
        if self.workers % self.node_size:
            raise CheckpointError(f"{what}: node_size {self.node_size} must divide workers, {self.workers}")
        for name, (first, numel) in self.runs.items():
            sizes = {array.size for array in self.tensors.get(name, {}).values()}
            if name not in self.tensors or any(first + size > numel for size in sizes):
                raise CheckpointError(f"{what}: runs.{name} is [{first}, {numel}], and {sorted(sizes)} are kept of it")
        for name, arrays in self.tensors.items():
            if REMAINDER in arrays and (RESIDUAL not in arrays or arrays[RESIDUAL].size != arrays[REMAINDER].size):
                raise CheckpointError(
                    f"{what}: {REMAINDER!r} of {name!r} must go with as many elements of {RESIDUAL!r}"
                )

    def check_fits(self, name: str, numel: int | None, first: int, last: int) -> None:
        """Raise CheckpointError unless the record has the elements that a rank needs of a tensor.

        Args:
            name: name of the tensor.
            numel: number of its elements in the model; None: there is no such tensor.
            first, last: index of the first element, and the index behind the last one; equal if there is none.
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
                f"this rank needs {last - first} elements of {name!r} from {first} on, and the record has {size} from "
                f"{start} on: it was saved with other buckets. load_checkpoint redistributes residuals if bucket_bytes "
                "or dense_values have changed; parameter groups must be the same as before"
            )

    def as_one_of_all(self) -> ResidualState:
        """Return the record without nodes: whole tensors, zero where other workers of the node have their slices.

        The mean over all ranks is then the mean over nodes that it was: nodes never add gradients up. The remainder of
        a shard owner becomes residual: other ranks own other elements.
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
                whole = tensors.setdefault(name, {})[part] = np.zeros(numel, np.float32)
                whole[start : start + array.size] = array * np.float32(self.node_size)
        return dataclasses.replace(self, node_size=1, tensors=tensors, runs={}, thresholds={})


def to_npz(head: Mapping[str, Any], arrays: Arrays) -> bytes:
    """Return the bytes of an ``.npz`` file of `arrays`, with `head` in JSON."""
    out = io.BytesIO()
    text = np.frombuffer(json.dumps(head).encode(), np.uint8)
    np.savez(out, **{_HEAD: text}, **arrays)  # type: ignore[arg-type]
    return out.getvalue()


def from_npz(what: str, data: bytes) -> tuple[Any, Arrays]:
    """Return head and arrays of `to_npz`; neither is checked, and nothing in them is executed.

    Args:
        what: begin of the message.
        data: content of the file.

    Raises:
        CheckpointError: the bytes are not those of such a file.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as found:
            arrays = {key: found[key] for key in found.files}
        return json.loads(arrays.pop(_HEAD).tobytes()), arrays
    except Exception as error:  # of zipfile, zlib, NumPy or JSON, any kind
        raise CheckpointError(f"{what} ({type(error).__name__}: {error})") from None


def released(arrays: Arrays) -> Arrays:
    """Return the arrays of a tensor with the remainder added to the residual."""
    if REMAINDER not in arrays:
        return arrays
    kept = {part: array for part, array in arrays.items() if part != REMAINDER}
    return {**kept, RESIDUAL: arrays[RESIDUAL] + arrays[REMAINDER]}


_ARRAY = Kind("an array", lambda x: isinstance(x, np.ndarray))
_RUN = kinds.tuple_of(whole(0), whole(0))
CLIPS = list_of(kinds.tuple_of(list_of(TEXT), kinds.NUMBER, kinds.optional(kinds.NUMBER), SWITCH))
COMMON = {  # fields that the manifest has as well
    "workers": whole(1), "averages": SWITCH, "step": whole(0), "epoch": kinds.optional(whole(1 - 2**63)),
    "node_size": whole(1), "mode": kinds.one_of(*MODES),
}  # fmt: skip
_OF_RECORD = {
    **COMMON, "rank": whole(0), "directions": mapping_of(whole(0)), "runs": mapping_of(_RUN), "method": TEXT,
}  # fmt: skip
_OF_HEAD = {**_OF_RECORD, "format": whole(0), **dict.fromkeys(("names", "buckets"), list_of(TEXT, distinct=True))}
_OF_DICT = {
    **_OF_RECORD, "clips": CLIPS, "tensors": mapping_of(mapping_of(_ARRAY)), "thresholds": mapping_of(_ARRAY),
    "second": mapping_of(_ARRAY),
}  # fmt: skip
_EARLIER = ("node_size", "runs", "mode", "clips", "method", "second")  # unknown to earlier versions
_NO_DICT = "this is no dict of residual_state_dict()"


def _check_array(what: str, key: str, part: str, array: np.ndarray) -> None:
    """Raise CheckpointError unless `array` is one that is kept as `part`, or the thresholds of a bucket."""
    dtype = np.dtype(np.float64 if part in (_GUESS, _FACTORED) else np.float32)
    if part not in (*PARTS, _GUESS, _FACTORED) or array.dtype != dtype or array.ndim != 1:
        raise CheckpointError(
            f"{what}: array {key!r} must be a {dtype} vector of a known kind, got {array.dtype}, shape {array.shape}"
        )
    # squares may overflow; of a threshold, infinite means not known
    if np.isnan(array).any() if part in (SECOND, _GUESS) else not np.isfinite(array).all():
        raise CheckpointError(f"{what}: array {key!r} must be finite")
    if part == _FACTORED and (array < 0).any():
        raise CheckpointError(f"{what}: array {key!r} must not be negative")
