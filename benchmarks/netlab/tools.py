"""The commands that a lab is made with: which are needed, and what they say when they fail."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys

PACKAGES = {  # command -> Debian's package
    "ip": "iproute2",
    "tc": "iproute2",
    "hostname": "hostname",
    "mount": "mount",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
}


class NetlabError(RuntimeError):
    """What is missing, or which command failed and how."""


def call(*command: str) -> str:
    """What `command` prints.

    Raises:
        NetlabError: it failed; with what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NetlabError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def lacking() -> str | None:
    """What no command can do without and is not here, and what to do; None if nothing."""
    if os.geteuid():
        return f"network namespaces need root: run it with sudo {sys.executable}"
    missing = [command for command in PACKAGES if shutil.which(command) is None]
    if missing:
        packages = " ".join(sorted({PACKAGES[command] for command in missing}))
        return f"not found: {', '.join(missing)}; install {packages}"
    if importlib.util.find_spec("asyncssh") is None:
        return "the Python package asyncssh, the hosts' ssh server, is not installed: pip install asyncssh"
    return None
