"""A checkpoint directory: a file of residuals for each rank, one of the model, and a manifest that is written last.

Every file is written beside its place and moved there when it is complete, under a name that no other save has used:
the manifest names either all files of this save, or all of the one before. Nothing that is read is ever executed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgc_horovod import __version__
from dgc_horovod.agreement import Gatherer, shared_from_first, together
from dgc_horovod.config import DGCConfig, check_choice
from dgc_horovod.errors import CheckpointError
from dgc_horovod.state import FORMAT, ResidualState, handed_on, shares

_log = logging.getLogger("dgc_horovod")
MANIFEST, MODEL = "manifest.json", "model"
_PREFIX = "dgc-"  # of every other file
REQUIRED, IF_SOUND, IGNORED = RESIDUALS = ("required", "if sound", "ignored")


@dataclass(frozen=True)
class File:
    """One file of a checkpoint: its name in the directory, its length and the digest of its bytes."""

    name: str
    nbytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Args:
        step: steps that were finished.
        workers: N; 0 where there are no residuals.
        averages: whether the ranks' gradients were averaged or summed.
        config: the compression, field by field.
        files: "model" and "rank 0", "rank 1", ...
    """

    step: int
    workers: int
    averages: bool
    config: dict[str, str]
    files: dict[str, File]

    def file(self, key: str) -> File:
        """One of `files`."""
        if key not in self.files:
            raise CheckpointError(f"{MANIFEST} names no file of {key}")
        return self.files[key]

    def to_bytes(self) -> bytes:
        """As JSON that carries its own digest."""
        body = {"format": FORMAT, "dgc_horovod": __version__, **dataclasses.asdict(self)}
        return json.dumps({**body, "digest": _digest_of(body)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """What `to_bytes` was called on.

        Raises:
            CheckpointError: these are no such bytes.
        """
        try:
            body = json.loads(data)
            if body.pop("digest") != _digest_of(body):
                raise ValueError("its digest does not fit")
            if body["format"] != FORMAT:
                raise ValueError(f"it has format {body['format']!r}; this version reads {FORMAT}")
            files = {key: File(**record) for key, record in body["files"].items()}
            return cls(body["step"], body["workers"], body["averages"], body["config"], files)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{MANIFEST} is damaged ({error})") from None


def _digest_of(body: dict[str, Any]) -> str:
    return _digest(json.dumps(body, sort_keys=True).encode())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def save(
    directory: Path,
    collectives: Gatherer,
    step: int,
    model: bytes,
    state: ResidualState | None,
    config: DGCConfig | None,
) -> None:
    """Write a checkpoint; called on every rank. The one that was there before is replaced when all is written.

    Args:
        directory: made if it is not there; other files in it are left alone.
        collectives: of the ranks.
        step: steps that were finished.
        model: bytes of the model's file; those of rank 0 are written.
        state: residuals of this rank, or None.
        config: the compression, or None.

    Raises:
        CheckpointError: on every rank, if any could not write; what was there before is still there then.
    """
    token = shared_from_first(collectives, secrets.token_hex(4).encode(), "token").decode()
    written: dict[str, File] = {}
    with together(collectives, f"saving to {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
        if state is not None:
            name = f"{_PREFIX}{token}-rank{state.rank}.npz"
            written[f"rank {state.rank}"] = _write(directory, name, state.to_bytes())
        if collectives.rank == 0:
            written[MODEL] = _write(directory, f"{_PREFIX}{token}-{MODEL}.pt", model)
    records = {key: dataclasses.asdict(file) for key, file in written.items()}
    files: dict[str, File] = {}
    for data in collectives.gather_bytes(json.dumps(records).encode(), "files"):
        files.update({key: File(**record) for key, record in json.loads(data).items()})
    with together(collectives, f"saving to {directory}"):
        if collectives.rank == 0:
            fields = {} if config is None else {name: repr(value) for name, value in vars(config).items()}
            workers, averages = (0, True) if state is None else (state.workers, state.averages)
            manifest = Manifest(step, workers, averages, fields, dict(sorted(files.items())))
            _write(directory, MANIFEST, manifest.to_bytes())
    for file in directory.glob(f"{_PREFIX}*"):  # of earlier saves, or of one that was interrupted
        if not file.name.startswith(f"{_PREFIX}{token}-"):
            file.unlink(missing_ok=True)


def _write(directory: Path, name: str, data: bytes) -> File:
    """Put a file in its place at once, and see that it is on the disk."""
    beside = directory / f"{_PREFIX}{secrets.token_hex(4)}.part"
    try:
        with beside.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        beside.replace(directory / name)
    finally:
        beside.unlink(missing_ok=True)
    return File(name, len(data), _digest(data))


@dataclass(frozen=True)
class Checkpoint:
    """What `load` found: the manifest, the bytes of the model's file, this rank's residuals if there are any."""

    manifest: Manifest
    model: bytes
    state: ResidualState | None


def load(directory: Path, collectives: Gatherer, config: DGCConfig | None, residuals: str = REQUIRED) -> Checkpoint:
    """Read a checkpoint; called on every rank.

    Manifest and model are read by rank 0 and sent to the others; residuals are read by the rank that goes on from them.
    With another number of ranks than before they are handed on (`state.shares`), for which the directory must be on a
    file system that all ranks see.

    Args:
        directory: of `save`.
        collectives: of the ranks.
        config: the compression now; None: no residuals are wanted.
        residuals: "required"; "if sound": without those that are missing or damaged, whose content is lost; "ignored".

    Raises:
        CheckpointError: on every rank, if a file that is wanted is missing or damaged on any, or of another method.
        ConfigError: `residuals` is none of these.
    """
    check_choice("residuals", residuals, RESIDUALS)
    data = model = b""
    with together(collectives, f"loading {directory}"):
        if collectives.rank == 0:
            data = _read(directory / MANIFEST)
            model = _sound(directory, Manifest.from_bytes(data).file(MODEL))
    manifest = Manifest.from_bytes(shared_from_first(collectives, data, "manifest"))
    model = shared_from_first(collectives, model, "model")
    if config is None or residuals == IGNORED or not manifest.workers:
        return Checkpoint(manifest, model, None)
    found: dict[int, ResidualState] = {}
    with together(collectives, f"loading {directory}"):
        _check_method(manifest, config)
        for old in shares(collectives.rank, collectives.workers, manifest.workers, manifest.averages):
            try:
                found[old] = _residuals(directory, manifest, old)
            except CheckpointError as error:
                if residuals == REQUIRED:
                    raise CheckpointError(
                        f'{error}; pass residuals="if sound" to go on without it: what that rank had not sent is lost'
                    ) from None
                _log.warning("dgc_horovod: rank %d goes on without it: %s", collectives.rank, error)
    state = ResidualState(collectives.rank, collectives.workers, manifest.averages, manifest.step)
    return Checkpoint(manifest, model, handed_on(found, collectives.rank, collectives.workers) if found else state)


def _check_method(manifest: Manifest, config: DGCConfig) -> None:
    """With momentum correction a residual holds updates, without it gradients: one is no good for the other."""
    before, now = manifest.config.get("momentum_correction"), repr(config.momentum_correction)
    if before != now:
        raise CheckpointError(
            f"the residuals were kept with momentum_correction={before}, and it is {now} now; call flush() before "
            'saving to change the method, or pass residuals="ignored": what was not sent is lost then'
        )


def _residuals(directory: Path, manifest: Manifest, rank: int) -> ResidualState:
    file = manifest.file(f"rank {rank}")
    state = ResidualState.from_bytes(_sound(directory, file))
    expected = (rank, manifest.workers, manifest.averages, manifest.step)
    if (state.rank, state.workers, state.averages, state.step) != expected:
        raise CheckpointError(f"{file.name} is not what {MANIFEST} says")
    return state


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read ({error.strerror or error})") from None


def _sound(directory: Path, file: File) -> bytes:
    if Path(file.name).name != file.name:
        raise CheckpointError(f"{MANIFEST} names a file outside its directory: {file.name!r}")
    data = _read(directory / file.name)
    if len(data) != file.nbytes or _digest(data) != file.digest:
        raise CheckpointError(f"{file.name} is damaged: its bytes are not those that were written")
    return data
