"""The table of contents of a checkpoint, in JSON that carries its own digest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from dgc_horovod import __version__
from dgc_horovod.errors import CheckpointError, shown
from dgc_horovod.state.kinds import NAMED, TEXT, Kind, checked, mapping_of, whole
from dgc_horovod.state.residual_state import CLIPS, COMMON, FORMAT

MANIFEST = "manifest.json"
_DAMAGED = f"{MANIFEST} is damaged"
_NAME = re.compile(r"(?!\.\.?$)[^/\0]+")  # of a file in the directory itself


@dataclass(frozen=True)
class File:
    """One file of a checkpoint: its name in the directory, its length and the digest of its bytes."""

    name: str
    nbytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a checkpoint.

    Args:
        holds: digest of the saved optimizer: a checkpoint of another one is not replaced.
        step: number of steps finished, >= 0.
        epoch: last epoch that the density warm-up was told, from 0, or None.
        workers: N >= 1; 0 where there are no residuals.
        averages: whether the ranks' gradients were averaged or summed.
        node_size: G >= 1, the workers of a node, each of which has a slice of its residual.
        config: compression settings as texts, by field; empty without compression.
        mode, clips: see `ResidualState`.
        files: file of "model" and of "rank 0", "rank 1", ..., by that key.
    """

    holds: str
    step: int
    epoch: int | None
    workers: int
    averages: bool
    node_size: int
    config: dict[str, str]
    mode: str
    clips: list[list[Any]]
    files: dict[str, File]

    @property
    def local(self) -> bool:
        """Whether it was saved with local steps."""
        return self.config.get("local_steps", "None") != "None"

    def file(self, key: str) -> File:
        """One of `files`."""
        if key not in self.files:
            raise CheckpointError(f"{MANIFEST} names no file of {key}")
        return self.files[key]

    def to_bytes(self) -> bytes:
        """Return it as JSON that carries its own digest."""
        body = {"format": FORMAT, "dgc_horovod": __version__, **dataclasses.asdict(self)}
        return json.dumps({**body, "digest": _digest_of(body)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read a manifest from the bytes of `to_bytes`.

        Raises:
            CheckpointError: the bytes are not those of a manifest.
        """
        try:
            body = json.loads(data)
            sealed = isinstance(body, dict) and body.pop("digest", None) == _digest_of(body)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{_DAMAGED} ({error})") from None
        if not sealed:
            raise CheckpointError(f"{_DAMAGED} (its digest does not fit)")
        if type(body.get("format")) is not int or body["format"] != FORMAT:
            raise CheckpointError(f"{MANIFEST} has format {shown(body.get('format'))}; this version reads {FORMAT}")
        fields = {**_EARLIER, **checked(_DAMAGED, body, _KINDS, _EARLIER)}
        files = {
            key: File(**checked(_DAMAGED, record, _OF_A_FILE, within=f"files.{key}."))
            for key, record in fields.pop("files").items()
        }
        made = cls(**fields, files=files)
        made._check()
        return made

    def _check(self) -> None:
        """Raise CheckpointError unless the fields go together."""
        for rank in range(self.workers):  # ends at the first missing one, whatever number the file claims
            if f"rank {rank}" not in self.files:
                raise CheckpointError(f"{_DAMAGED}: workers is {self.workers}, and files has no 'rank {rank}'")
        if self.workers % self.node_size:
            raise CheckpointError(f"{_DAMAGED}: node_size {self.node_size} must divide workers, {self.workers}")


OF_ALL = (*COMMON, "clips")  # fields of the ranks' records that the manifest has as well
_KINDS = {
    **COMMON, "holds": TEXT, "workers": whole(0), "config": mapping_of(TEXT), "clips": CLIPS,
    "files": NAMED,
}  # fmt: skip
_OF_A_FILE = {
    "name": Kind("the name of a file in its directory", lambda x: TEXT.holds(x) and bool(_NAME.fullmatch(x))),
    "nbytes": whole(0), "digest": TEXT,
}  # fmt: skip
_EARLIER: dict[str, Any] = {"node_size": 1, "mode": "", "clips": []}  # unknown to earlier versions


def _digest_of(body: dict[str, Any]) -> str:
    return digest(json.dumps(body, sort_keys=True).encode())


def digest(data: bytes) -> str:
    """Return the digest of these bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
