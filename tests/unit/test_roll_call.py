"""The roll-call and its store, with clients in threads: who is named, how many it bears, who is let in."""

from __future__ import annotations

import http.client
import threading
import time

import pytest

from dgc_horovod import envvars
from dgc_horovod.errors import NotActivated
from dgc_horovod.launch import hosts, roll_call
from dgc_horovod.launch.desk import Desk, DeskServer


@pytest.fixture
def desk():
    server = DeskServer()
    yield server
    server.close()


def hold_all(desk, workers, absent=(), seconds=2.0):
    """What each rank's roll-call ends with: None, or its error."""
    ended: dict[int, BaseException | None] = {}

    def one(rank):
        try:
            view = Desk([desk.address(["127.0.0.1"])])
            view.put(roll_call.present(0, rank), "here")
            found = (roll_call._count if rank == 0 else roll_call._await_verdict)(view, 0, workers, seconds)
            ended[rank] = NotActivated(roll_call._message(found, workers, view.names)) if found else None
        except OSError as error:
            ended[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(workers) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return ended


@pytest.mark.parametrize("workers", [2, 128])
def test_all_here(desk, workers):
    start = time.monotonic()
    ended = hold_all(desk, workers, seconds=30)
    assert len(ended) == workers and not any(ended.values()) and time.monotonic() - start < 25


@pytest.mark.parametrize("absent", [{3}, {0}, {0, 2}])
def test_whoever_is_absent_is_named_to_everybody(desk, absent, monkeypatch):
    monkeypatch.setenv("DGC_HOSTS", "a:2,b:2")
    named = ", ".join(f"rank {rank} ({'aabb'[rank]})" for rank in sorted(absent))
    ended = hold_all(desk, 4, absent, seconds=0.5)
    assert set(ended) == set(range(4)) - absent
    assert all(f"not active on {named} of 4 ranks" in str(error) for error in ended.values())


def test_without_a_store_it_lets_everybody_pass(monkeypatch):
    for name in ("DGC_DESK", "HOROVOD_GLOO_RENDEZVOUS_ADDR"):
        monkeypatch.delenv(name, raising=False)
    roll_call.hold(1, 2)
    monkeypatch.setenv("DGC_TIMEOUT", "30")
    monkeypatch.delenv("HOROVOD_STALL_CHECK_TIME_SECONDS", raising=False)
    roll_call.prepare()
    assert envvars.environment()["HOROVOD_STALL_CHECK_TIME_SECONDS"] == "15"


def test_an_unreachable_store_is_a_warning_and_soon_over(monkeypatch, caplog):
    monkeypatch.setenv("DGC_DESK", "scope@127.0.0.1:9")
    monkeypatch.delenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", raising=False)
    start = time.monotonic()
    roll_call.hold(0, 2)
    assert "cannot reach its launcher at 127.0.0.1:9" in caplog.text and time.monotonic() - start < 10


def test_a_dead_address_and_a_dead_store_do_not_hide_a_live_one(desk):
    live = desk.address(["127.0.0.9", "127.0.0.1"])
    view = Desk(["scope@127.0.0.1:9", live])
    view.put("key", [1])
    assert view.get("key") == [1] == desk.get("key") and view.get("other") is None


@pytest.mark.parametrize(
    ("method", "path", "length"),
    [("GET", "/dgc-0/key", 0), ("HEAD", "/cli.py", 0), ("PUT", "/x/key", 3), ("PUT", "own", 9999)],
)
def test_strangers_get_and_leave_nothing(desk, method, path, length):
    own = desk.address(["x"]).split("@")[0]
    connection = http.client.HTTPConnection("127.0.0.1", desk.port, timeout=5)
    connection.request(method, f"/{own}/key" if path == "own" else path, body=b"1" * length or None)
    assert connection.getresponse().status in (400, 404, 501) and not desk.heard_of


@pytest.mark.parametrize(
    ("command", "python"),
    [
        (["python", "train.py"], "python"),
        (["/a/python3.11", "-u", "train.py"], "/a/python3.11"),
        (["env", "-u", "X", "A=b", "python3", "x.py"], "python3"),
        (["numactl", "-N", "0", "python3.13t", "x.py"], "python3.13t"),
        (["bash", "-c", "python x.py"], None),
        (["bash", "run.sh", "python"], None),
        (["nothing-like-it"], None),
        ([], None),
    ],
)
def test_the_python_of_a_command(command, python):
    assert hosts.interpreter_of(command) == python


@pytest.mark.parametrize(
    ("first", "python"),
    [
        ("#!/usr/bin/env -S python3 -u", "python3"),
        ("#!/b/bin/python -u", "/b/bin/python"),
        ("#!/bin/sh", None),
        ("\x7fELF", None),
    ],
)
def test_the_python_of_a_script(tmp_path, first, python):
    script = tmp_path / "train"
    script.write_text(first + "\n")
    assert hosts.interpreter_of([str(script), "--lr", "1"]) == python
    assert (
        hosts.interpreter_of([str(script), "python", "train.py"]) is None
    )  # it may run that one in another environment
