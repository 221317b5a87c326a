"""Emulated hosts are separate machines in what matters: links of a set rate, names, logins. Nothing outlives them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.netlab import NetlabError, lab, unavailable
from benchmarks.netlab.hosts import STATE
from benchmarks.netlab.network import OVERLAYS, PREFIX

ROOT = Path(__file__).resolve().parents[2]
UP = [sys.executable, "-c", "from benchmarks.netlab import lab; lab(4).__enter__()"]
MBIT = 200
ECHO = """
import socket, time
with socket.create_server(("", 5001)) as server:
    print("listening", flush=True)
    link, _ = server.accept()
size = 500_000
while size:
    size -= len(link.recv(size))
link.sendall(b"!")
"""
TIMED = """
import socket, sys, time
link = socket.create_connection((sys.argv[1], 5001))
start = time.perf_counter()
link.sendall(bytes(500_000))
link.recv(1)
print(time.perf_counter() - start)
"""


@pytest.fixture
def hosts():
    if reason := unavailable():
        pytest.skip(reason)
    with lab(2, f"{MBIT}mbit") as up:
        yield up


def nothing_is_left() -> bool:
    """No namespace, and with it no process or link; no file."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return PREFIX not in listed and not STATE.exists() and not any(OVERLAYS.glob(f"{PREFIX}*"))


def ended(process: psutil.Process) -> bool:
    """Whether it does, soon."""
    deadline = time.monotonic() + 5
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.slow
def test_both_directions_of_a_link_have_the_rate_at_once(hosts):
    for measured in hosts.measure([(1, 2), (2, 1)], seconds=0.7):
        assert 0.7 * MBIT < measured < 1.02 * MBIT


@pytest.mark.slow
def test_a_short_message_takes_its_time(hosts):
    """What compression leaves of a gradient must see the rate too, and not pass in one burst."""
    with hosts.start(2, [sys.executable, "-c", ECHO], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == "listening\n"
        seconds = float(hosts.run(1, [sys.executable, "-c", TIMED, hosts.names[1]]).stdout)
    assert seconds > 0.85 * 500_000 * 8 / (MBIT * 1e6)


def test_ssh_is_a_fresh_login_on_the_other_host(hosts):
    kept = [Path("/etc/hosts"), Path.home() / ".ssh" / "known_hosts"]
    before = [file.read_bytes() if file.exists() else None for file in kept]
    done = hosts.run(1, ["ssh", "-o", "StrictHostKeyChecking=no", "host2", "hostname; env"], env={"LEAKED": "1"})
    name, *variables = done.stdout.splitlines()
    assert (done.returncode, name) == (0, "host2"), done.stderr
    found = dict(each.split("=", 1) for each in variables)
    assert found.keys() - {"PWD", "OLDPWD", "SHLVL", "_"} == {"HOME", "USER", "LOGNAME", "SHELL", "PATH"}
    assert str(Path(sys.executable).parent) not in found["PATH"].split(":")
    assert [file.read_bytes() if file.exists() else None for file in kept] == before


@pytest.mark.slow
def test_ssh_passes_bytes_and_status(hosts):
    script = "head -c 3000000 /dev/zero | ssh host2 'cat; echo told >&2; exit 7' | wc -c; echo ${PIPESTATUS[1]}"
    done = hosts.run(1, ["bash", "-c", script])
    assert done.stdout.split() == ["3000000", "7"]
    assert done.stderr == "told\n"


@pytest.mark.slow
def test_a_command_ends_with_its_ssh_client(hosts):
    with hosts.start(1, ["ssh", "host2", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE) as client:
        sleep = psutil.Process(int(client.stdout.readline()))
        client.kill()
        assert ended(sleep)


@pytest.mark.slow
def test_time_limit_ends_what_was_started(hosts):
    with pytest.raises(subprocess.TimeoutExpired):
        hosts.run(1, ["sh", "-c", "sleep 600 & wait"], timeout=0.5)


@pytest.mark.slow
def test_nothing_outlives_the_lab():
    if reason := unavailable():
        pytest.skip(reason)
    with lab(1) as hosts:
        done = hosts.run(1, ["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"])  # a daemon, nobody's child
        daemon = psutil.Process(int(done.stdout))
        assert daemon.is_running()
        with pytest.raises(NetlabError, match="another process has a lab up"), lab(1):
            pass
        assert daemon.is_running()
    assert ended(daemon)
    with pytest.raises(NetlabError, match="host 1 is not up"):
        hosts.run(1, ["true"])
    assert nothing_is_left()


@pytest.mark.slow
def test_a_lab_that_was_killed_half_way_up_is_cleaned_up():
    if reason := unavailable():
        pytest.skip(reason)
    with subprocess.Popen(UP, cwd=ROOT) as process:
        while not (STATE / "1.pid").exists() and process.poll() is None:
            time.sleep(0.01)
        process.kill()
    assert not nothing_is_left()
    with lab(1) as hosts:
        assert hosts.run(1, ["hostname"]).stdout == "host1\n"
    assert nothing_is_left()


@pytest.mark.slow
def test_what_cannot_be_brought_up_is_said_in_a_line(monkeypatch):
    with pytest.raises(NetlabError, match=r"with kbit, mbit or gbit, .* not 'fast'"), lab(2, "fast"):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    unavailable.cache_clear()
    with pytest.raises(NetlabError, match="network namespaces need root: run it with sudo"), lab(2):
        pass
    unavailable.cache_clear()
    assert nothing_is_left()


ANSWERS = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
    link.bind(("", 5002))
    print("listening", flush=True)
    while True:
        found, sender = link.recvfrom(100)
        link.sendto(found, sender)
"""
ASKS = """
import socket, statistics, sys, time
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.settimeout(0.5)
while True:  # until each knows where the other is
    try:
        link.sendto(b"-1", (sys.argv[1], 5002))
        link.recv(100)
        break
    except TimeoutError:
        pass
sent, times = {}, []
for i in range(100):  # fewer than a socket holds
    sent[i] = time.perf_counter()
    link.sendto(str(i).encode(), (sys.argv[1], 5002))
    time.sleep(0.001)
while True:
    try:
        i = int(link.recv(100))
    except TimeoutError:
        break
    if i >= 0:
        times.append(time.perf_counter() - sent[i])
print(len(times) / 100, min(times))
"""


@pytest.mark.slow
def test_a_link_has_delay():
    """There and back take two delays, and nothing is lost."""
    if reason := unavailable():
        pytest.skip(reason)
    with lab(2, "50mbit", delay="30ms") as up:
        with up.start(2, [sys.executable, "-c", ANSWERS], stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout.readline() == "listening\n"
                done = up.run(1, [sys.executable, "-c", ASKS, up.names[1]])
            finally:
                process.kill()
        back, seconds = map(float, done.stdout.split())
        assert back > 0.95
        assert 0.06 <= seconds < 0.2
    assert nothing_is_left()


@pytest.mark.parametrize("delay", ["40", "-1ms"])
def test_a_delay_is_what_it_should_be(delay):
    with pytest.raises(NetlabError, match="a delay is a number"), lab(2, delay=delay):
        pass
