"""A lab from its beginning to its end; each host gets a name, an address and an ssh server. It needs root.

with lab(2, "1gbit") as hosts:
    hosts.run(1, ["horovodrun", "--gloo", "-np", "2", "-H", hosts.slots, "python", "train.py"])
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.netlab import hosts as state
from benchmarks.netlab import network
from benchmarks.netlab.hosts import Lab, hostname
from benchmarks.netlab.network import Link, NetlabError, address, call, namespace
from benchmarks.report import ROOT

# In the place of the host's /etc/ssh/ssh_config, so that plain `ssh host2` works and nobody's known_hosts is written.
SSH_CONFIG = f"""Host *
    IdentityFile {state.KEY}
    IdentitiesOnly yes
    BatchMode yes
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
"""
# Of a host's first process. An empty folder hides the user's ~/.ssh, whose settings would win over those above.
START = 'hostname "$0"; if [ -d "$1" ]; then mount --bind "$2" "$1"; fi; shift 2; exec "$@"'


@contextlib.contextmanager
def lab(hosts: int, rate: str = network.UNSHAPED, ranks: int = 1, delay: str = "0ms") -> Iterator[Lab]:
    """A lab that is taken down at the end, with all that still runs on its hosts.

    Args:
        hosts: how many.
        rate: of each link in each direction, such as "1gbit", or "none".
        ranks: that are to run on each host, for `Lab.slots`.
        delay: that a packet waits as it leaves a host, such as "40ms"; a way there and back has two.

    Raises:
        NetlabError: it cannot be brought up here, or another one is up.
    """
    with state.reserve():
        record = Lab(hosts, ranks, Link(rate, delay))
        servers = _up(record)
        try:
            yield record
        finally:
            down()
            for server in servers:
                server.wait()


def _up(record: Lab) -> list[subprocess.Popen[str]]:
    """Bring a lab up, in the place of what a process that was killed has left; the ssh servers."""
    if not 1 <= record.hosts <= network.MOST_HOSTS:
        raise NetlabError(f"a lab has from 1 to {network.MOST_HOSTS} hosts, not {record.hosts}")
    if record.ranks < 1:
        raise NetlabError(f"a host has at least 1 rank, not {record.ranks}")
    record.link.check()  # before anything is there
    if reason := network.unavailable():
        raise NetlabError(reason)
    down()
    try:
        return _bring_up(record.hosts, record.link)
    except BaseException:
        down()
        raise


def _bring_up(hosts: int, link: Link) -> list[subprocess.Popen[str]]:
    numbers = range(1, hosts + 1)
    state.NO_SSH.mkdir(parents=True)
    state.STATE.chmod(0o700)
    call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "netlab", "-f", str(state.KEY))
    network.add_switch(hosts, link)
    table = "".join(f"{address(number)} {hostname(number)}\n" for number in numbers)
    for number in numbers:
        network.add_host(number, link)
        overlay = network.OVERLAYS / namespace(number)
        (overlay / "ssh").mkdir(parents=True)
        (overlay / "ssh" / "ssh_config").write_text(SSH_CONFIG)
        (overlay / "hosts").write_text(f"127.0.0.1 localhost\n{table}")
    servers = [_start_server(number) for number in numbers]  # all at once, as each takes a while
    for number, server in zip(numbers, servers, strict=True):
        if not network.ready(server):
            said = state.file(number, "log").read_text().strip()
            raise NetlabError(f"the ssh server of {hostname(number)} did not start: {said}")
    return servers


def _start_server(number: int) -> subprocess.Popen[str]:
    """The first process on a host, which keeps its name and its own view of /etc."""
    enter_new = ["ip", "netns", "exec", namespace(number), "unshare", "--uts"]
    user_ssh = os.path.join(pwd.getpwuid(os.getuid()).pw_dir, ".ssh")  # where ssh looks, whatever HOME says
    start = ["sh", "-ec", START, hostname(number), user_ssh, str(state.NO_SSH)]
    serve = [sys.executable, "-m", "benchmarks.netlab.server", f"{state.KEY}.pub"]
    with state.file(number, "log").open("w") as log:
        server = network.start([*enter_new, *start, *serve], cwd=ROOT, stderr=log)
    state.file(number, "pid").write_text(str(server.pid))
    return server


def down() -> None:
    """Remove all of a lab, whoever brought it up and how far that came.

    Raises:
        NetlabError: it cannot be removed.
    """
    found = network.names()
    for number in (int(file.stem) for file in state.STATE.glob("*.pid")):
        if namespace(number) not in found and (server := state.server(number)):  # somebody has used `ip netns del`
            call("ip", "netns", "attach", namespace(number), str(server))
    for name in network.names():
        network.remove(name)
    for overlay in network.OVERLAYS.glob(f"{network.PREFIX}*"):
        shutil.rmtree(overlay)
    with contextlib.suppress(OSError):  # there is none, or it holds what others have put there
        network.OVERLAYS.rmdir()
    shutil.rmtree(state.STATE, ignore_errors=True)
