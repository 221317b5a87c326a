"""What a lab keeps in /run while it is up, and the right to have one."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.netlab import network
from benchmarks.netlab.tools import NetlabError

STATE = Path("/run/dgc-netlab")  # names of namespaces are the machine's, so the rest is too
KEY, NO_SSH = STATE / "key", STATE / "no-ssh"
RECORD = STATE / "lab.json"
CLAIM_SECONDS = 1.0  # a killed process's child, if it was just being started, holds the claim until it runs its program


@dataclass(frozen=True)
class Record:
    """A lab that is up.

    Args:
        hosts: how many.
        link: what each link is like, by its settings.
        ranks: that are to run on each host.
        kept: it has been brought up to stay until somebody takes it down.
        measured: Mbit/s from the first host to the second, and back; empty if not measured.
    """

    hosts: int
    link: network.Link
    ranks: int
    kept: bool = False
    measured: tuple[float, ...] = ()

    def write(self) -> None:
        """Keep it; there is none before all of the lab is up."""
        new = RECORD.with_suffix(".new")
        new.write_text(json.dumps(asdict(self)))
        new.replace(RECORD)


def read() -> Record | None:
    """The lab that is up, if one is."""
    if not RECORD.exists():
        return None
    found = json.loads(RECORD.read_text())
    return Record(**{**found, "link": network.Link(**found["link"])})


def reserve() -> socket.socket:
    """Claim the machine's only lab, until the socket is closed: at the latest by the end of this process.

    Raises:
        NetlabError: another process has claimed it.
    """
    claim = socket.socket(socket.AF_UNIX)
    deadline = time.monotonic() + CLAIM_SECONDS
    while True:
        try:
            claim.bind(f"\0{network.PREFIX}claim")  # a name in the kernel: it ends with the last that holds it
            return claim
        except OSError:
            if time.monotonic() > deadline:
                claim.close()
                raise NetlabError("another process has a lab up on this machine; wait until it has ended") from None
        time.sleep(0.05)


def file(number: int, kind: str) -> Path:
    """A file of a host: "pid" of its ssh server, or "log" of what that says."""
    return STATE / f"{number}.{kind}"


def server(number: int) -> int | None:
    """Process id of a host's ssh server, if it still lives."""
    pid_file = file(number, "pid")
    written = pid_file.read_text() if pid_file.exists() else ""
    with contextlib.suppress(psutil.Error):
        if written and f"{KEY}.pub" in psutil.Process(int(written)).cmdline():  # and not another with the same id
            return int(written)
    return None
