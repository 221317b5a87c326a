"""The errors a user of dgc_horovod can meet. Each message says what was given, what is allowed, what to do."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable


class DGCError(Exception):
    """Base of every error raised by dgc_horovod."""


class ConfigError(DGCError, ValueError):
    """A setting is out of its range, unknown, or does not fit the others."""


class BackendUnavailable(DGCError, RuntimeError):
    """A kernel backend was asked for by name and cannot be used here."""


class RankMismatch(DGCError, RuntimeError):
    """The ranks of a job disagree: different model, config, version or step. Raised on every rank."""


class CorruptPacket(DGCError, RuntimeError):
    """A received packet is damaged or of another format. Raised before anything is changed."""


class CollectiveTimeout(DGCError, RuntimeError):
    """A collective did not finish within DGC_TIMEOUT seconds: another rank is gone or did not join it."""


class LostRank(CollectiveTimeout):
    """A collective of torch.distributed has failed at once, since another rank has ended."""


class UnsupportedUse(DGCError, RuntimeError):
    """A combination that would train wrongly, or silently uncompressed, if it were let through."""


class NotActivated(DGCError, RuntimeError):
    """A job is to be compressed, and on some rank it would not be. Raised on every rank where it would."""


class CheckpointError(DGCError, RuntimeError):
    """A checkpoint is missing, damaged, or of another model. Raised on every rank."""


class ReplicaMismatch(DGCError, RuntimeError):
    """The ranks' weights are not the same any more. Raised on every rank."""


class NotFinite(DGCError, ArithmeticError):
    """A gradient was NaN or infinite on some rank and the job is to stop then, or an optimizer made such weights from
    finite gradients. Raised on every rank."""


def nearest(word: object, allowed: Iterable[str]) -> str:
    """The one of `allowed` that was probably meant, or ""."""
    return next(iter(difflib.get_close_matches(str(word), list(allowed), n=1)), "")


def unknown(what: str, name: object, allowed: Iterable[str]) -> str:
    """Return an error text for a name, described as `what`, that is none of `allowed`, with the one that was meant."""
    near = nearest(name, allowed) if isinstance(name, str) else ""
    return f"unknown {what}; {f'did you mean {near!r}? ' if near else ''}allowed: {', '.join(allowed)}"


def shown(value: object) -> str:
    """Return a short text for a value that may be long, or contain itself."""
    try:
        return reprlib.repr(value)
    except Exception:  # a number of thousands of digits, or an object whose repr fails
        return f"a {type(value).__name__} that cannot be shown"
