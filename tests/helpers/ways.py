"""How scripts train, as a table that every adapter follows: what a change of the insides must leave as it was."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import numpy as np

from dgc_horovod import WarmupSchedule
from dgc_horovod.planning.trial import COMPRESSED, DENSE
from dgc_horovod.session.auto import Choice
from tests.helpers.transcripts import Transcript, hash_of, parts_of

INPUTS, BATCH, EPOCH = 32, 16, 3  # steps of an epoch
LIMIT = 0.3  # of a script's own clipping: most gradients are beyond it
CHECKPOINTS = Path(__file__).parents[1] / "fixtures" / "checkpoints"
ALL = TORCH, DDP, KERAS = "torch", "ddp", "keras"
_SMALL: dict[str, Any] = {"density": 0.05, "min_numel": 16, "bucket_bytes": 5_000}
_FIELDS: dict[str, dict[str, Any]] = {
    "local": {"steps": 4, "density": 0.1, "min_numel": 16},
}


@dataclass(frozen=True)
class Way:
    """What a script does.

    Args:
        method: preset of ``Compression``.
        fields: of it, beside those that make a small model several buckets.
        optimizer: one of those that each adapter has under this name.
        steps: number of steps, >= 1.
        passes: backward passes of each.
        clip: where the script clips its gradients: "before" the exchange or "after" it; Keras by ``global_clipnorm``.
        epochs: whether it tells the epoch.
        spoilt: step in which a gradient of rank 1 is not finite; -1: none.
        uneven: whether rank 0 has fewer batches, and waits for the others in join.
        middle: what it does after `at` steps: "flush", "save" (the rest is then trained three times), or nothing.
        width: of the model's first layer.
        on: adapters that can.
    """

    method: str = "dgc"
    fields: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "SGD"
    steps: int = 10
    passes: int = 1
    clip: str = ""
    epochs: bool = False
    spoilt: int = -1
    uneven: bool = False
    middle: str = ""
    at: int = 5
    width: int = 48
    on: tuple[str, ...] = ALL

    def compression(self, presets: Any) -> Any:
        """Its compression, of an adapter's presets."""
        return getattr(presets, self.method)(**{**_FIELDS.get(self.method, _SMALL), **self.fields})

    def batch(self, rank: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """A batch of a rank, counted from 0: inputs, and what is to be learnt of them."""
        x = np.random.default_rng([rank, number]).standard_normal((BATCH, INPUTS), np.float32)
        spoils = rank == 1 and number // self.passes == self.spoilt
        return x, x[:, :4].sum(1, keepdims=True) * np.float32(np.nan if spoils else 1)

    def length(self, rank: int) -> int:
        """Number of steps of a rank."""
        return self.steps // 2 if self.uneven and rank == 0 else self.steps


_DENSE = WarmupSchedule(steps=4, first_density=1.0, factor=1e-3)
_ADAMW: dict[str, Any] = {"optimizer": "AdamW"}

WAYS = {
    "SGD": Way(),
    "Nesterov, decay": Way(optimizer="Nesterov"),
    "AdamW": Way(**_ADAMW),
    "AdamW, dense warm-up": Way(fields={"warmup": _DENSE}, **_ADAMW),
    "AdamW, topk": Way("topk", **_ADAMW),
    "RMSprop": Way(optimizer="RMSprop"),
    "auto": Way("auto", steps=15),
    "auto, AdamW": Way("auto", steps=15, **_ADAMW),
    "local": Way("local", steps=11),
    "local, AdamW": Way("local", steps=11, **_ADAMW),
    "clipped before the exchange": Way(clip="before"),
    "clipped after the exchange": Way(clip="after", on=(TORCH,)),
    "clipped, AdamW": Way(clip="before", **_ADAMW),
    "two passes": Way(passes=2, steps=8),
    "two passes, AdamW": Way(passes=2, steps=8, **_ADAMW),
    "epochs": Way(epochs=True, fields={"warmup": WarmupSchedule(epochs=3)}),
    "not finite": Way(spoilt=4),
    "not finite, AdamW": Way(spoilt=4, **_ADAMW),
    "flushed": Way(middle="flush"),
    "flushed, AdamW": Way(middle="flush", **_ADAMW),
    "saved": Way(middle="save"),
    "saved, AdamW": Way(middle="save", fields={"warmup": _DENSE}, **_ADAMW),
    "saved, RMSprop": Way(middle="save", optimizer="RMSprop"),
    "saved, local": Way("local", middle="save", at=6, steps=13),
    "saved, local, AdamW": Way("local", middle="save", at=6, steps=13, **_ADAMW),
    "saved, auto": Way("auto", middle="save", at=14, steps=18),
    "saved, clipped": Way(middle="save", clip="before"),
    "sharded": Way(fields={"exchange": "sharded"}, on=(DDP,)),
    "clip_norm": Way(fields={"clip_norm": 0.5}, on=(DDP,)),
    "4bit": Way(fields={"values": "4bit"}, on=(DDP,)),
    "dense fp16": Way(fields={"dense_values": "fp16"}, on=(DDP,)),
    **{method: Way(method, on=(DDP,)) for method in ("topk", "sampled", "gaussian")},
    "uneven": Way(uneven=True, on=(TORCH,)),
    "uneven, AdamW": Way(uneven=True, on=(TORCH,), **_ADAMW),
}
_ON_NODES = (
    *("SGD", "Nesterov, decay", "AdamW", "RMSprop", "epochs", "not finite"),
    *("flushed", "flushed, AdamW", "saved", "saved, AdamW"),
)
_QUICK_ON_KERAS = (  # where to trace a step takes a second
    *("SGD", "Nesterov, decay", "AdamW, dense warm-up", "RMSprop", "auto", "local, AdamW"),
    *("clipped before the exchange", "two passes", "epochs", "not finite", "flushed", "saved", "saved, AdamW"),
)

_TINY: dict[str, Any] = {"steps": 6, "width": 12}
FIXTURES: dict[str, Way] = {
    "torch-sgd": Way(**_TINY, on=(TORCH,)),
    "torch-adamw": Way(**_TINY, on=(TORCH,), **_ADAMW),
    "torch-local": Way("local", **_TINY, on=(TORCH,)),
    "torch-auto": Way("auto", steps=14, width=12, on=(TORCH,)),
    "torch-nodes": Way(**_TINY, on=(TORCH,)),
    "ddp-sgd": Way(**_TINY, on=(DDP,)),
    "keras-sgd": Way(**_TINY, on=(KERAS,)),
    "keras-adamw": Way(**_TINY, on=(KERAS,), **_ADAMW),
}


class Training(Protocol):
    """A model and its optimizer, as an adapter makes them of a `Way` and a seed."""

    optimizer: Any
    rank: int

    def step(self, number: int) -> None:
        """One step, counted from 0."""

    def save(self, place: Path) -> None:
        """Save a checkpoint."""

    def load(self, place: Path) -> None:
        """Load one."""

    def weights(self) -> np.ndarray:
        """All of them, as one vector."""

    def state(self) -> Iterable[Any]:
        """The optimizer's own, arrays or numbers."""


Made = Callable[..., Any]  # (way, seed) -> Training


_begin, _time, _own = Choice.begin, Choice._time, Choice.own


def _begin_scripted(choice: Any) -> None:
    choice.script = [COMPRESSED, DENSE, COMPRESSED]
    _begin(choice)


def _time_three(choice: Any, mode: str) -> None:
    _time(choice, mode)
    choice._untimed, choice._timed = 2, 1


def _decide_by_script(choice: Any, seconds: float, expected: Any) -> None:
    choice.seconds[choice.mode] = 1.0
    choice._time(choice.script.pop(0))
    if not choice.script:
        choice.stay()


def scripted() -> Any:
    """While it is entered, ``Compression.auto`` goes from each exchange to the other after three steps, always."""
    script: dict[str, Any] = {
        "begin": _begin_scripted,
        "_time": _time_three,
        "own": lambda *link: [1.0, 1.0, 0.0, *_own(*link)[3:]],
        "decide": _decide_by_script,
    }
    return mock.patch.multiple(Choice, **script)


def follow_all(adapter: str, made: Made, part: str = "", join: Callable[[], Any] = lambda: None) -> dict[str, Any]:
    """Every way that an adapter can: name -> hashes on this rank; `part`: "quick" ones, the "other", or "nodes"."""
    found = {}
    for name, way in WAYS.items():
        fits = {"": True, "quick": name in _QUICK_ON_KERAS, "other": name not in _QUICK_ON_KERAS}
        if adapter not in way.on or not {**fits, "nodes": name in _ON_NODES}[part]:
            continue
        with scripted():
            found[name] = _follow(name, _over_nodes(way) if part == "nodes" else way, made, join)
    return found


def _over_nodes(way: Way) -> Way:
    return dataclasses.replace(way, fields={**way.fields, "exchange": "hierarchical"})


def _follow(name: str, way: Way, made: Made, join: Callable[[], Any]) -> dict[str, Any]:
    place, training = Path(os.environ["DGC_TEST_FOLDER"], name), made(way, 0)
    length = way.length(training.rank)
    at = min(way.at, length)
    with Transcript() as sent:
        _train(training, way, 0, at)
        if way.middle == "flush":
            training.optimizer.flush()
        if way.middle == "save":
            training.save(place)
        _train_on(training, way, at, length)
        if way.uneven:
            join()
            _train(training, way, way.steps, way.steps + 2)
    found = {"packets": sent.packets(), **_kept(training)}
    if way.middle == "save":
        for which, again in (("resumed", made(way, 1)), ("gone back", training)):
            again.load(place)
            _train_on(again, way, at, length)
            other = [part for part, bits in _kept(again).items() if bits != found[part] and part != "stats"]
            found[which] = f"other {', '.join(other)}" if other else "same"
    return found


def _train(training: Any, way: Way, first: int, last: int) -> None:
    for number in range(first, last):
        if way.epochs and number % EPOCH == 0:
            training.optimizer.set_epoch(number // EPOCH)
        training.step(number)


def _train_on(training: Any, way: Way, first: int, last: int) -> None:
    """To the end, between two rounds of local steps."""
    _train(training, way, first, last)
    if way.method == "local":
        training.optimizer.exchange()


def _kept(training: Any) -> dict[str, Any]:
    """Hashes of what a training is, and what it has exchanged."""
    stats = training.optimizer.compression_stats()
    return {
        "residuals": hash_of(parts_of(training.optimizer.residual_state_dict().get("tensors", {}))),
        "state": hash_of(("", each) for each in training.state()),
        "weights": hash_of([("", training.weights())]),
        "stats": {key: stats[key] for key in ("steps", "selected", "bytes_sent")},
    }


def _fixtures(adapter: str, on_nodes: bool) -> dict[str, Way]:
    return {name: way for name, way in FIXTURES.items() if adapter in way.on and on_nodes == name.endswith("-nodes")}


def write_fixtures(adapter: str, made: Made, on_nodes: bool = False) -> dict[str, Any]:
    """Write the checkpoints of `FIXTURES`."""
    for name, way in _fixtures(adapter, on_nodes).items():
        with scripted():
            training = made(_over_nodes(way) if on_nodes else way, 0)
            _train(training, way, 0, way.steps)
            training.save(CHECKPOINTS / name)
    return {}


def read_fixtures(adapter: str, made: Made, workers: int) -> dict[str, Any]:
    """Load them, and train on: "loaded NAME", which every machine has alike, and "NAME, trained on".

    Other ranks than have chosen choose again, by allreduce: the order of whose sums is not ours where there are three.
    """
    found = {}
    for name, way in {**_fixtures(adapter, False), **_fixtures(adapter, True)}.items():
        with scripted():
            training = made(way, 1)
            training.load(CHECKPOINTS / name)
            found[f"loaded {name}"] = {part: x for part, x in _kept(training).items() if part != "stats"}
            if way.method == "auto" and workers > 2:
                continue
            with Transcript() as sent:
                _train(training, way, way.steps, way.steps + 4)
            found[f"{name}, trained on"] = {"packets": sent.packets(), **_kept(training)}
    return found
