"""Emulated hosts are separate machines in what matters: links of a set rate, names, logins. Nothing outlives them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.netlab import Lab, NetlabError, lab, unavailable

ROOT = Path(__file__).resolve().parents[2]
MBIT = 200
RECEIVE = """
import socket, time
server = socket.create_server(("", 5001))
print("listening", flush=True)
link, _ = server.accept()
start, received = time.perf_counter(), 0
while data := link.recv(1 << 20):
    received += len(data)
print(received * 8 / 1e6 / (time.perf_counter() - start))
"""
SEND = """
import socket, sys, time
link, end, data = socket.create_connection((sys.argv[1], 5001)), time.monotonic() + 1.5, bytes(1 << 16)
while time.monotonic() < end:
    link.sendall(data)
"""


@pytest.fixture
def hosts():
    if reason := unavailable():
        pytest.skip(reason)
    with lab(2, f"{MBIT}mbit") as up:
        yield up


def mbit_per_second(hosts: Lab, sender: int, receiver: int) -> float:
    with hosts.start(receiver, [sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == "listening\n"
        sent = hosts.run(sender, [sys.executable, "-c", SEND, hosts.names[receiver - 1]])
        assert sent.returncode == 0, sent.stderr
        return float(process.stdout.readline())


def ended(process: psutil.Process) -> bool:
    """Whether it does, soon."""
    deadline = time.monotonic() + 5
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_each_direction_of_a_link_has_the_rate(hosts):
    for sender, receiver in ((1, 2), (2, 1)):
        measured = mbit_per_second(hosts, sender, receiver)
        assert 0.5 * MBIT < measured < 1.15 * MBIT, f"from host {sender} to {receiver}"


def test_ssh_is_a_fresh_login_on_the_other_host(hosts):
    kept = [Path("/etc/hosts"), Path.home() / ".ssh" / "known_hosts"]
    before = [file.read_bytes() if file.exists() else None for file in kept]
    done = hosts.run(1, ["ssh", "-o", "StrictHostKeyChecking=no", "nlh2", "hostname; env"], env={"LEAKED": "1"})
    name, *variables = done.stdout.splitlines()
    assert (done.returncode, name) == (0, "nlh2"), done.stderr
    found = dict(each.split("=", 1) for each in variables)
    assert found.keys() - {"PWD", "OLDPWD", "SHLVL", "_"} == {"HOME", "USER", "LOGNAME", "SHELL", "PATH"}
    assert str(Path(sys.executable).parent) not in found["PATH"].split(":")
    assert [file.read_bytes() if file.exists() else None for file in kept] == before


def test_ssh_passes_bytes_and_status(hosts):
    script = "head -c 3000000 /dev/zero | ssh nlh2 'cat; echo told >&2; exit 7' | wc -c; echo ${PIPESTATUS[1]}"
    done = hosts.run(1, ["bash", "-c", script])
    assert done.stdout.split() == ["3000000", "7"]
    assert done.stderr == "told\n"


def test_a_command_ends_with_its_ssh_client(hosts):
    with hosts.start(1, ["ssh", "nlh2", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE) as client:
        sleep = psutil.Process(int(client.stdout.readline()))
        client.kill()
        assert ended(sleep)


def test_the_command_line_passes_status_and_signals(hosts):
    run = [sys.executable, "-m", "benchmarks.netlab", "exec", "2"]
    done = subprocess.run([*run, "sh", "-c", "hostname; exit 7"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "nlh2\n"), done.stderr
    script = "trap 'exit 9' TERM; echo waiting; while :; do sleep 0.05; done"
    with subprocess.Popen([*run, "sh", "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waiting\n"
        process.terminate()
        assert process.wait(timeout=10) == 9


def test_time_limit_ends_what_was_started(hosts):
    with pytest.raises(subprocess.TimeoutExpired):
        hosts.run(1, ["sh", "-c", "sleep 600 & wait"], timeout=0.5)


def test_nothing_outlives_the_lab():
    if reason := unavailable():
        pytest.skip(reason)
    with lab(1) as hosts:
        done = hosts.run(1, ["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"])  # a daemon, nobody's child
        daemon = psutil.Process(int(done.stdout))
        assert daemon.is_running()
    assert ended(daemon)
    with pytest.raises(NetlabError, match="host 1 is not up"):
        hosts.run(1, ["true"])
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert "dgc-netlab" not in listed
    again = subprocess.run([sys.executable, "-m", "benchmarks.netlab", "down"], cwd=ROOT, capture_output=True)
    assert again.returncode == 0, again.stderr


def test_what_cannot_be_brought_up_leaves_nothing():
    if reason := unavailable():
        pytest.skip(reason)
    with pytest.raises(NetlabError, match="illegal value"), lab(2, "fast"):
        pass
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert "dgc-netlab" not in listed
