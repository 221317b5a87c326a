"""Checkpoints that somebody has changed and sealed again, so that every digest fits."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dgc_horovod.state.manifest import MANIFEST, digest
from tests.helpers.errors import error_of
from tests.helpers.on_ranks import same_on_ranks

GONE = object()  # a field that is to be taken away
JUNK = (
    GONE, None, "text", "", "\ud800", -1, -(2**80), 2**80, 10**400, 0.5, float("nan"), float("inf"), True, [], [None],
    [[1]], {}, {"a": {"b": 1}},
)  # fmt: skip


def with_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest in place, and seal it."""
    body = json.loads((folder / MANIFEST).read_text())
    del body["digest"]
    change(body)
    body["digest"] = digest(json.dumps(body, sort_keys=True).encode())
    (folder / MANIFEST).write_text(json.dumps(body))


def with_file(folder: Path, key: str, change: Callable[[bytes], bytes]) -> None:
    """Change the bytes of a file that the manifest names by `key`, and seal both."""

    def seal(body: dict[str, Any]) -> None:
        file = body["files"][key]
        data = change((folder / file["name"]).read_bytes())
        (folder / file["name"]).write_bytes(data)
        file["nbytes"], file["digest"] = len(data), digest(data)

    with_manifest(folder, seal)


def of_npz(change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """For `with_file`: `change` is given head and arrays of an ``.npz`` file."""

    def changed(data: bytes) -> bytes:
        with np.load(io.BytesIO(data)) as found:
            arrays = {name: found[name] for name in found.files}
        head = json.loads(arrays.pop("head").tobytes())
        change(head, arrays)
        out = io.BytesIO()
        np.savez(out, head=np.frombuffer(json.dumps(head).encode(), np.uint8), **arrays)
        return out.getvalue()

    return changed


def places(record: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything that stands in mappings and lists."""
    items = record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def there(record: Any, path: tuple[Any, ...]) -> Any:
    """What stands at `path`."""
    for key in path:
        record = record[key]
    return record


def replaced(record: Any, path: tuple[Any, ...], junk: Any) -> Any:
    """A copy of `record` with `junk` at `path`."""
    made = copy.deepcopy(record)
    place = there(made, path[:-1])
    if junk is GONE:
        del place[path[-1]]
    else:
        place[path[-1]] = junk
    return made


def of_torch(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """For `with_file`: `change` is given what ``torch.save`` has written."""
    import torch

    def changed(data: bytes) -> bytes:
        saved = torch.load(io.BytesIO(data), weights_only=True)
        change(saved)
        out = io.BytesIO()
        torch.save(saved, out)
        return out.getvalue()

    return changed


def _texts(head: dict[str, Any], arrays: dict[str, Any]) -> None:
    head["directions"] = ["a"]


# The same for every adapter: what is changed, by what is in the error.
OF_ALL: dict[str, Callable[[Path], Any]] = {
    "manifest.json is damaged: config must be": lambda folder: with_manifest(folder, lambda m: m.update(config="dgc")),
    "manifest.json is damaged: workers is 99": lambda folder: with_manifest(folder, lambda m: m.update(workers=99)),
    "rank1.npz is damaged: directions must be": lambda folder: with_file(folder, "rank 1", of_npz(_texts)),
    "rank1.npz is not what manifest.json says: mode is 'fp16'": lambda folder: with_file(
        folder, "rank 1", of_npz(lambda head, arrays: head.update(mode="fp16"))
    ),
}


def _of_another_shape(saved: dict[str, Any]) -> None:
    last = list(saved["model"])[-1]  # all others would have been loaded before it
    saved["model"][last] = saved["model"][last].repeat(2)


def _of_another_momentum(saved: dict[str, Any]) -> None:
    state = saved["optimizer"]["state"][0]
    state["momentum_buffer"] = state["momentum_buffer"].reshape(-1)


OF_TORCH: dict[str, Callable[[Path], Any]] = {
    **OF_ALL,
    "model.bin, does not fit the model: ": lambda folder: with_file(folder, "model", of_torch(_of_another_shape)),
    "optimizer.state[0].momentum_buffer must be a tensor of shape": lambda folder: with_file(
        folder, "model", of_torch(_of_another_momentum)
    ),
}


def _of_another_length(head: dict[str, Any], arrays: dict[str, Any]) -> None:
    last = max(arrays, key=int)
    arrays[last] = arrays[last][1:]


OF_KERAS: dict[str, Callable[[Path], Any]] = {
    **OF_ALL,
    "must be a vector of": lambda folder: with_file(folder, "model", of_npz(_of_another_length)),
}


def check_sealed(run: Any, folder: Path) -> None:
    """Each attack on a checkpoint of `run` is the same error on every rank, and nothing has changed."""
    adapter = run.adapter
    for words, attack in (OF_KERAS if adapter.kind == "keras" else OF_TORCH).items():
        before = _bits(run)
        adapter.barrier()
        sound = {file: file.read_bytes() for file in folder.iterdir()}
        adapter.barrier()
        if adapter.rank == 0:
            attack(folder)
        adapter.barrier()
        error = error_of(lambda: run.load(folder))
        assert error.startswith("CheckpointError: ") and words in error, (words, error)
        assert _bits(run) == before, words
        same_on_ranks(error)
        adapter.barrier()
        for file, data in sound.items() if adapter.rank == 0 else ():
            file.write_bytes(data)
        adapter.barrier()


def _bits(run: Any) -> list[Any]:
    """All that a load may change."""
    return [run.print, run.kept_bits, [slot.tobytes() for slot in run.slots()]]
