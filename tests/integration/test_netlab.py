"""Emulated hosts are separate machines in what matters: links of a set rate, names, logins. Nothing outlives them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.netlab import Lab, NetlabError, lab, unavailable
from benchmarks.netlab.__main__ import main, with_hosts
from benchmarks.netlab.hosts import STATE
from benchmarks.netlab.network import OVERLAYS, PREFIX

ROOT = Path(__file__).resolve().parents[2]
NETLAB = [sys.executable, "-m", "benchmarks.netlab"]
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


def netlab(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, variables = [*NETLAB, *words], {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)


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
def test_the_command_line():
    """Up, status, a command whose signals and exit status are its own, down."""
    if reason := unavailable():
        pytest.skip(reason)
    up = netlab("up", "--hosts", "2", "--rate", f"{MBIT}mbit", "--per-host-ranks", "3")
    assert up.returncode == 0, up.stderr  # and where it is refused, what is up is not ours to take down
    try:
        assert re.search(r"200mbit .* measured 1\d\d Mbit/s .*, 1\d\d Mbit/s back", up.stdout)
        done = netlab("run", "--host", "2", "--", "sh", "-c", "hostname; echo $NETLAB_NP $NETLAB_HOSTS; exit 7")
        assert (done.returncode, done.stdout.split()) == (7, ["host2", "6", "host1:3,host2:3"]), done.stderr
        script = "trap 'exit 9' TERM; echo waiting; while :; do sleep 0.05; done"
        run = [*NETLAB, "run", "--", "sh", "-c", script]
        with subprocess.Popen(run, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "waiting\n"
            process.terminate()
            assert process.wait(timeout=10) == 9
        assert "a lab is up already" in netlab("up", "--hosts", "2").stderr
        whole = netlab("status")
        assert whole.returncode == 0 and whole.stdout.count("ssh server alive") == 2
        assert up.stdout.partition("measured")[2] in whole.stdout
        os.kill(int((STATE / "2.pid").read_text()), signal.SIGKILL)
        damaged = netlab("status")
        assert damaged.returncode == 1 and "host2 at 10.77.0.2: damaged: its ssh server has ended" in damaged.stdout
    finally:
        down = netlab("down")
    assert down.returncode == 0 and nothing_is_left(), down.stderr
    assert (netlab("status").returncode, netlab("status").stdout) == (1, "no lab is up\n")


@pytest.mark.parametrize(
    ("command", "given"),
    [
        ("dgcrun --gloo sh -c x -H y", True),
        ("horovodrun --config-file job.yaml sh -np 2", True),
        ("dgcrun --gloo -np 2 sh", False),
        ("dgcrun --hosts=host2:1 sh", False),
        ("horovodrun -hostfile all sh", False),
        ("sh dgcrun sh", False),
    ],
)
def test_a_launcher_without_hosts_is_given_them(command, given):
    program, *words = command.split()
    added = ["-np", "8", "-H", "host1:4,host2:4"] if given else []
    assert with_hosts(command.split(), Lab(2, 4)) == [program, *added, *words]


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
        assert "another process has a lab up" in netlab("down").stderr and daemon.is_running()
    assert ended(daemon)
    with pytest.raises(NetlabError, match="host 1 is not up"):
        hosts.run(1, ["true"])
    assert nothing_is_left()
    assert netlab("down").returncode == 0


@pytest.mark.slow
def test_a_lab_that_was_killed_half_way_up_is_cleaned_up():
    if reason := unavailable():
        pytest.skip(reason)
    with subprocess.Popen([*NETLAB, "up", "--hosts", "4"], cwd=ROOT) as process:
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
    monkeypatch.setattr(sys, "argv", ["netlab", "up", "--hosts", "2"])
    with pytest.raises(SystemExit, match="netlab: network namespaces need root: run it with sudo"):
        main()
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
for i in range(400):
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
print(len(times) / 400, min(times))
"""


@pytest.mark.slow
def test_a_link_has_delay_and_loss():
    """There and back take two delays, and what is lost on either way does not come back."""
    if reason := unavailable():
        pytest.skip(reason)
    with lab(2, "50mbit", delay="30ms", loss="20%") as up:
        with up.start(2, [sys.executable, "-c", ANSWERS], stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout.readline() == "listening\n"
                done = up.run(1, [sys.executable, "-c", ASKS, up.names[1]])
            finally:
                process.kill()
        back, seconds = map(float, done.stdout.split())
        assert 0.5 < back < 0.8, "0.64 by chance"
        assert 0.06 <= seconds < 0.2
    assert nothing_is_left()


@pytest.mark.parametrize(("delay", "loss"), [("40", "0%"), ("-1ms", "0%"), ("0ms", "100%"), ("0ms", "0.1")])
def test_a_delay_and_a_loss_are_what_they_should_be(delay, loss):
    with pytest.raises(NetlabError, match=r"a (delay|loss) is a number"), lab(2, delay=delay, loss=loss):
        pass
