"""Every environment variable that is read, once. No other file of the package reads ``os.environ``."""

from __future__ import annotations

import os
from dataclasses import dataclass

from dgc_horovod.errors import ConfigError


@dataclass(frozen=True)
class EnvironmentVariable:
    """One variable: its name, its default as a user would write it, and one line on what it does."""

    name: str
    default: str
    meaning: str

    def read(self) -> str:
        """The value set in the environment, or the default."""
        return os.environ.get(self.name, self.default)


TIMEOUT = EnvironmentVariable(
    "DGC_TIMEOUT", "120", "seconds a rank waits for a collective before it gives up with CollectiveTimeout"
)
BACKEND = EnvironmentVariable(
    "DGC_BACKEND",
    "auto",
    "kernels: auto, native (C++; CPU), torch_eager (torch operations), reference (NumPy; CPU only, slow)",
)
ALL = (TIMEOUT, BACKEND)


def horovod_elastic() -> bool:
    """Whether this process was started by Horovod's elastic launcher."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def horovod_autotune() -> bool:
    """Whether Horovod tunes its own parameters, the response cache among them."""
    return os.environ.get("HOROVOD_AUTOTUNE") == "1"


def timeout_seconds() -> float:
    """``DGC_TIMEOUT`` as a positive number of seconds.

    Raises:
        ConfigError: it is not a positive number.
    """
    text = TIMEOUT.read()
    try:
        seconds = float(text)
    except ValueError:
        seconds = float("nan")
    if not seconds > 0:
        raise ConfigError(
            f"{TIMEOUT.name} must be a positive number of seconds, got {text!r}; default {TIMEOUT.default}"
        )
    return seconds
