"""The table of contents of a checkpoint, in JSON that carries its own digest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from dgc_horovod import __version__
from dgc_horovod.errors import CheckpointError
from dgc_horovod.state.residual_state import FORMAT

MANIFEST = "manifest.json"


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
        holds: digest of what it is a checkpoint of: another optimizer's is not replaced.
        step: number of steps finished, >= 0.
        epoch: last epoch that the density warm-up was told, from 0, or None.
        workers: N >= 1; 0 where there are no residuals.
        averages: whether the ranks' gradients were averaged or summed.
        node_size: G >= 1, the workers of a node, each of which kept a part of its residual.
        config: compression settings as texts, by field; empty without compression.
        settled_at, mode, clips: see `ResidualState`.
        files: file of "model" and of "rank 0", "rank 1", ..., by that key.
    """

    holds: str
    step: int
    epoch: int | None
    workers: int
    averages: bool
    node_size: int
    config: dict[str, str]
    settled_at: int | None
    mode: str
    clips: list[list[Any]]
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
                raise CheckpointError(f"{MANIFEST} has format {body['format']!r}; this version reads {FORMAT}")
            files = {key: File(**record) for key, record in body["files"].items()}
            body = {
                "node_size": 1,
                "settled_at": None,
                "mode": "",
                "clips": [],
                **body,
            }  # earlier versions knew none of them
            others = {field.name: body[field.name] for field in dataclasses.fields(cls) if field.name != "files"}
            return cls(**others, files=files)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{MANIFEST} is damaged ({error})") from None


def _digest_of(body: dict[str, Any]) -> str:
    return digest(json.dumps(body, sort_keys=True).encode())


def digest(data: bytes) -> str:
    """What tells these bytes from others."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
