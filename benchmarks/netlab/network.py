"""Namespaces, links and shaping, below the hosts of a lab, and the commands that make them. All of it needs root.

A host is a network namespace with one link, eth0, to a bridge in a namespace of its own; a link with delay passes
through a process there (`relay`). What is in ``/etc/netns/NAME`` lies over ``/etc`` on that host only: so are names
resolved and is ssh set up there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.netlab import relay

PREFIX = "dgc-netlab-"
SWITCH = f"{PREFIX}switch"
MOST_HOSTS = 250  # of a /24
UNSHAPED = "none"
OVERLAYS = Path("/etc/netns")  # where `ip netns exec` looks for them
KILL_SECONDS = 10.0
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# What an idle link lets through at once. With more of it short messages, which compression makes of long ones, do
# not see the rate: at 256 KB, 200 KB over 100mbit took 0.5 ms in place of 17. With less, tokens are lost whenever the
# kernel looks at the queue a part of a millisecond late. TCP's packets of up to 64 KB need not fit, tbf cuts them. At
# 10gbit the processor is the limit: four times the burst, or htb in the place of tbf, give nothing more.
BURST_SECONDS = 1e-3
LEAST_BURST = 4096  # bytes: one packet on the wire must fit
# Longest queue. On a busy machine CUBIC fell to 0.81 to 0.91 of 1gbit now and then at 20 ms; a longer one than this
# only delays the short messages that wait behind long ones.
LATENCY = "50ms"
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
    """A lab cannot be made: a part is missing, or a command failed."""


def call(*command: str) -> str:
    """The output of `command`.

    Raises:
        NetlabError: it failed; with what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NetlabError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


@functools.cache
def unavailable() -> str | None:
    """Why no lab can be brought up on this machine, and what to do; None if one can. It is tried for real."""
    if os.geteuid():
        return f"network namespaces need root: run it with sudo {sys.executable}"
    missing = [command for command in PACKAGES if shutil.which(command) is None]
    if missing:
        packages = " ".join(sorted({PACKAGES[command] for command in missing}))
        return f"not found: {', '.join(missing)}; install {packages}"
    if importlib.util.find_spec("asyncssh") is None:
        return "the Python package asyncssh, the hosts' ssh server, is not installed: pip install asyncssh"
    try:
        _probe()
    except NetlabError as error:
        return f"{error}; if this is a container, start it with --privileged"
    return None


@dataclass(frozen=True)
class Link:
    """The properties of every host's link.

    Args:
        rate: in each direction, such as "1gbit", or "none".
        delay: that a packet waits as it leaves a host, such as "40ms".
    """

    rate: str = UNSHAPED
    delay: str = "0ms"

    @property
    def is_relayed(self) -> bool:
        """Whether packets must wait."""
        return bool(seconds(self.delay))

    def check(self) -> None:
        """Raise NetlabError if a field is not what it should be."""
        bits_per_second(self.rate), seconds(self.delay)


def seconds(delay: str) -> float:
    """A delay such as "40ms" as seconds; NetlabError if it is not one."""
    return _number(delay, "ms", "a delay is a number with ms, such as 40ms")[0] / 1e3


def _number(text: str, units: str, rule: str) -> tuple[float, str]:
    """A number and its unit, one of `units`; NetlabError with the rule if it is none."""
    found = re.fullmatch(rf"(\d+(?:\.\d+)?)({units})", text)
    if not found:
        raise NetlabError(f"{rule}; not {text!r}")
    return float(found[1]), found[2]


def namespace(number: int) -> str:
    """Network namespace of a host, counted from 1."""
    return f"{PREFIX}{number}"


def address(number: int) -> str:
    """Address of a host, on its eth0."""
    return f"10.77.0.{number}"


def add_switch(hosts: int, link: Link) -> None:
    """The namespace that all links lead to, with a bridge, and with a relay where packets must wait."""
    call("ip", "netns", "add", SWITCH)
    call("ip", "-n", SWITCH, "link", "add", "bridge", "type", "bridge")
    call("ip", "-n", SWITCH, "link", "set", "bridge", "up")
    if link.is_relayed:
        words = [str(hosts), str(seconds(link.delay))]
        process = start(["ip", "netns", "exec", SWITCH, sys.executable, "-IS", relay.__file__, *words])
        if not ready(process):  # else it ends with the namespace
            raise NetlabError("links with delay need TAP devices (/dev/net/tun), which cannot be made here")


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start what says "ready", and then serves."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, text=True, start_new_session=True, **pipes, **options)


def ready(process: subprocess.Popen[str]) -> bool:
    """Wait for what was started; whether it serves."""
    assert process.stdout
    with process.stdout as output:
        return output.readline() == "ready\n"


def add_host(number: int, link: Link) -> None:
    """A namespace with a link to the bridge.

    Args:
        number: of the host.
        link: what it is like.
    """
    name, port = namespace(number), relay.PORT_SIDE.format(number)
    call("ip", "netns", "add", name)
    if link.is_relayed:
        call("ip", "-n", SWITCH, "link", "set", relay.HOST_SIDE.format(number), "netns", name, "name", "eth0")
    else:
        call("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", SWITCH)
    call("ip", "-n", name, "addr", "add", f"{address(number)}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        call("ip", "-n", name, "link", "set", device, "up")
    call("ip", "-n", SWITCH, "link", "set", port, "master", "bridge", "up")
    if link.rate != UNSHAPED:
        _shape(name, "eth0", link.rate)
        _shape(SWITCH, port, link.rate)


def _shape(name: str, device: str, rate: str) -> None:
    """Only what leaves a device is shaped: the two ends of a link make its two directions."""
    bits = bits_per_second(rate)
    burst = max(int(bits / 8 * BURST_SECONDS), LEAST_BURST)
    limits = ["rate", f"{bits:.0f}bit", "burst", str(burst), "latency", LATENCY]
    call("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *limits)


def bits_per_second(rate: str) -> float:
    """A rate as a number; infinity for "none".

    Args:
        rate: such as "100mbit" or "2.5gbit".

    Raises:
        NetlabError: it is not one.
    """
    if rate == UNSHAPED:
        return math.inf
    rule = f"a rate is a number with kbit, mbit or gbit, such as 100mbit, or {UNSHAPED}"
    number, unit = _number(rate, "|".join(UNITS), rule)
    if not number:
        raise NetlabError(f"{rule}; not {rate!r}")
    return number * UNITS[unit]


def names() -> list[str]:
    """The namespaces of the lab that is up."""
    listed = [line.split()[0] for line in call("ip", "netns", "list").splitlines() if line.strip()]
    return [name for name in listed if name.startswith(PREFIX)]


def processes(name: str) -> list[int]:
    """Every process in the namespace `name`."""
    return [int(pid) for pid in call("ip", "netns", "pids", name).split()]


def remove(name: str) -> None:
    """Kill what runs in a namespace, then remove it.

    Raises:
        NetlabError: a process has not ended.
    """
    deadline = time.monotonic() + KILL_SECONDS
    while found := processes(name):  # again, as one may have started another meanwhile
        if time.monotonic() > deadline:
            raise NetlabError(f"processes {found} in {name} do not end; see what they wait for (`ps -o stat,wchan`)")
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    call("ip", "netns", "del", name)


def _probe() -> None:
    """Each kind of thing that a lab is made of, once."""
    name = f"dgc-probe-{os.getpid()}"  # not a lab's: one that is taken down meanwhile leaves it alone
    call("ip", "netns", "add", name)
    try:
        call("ip", "-n", name, "link", "add", "bridge", "type", "bridge")
        call("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", "port")
        _shape(name, "eth0", "1gbit")
        call("ip", "netns", "exec", name, "unshare", "--uts", "hostname", "probe")
    finally:
        call("ip", "netns", "del", name)
