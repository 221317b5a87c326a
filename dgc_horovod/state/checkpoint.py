"""A checkpoint directory: a file of residuals for each rank, one of the model, and a manifest that is written last.

Every file is written beside its place and moved there when it is complete, under a name that no other save has used:
the manifest names either all files of this save, or all of the one before. Files are never executed.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import math
import os
import re
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dgc_horovod import files
from dgc_horovod.config import DGCConfig
from dgc_horovod.config_check import Gatherer, shared_from, together
from dgc_horovod.errors import CheckpointError
from dgc_horovod.exchange.hierarchical import Topology
from dgc_horovod.settings import check_choice
from dgc_horovod.state.manifest import MANIFEST, OF_ALL, File, Manifest, digest
from dgc_horovod.state.parts import CHANGES, handed_on, left_of, needed
from dgc_horovod.state.residual_state import UNDECIDED, ResidualState, combining

_log = logging.getLogger("dgc_horovod")
MODEL = "model"
CALLS = "save_checkpoint or load_checkpoint, which every rank must call"  # named when a wait times out
_PREFIX = "dgc-"  # of every file but the manifest
_OURS = re.compile(rf"{_PREFIX}([0-9a-f]{{8}})(\.part|-rank\d+\.npz|-model\.\w+)")
REQUIRED, IF_SOUND, IGNORED = RESIDUALS = ("required", "if sound", "ignored")


@dataclass(frozen=True)
class Content:
    """The content of a checkpoint from one rank.

    Args:
        holds: digest of the saved optimizer, see `Manifest`.
        model: bytes of the model's file; those of rank 0 are written.
        state: residuals of this rank; None: there are none.
        config: compression settings; None: there are none.
    """

    holds: str
    model: bytes
    state: ResidualState | None
    config: DGCConfig | None


def digest_of_names(names: Iterable[str], process_set_id: int) -> str:
    """Digest of the names, for `Manifest.holds`."""
    return digest("\n".join([str(process_set_id), *names]).encode())


def save(given: str | os.PathLike[str], collectives: Gatherer, make: Callable[[], Content]) -> None:
    """Write a checkpoint; called on every rank. It replaces the one before once all is written.

    Args:
        given: path of the directory, made if it is not there; other files in it are left alone.
        collectives: transport of the ranks that save.
        make: function that makes the content; its error is raised on every rank.

    Raises:
        CheckpointError: on every rank, if any could not write; the checkpoint before is kept then.
    """
    token = shared_from(collectives, secrets.token_hex(4).encode(), "token").decode()
    with together(collectives, "saving a checkpoint"):
        directory = _directory(given)
    try:
        lasts = _save(directory, collectives, make, token)
    except CheckpointError:
        _remove(directory, lambda found: found == token)  # a full disk would stay full
        raise
    if lasts:
        _remove(directory, lambda found: found != token)  # earlier saves, and files of interrupted ones


def _directory(given: object) -> Path:
    """Return the path. Raises CheckpointError for anything else, also for "", the current folder."""
    if not isinstance(given, (str, os.PathLike)) or not os.fspath(given):
        raise CheckpointError(f'the directory must be a path, got {given!r}; for the current folder pass "."')
    return Path(given)


def _save(directory: Path, collectives: Gatherer, make: Callable[[], Content], token: str) -> bool:
    """Save; return whether the new manifest is surely on the disk; if not, a crash may bring back the one before."""
    lasts = True
    written: dict[str, File] = {}
    with together(collectives, f"saving to {directory}"):
        content = make()
        state = content.state
        directory.mkdir(parents=True, exist_ok=True)
        if collectives.rank == 0:
            _check_own(directory, content.holds)
            written[MODEL] = _write(directory, f"{_PREFIX}{token}-{MODEL}.bin", content.model)
        if state is not None:
            name = f"{_PREFIX}{token}-rank{state.rank}.npz"
            written[f"rank {state.rank}"] = _write(directory, name, state.to_bytes())
    records = {key: dataclasses.asdict(file) for key, file in written.items()}
    files: dict[str, File] = {}
    for data in collectives.gather_bytes(json.dumps(records).encode(), "files"):
        files.update({key: File(**record) for key, record in json.loads(data).items()})
    with together(collectives, f"saving to {directory}"):
        if collectives.rank == 0:
            config = {} if content.config is None else _as_texts(content.config)
            kept = state or ResidualState(0, 0, averages=True)
            of_all = {name: getattr(kept, name) for name in OF_ALL}
            manifest = Manifest(content.holds, config=config, files=dict(sorted(files.items())), **of_all)
            _put(directory, MANIFEST, manifest.to_bytes())
            try:
                _see_to_disk(directory)
            except OSError as error:  # too late to undo the save
                lasts = False
                _log.warning("dgc_horovod: %s may not be on the disk yet: %s", directory / MANIFEST, error)
    return shared_from(collectives, b"yes" if lasts else b"no", "lasts") == b"yes"


def _as_texts(config: DGCConfig) -> dict[str, str]:
    return {name: repr(value) for name, value in vars(config).items()}


def _check_own(directory: Path, holds: str) -> None:
    try:
        data = files.read(directory / MANIFEST)
        before = Manifest.from_bytes(data)
    except OSError:
        return  # there is no manifest
    except CheckpointError:
        if b"dgc_horovod" in data or not data:
            return  # it cannot be used
        raise CheckpointError(f"{directory} has a {MANIFEST} of another program; give another directory") from None
    if before.holds != holds:
        raise CheckpointError(
            f"{directory} has the checkpoint of another optimizer, process set or model; give each a directory of its "
            "own"
        )


def _remove(directory: Path, which: Callable[[str], bool]) -> None:
    """Remove our files whose token fulfils `which`; several ranks may do it at once."""
    with suppress(OSError):  # there may be no such folder
        for file in directory.glob(f"{_PREFIX}*"):
            ours = _OURS.fullmatch(file.name)
            if ours and which(ours[1]) and file.is_file():
                with suppress(OSError):
                    file.unlink(missing_ok=True)


def _write(directory: Path, name: str, data: bytes) -> File:
    """Put a file in its place, whole, and sync it to the disk."""
    _put(directory, name, data)
    _see_to_disk(directory)  # the name too: files of the save before are removed after this
    return File(name, len(data), digest(data))


def _put(directory: Path, name: str, data: bytes) -> None:
    beside = directory / f"{_PREFIX}{secrets.token_hex(4)}.part"
    try:
        with beside.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        beside.replace(directory / name)
    finally:
        beside.unlink(missing_ok=True)


def _see_to_disk(directory: Path) -> None:
    """Sync the names in a directory; some file systems cannot."""
    with suppress(PermissionError):
        opened = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(opened)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
                raise
        finally:
            os.close(opened)


@dataclass(frozen=True)
class Checkpoint:
    """The result of `load`: the manifest, the bytes of the model's file, and the new state of this rank."""

    manifest: Manifest
    model: bytes
    state: ResidualState


def load(
    given: str | os.PathLike[str],
    collectives: Gatherer,
    config: DGCConfig | None,
    averages: bool,
    residuals: str = REQUIRED,
    node_size: int = 1,
) -> Checkpoint:
    """Read a checkpoint; called on every rank.

    Manifest and model are read by rank 0 and sent to the others; residuals are read by the rank that uses them. With
    another number of ranks, or on nodes with other buckets, they are redistributed (`parts.handed_on`); the
    directory must then be on a file system that all ranks see.

    Args:
        given: path of the directory of `save`.
        collectives: transport of the ranks that load.
        config: compression settings now; None: nothing is compressed, and residuals would be lost.
        averages: whether gradients are averaged or summed now.
        residuals: "required", "ignored", or "if sound": missing or damaged ones are dropped.
        node_size: G >= 1, the workers of a node now, see `OptimizerExchange`.

    Raises:
        CheckpointError: on every rank, if a needed file is missing, damaged or of another method on any rank, or
            residuals are required that would be lost.
        ConfigError: `residuals` is none of these.
    """
    check_choice("residuals", residuals, RESIDUALS)
    data = model = b""
    with together(collectives, f"loading {given}"):
        directory = _directory(given)
        if collectives.rank == 0:
            data = _read(directory / MANIFEST)
            model = _sound(directory, Manifest.from_bytes(data).file(MODEL))
    manifest = Manifest.from_bytes(shared_from(collectives, data, "manifest"))
    model = shared_from(collectives, model, "model")
    rank, workers, clips = collectives.rank, collectives.workers, manifest.clips
    empty = ResidualState(rank, workers, averages, manifest.step, manifest.epoch, node_size=node_size, clips=clips)
    if config is not None and manifest.config and manifest.local != config.exchanges_weights:
        empty.step = 0  # one counts exchanges, the other steps
    # files of stock Horovod have no choice, nor do files from before the first step
    empty.mode = manifest.mode if manifest.config and manifest.workers else UNDECIDED
    if residuals == IGNORED or not manifest.workers:
        return Checkpoint(manifest, model, empty)
    topology = Topology(rank, workers, node_size)
    found: dict[int, ResidualState] = {}
    state = empty
    with together(collectives, f"loading {directory}"):
        if config is not None:
            _check_method(manifest, config, averages)
        cut_alike = config is None or _cut_alike(manifest, config)
        for old in needed(topology, manifest.workers, manifest.node_size, cut_alike):
            wanted = _wanted(directory, manifest, old, residuals, rank)
            if wanted is not None:
                found[old] = wanted
        if config is not None and found:
            state = handed_on(found, topology, cut_alike)
    if config is None:  # all ranks together have read every file
        _check_that_nothing_is_lost(collectives, found.values(), residuals)
        return Checkpoint(manifest, model, empty)
    if residuals != REQUIRED:
        state = _with_second_of_any(state, collectives)
    return Checkpoint(manifest, model, dataclasses.replace(state, clips=clips))


def _wanted(directory: Path, manifest: Manifest, old: int, residuals: str, rank: int) -> ResidualState | None:
    """Return the residuals of an old rank; None if they are missing or damaged, and not required."""
    try:
        return _residuals(directory, manifest, old)
    except CheckpointError as error:
        if residuals == REQUIRED:
            raise CheckpointError(
                f"{error}. If the number of ranks is not that of the checkpoint ({manifest.workers}), or nodes have "
                'other buckets, every rank must see the directory. residuals="if sound" drops the residuals of this '
                "file, and loads the rest"
            ) from None
        _log.warning("dgc_horovod: rank %d continues without residuals of a file: %s", rank, error)
        return None


def _with_second_of_any(state: ResidualState, collectives: Gatherer) -> ResidualState:
    """Return `state` with Adam's second moment, which must be equal on all ranks, from the first rank that has it."""
    having = [data == b"yes" for data in collectives.gather_bytes(b"yes" if state.second else b"no", "second")]
    if all(having) or not any(having):
        return state
    alone = dataclasses.replace(state, tensors={name: {} for name in state.second}, runs={}, thresholds={})
    data = shared_from(collectives, alone.to_bytes(), "second of any", having.index(True))
    return dataclasses.replace(state, second=ResidualState.from_bytes(data).second)


def _check_that_nothing_is_lost(collectives: Gatherer, states: Iterable[ResidualState], residuals: str) -> None:
    """Check, if nothing is compressed now, that no residuals are lost, or warn if they are not required.

    Raises:
        CheckpointError: on every rank, if any of the `states` of any rank has residuals, and they are required.
    """
    every = [left_of(state) for state in states]
    squares = sum(float(np.square(x, dtype=np.float64).sum()) for left in every for arrays in left for x in arrays)
    own = json.dumps([max(map(len, every), default=0), squares]).encode()
    told = [json.loads(data) for data in collectives.gather_bytes(own, "left")]
    tensors = max(count for count, _ in told)
    if tensors and residuals == REQUIRED:
        raise CheckpointError(
            f"the checkpoint has residuals of {tensors} parameters, and nothing is compressed now: flush() before "
            'saving, or residuals="ignored", which drops them'
        )
    if tensors and collectives.rank == 0:
        _log.warning(
            "dgc_horovod: nothing is compressed now, so the residuals of %d parameters are dropped; their norm over "
            "all ranks is %.3g",
            tensors,
            math.sqrt(sum(each for _, each in told)),
        )


def tell_if_empty(found: Checkpoint, directory: object) -> None:
    """Log, on rank 0, that there were no residuals."""
    if not found.state.tensors and found.state.rank == 0:
        _log.info("dgc_horovod: the checkpoint %s has no residuals; they start from zero", directory)


def _check_method(manifest: Manifest, config: DGCConfig, averages: bool) -> None:
    """Raise CheckpointError if the residuals are of a method that this job cannot go on from.

    With momentum correction they hold updates, without it gradients; dense tensors have others than compressed ones.
    """
    now = _as_texts(config)
    for name in ("momentum_correction", "min_numel", "compress_1d"):
        if manifest.config.get(name) != now[name]:
            raise CheckpointError(
                f"the residuals were saved with {name}={manifest.config.get(name)}, and it is {now[name]} now; call "
                'flush() before saving to change it, or pass residuals="ignored", which drops them'
            )
    if manifest.averages != averages:
        raise CheckpointError(
            f"the residuals were saved {combining(manifest.averages)} gradients, and this job is {combining(averages)} "
            "them; give the same op, or call flush() before saving"
        )


def _cut_alike(manifest: Manifest, config: DGCConfig) -> bool:
    """Whether the buckets, of which each worker of a node has a slice, hold the same tensors as before."""
    now = _as_texts(config)
    return all(manifest.config.get(name, now[name]) == now[name] for name in ("bucket_bytes", "dense_values"))


def _residuals(directory: Path, manifest: Manifest, rank: int) -> ResidualState:
    file = manifest.file(f"rank {rank}")
    state = ResidualState.from_bytes(_sound(directory, file), file.name)
    said = {name: getattr(manifest, name) for name in ("workers", "averages", "step", "node_size", "mode")}
    for name, value in {"rank": rank, **said}.items():
        if getattr(state, name) != value:
            raise CheckpointError(
                f"{file.name} is not what {MANIFEST} says: {name} is {getattr(state, name)!r}, and not {value!r}"
            )
    if manifest.local:
        state.method = CHANGES  # records of earlier versions do not say so
    return state


def _read(path: Path) -> bytes:
    try:
        return files.read(path)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read ({error.strerror or error})") from None


def _sound(directory: Path, file: File) -> bytes:
    data = _read(directory / file.name)
    if len(data) != file.nbytes or digest(data) != file.digest:
        raise CheckpointError(f"{file.name} is damaged: its length or its digest is wrong")
    return data
