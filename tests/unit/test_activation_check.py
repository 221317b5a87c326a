"""The activation check and its store, with clients in threads: who is named, how many it bears, who is let in."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time

import pytest

from dgc_horovod import envvars, recording
from dgc_horovod.errors import NotActivated
from dgc_horovod.launch import hosts, job, launcher
from dgc_horovod.launch import reports as reports_module
from dgc_horovod.launch import status_server as desk_module
from dgc_horovod.launch.reports import Reports
from dgc_horovod.launch.settings import Job, resolve
from dgc_horovod.launch.status_server import StatusBoard, StatusServer
from dgc_horovod.launch.summary import Outcome
from dgc_horovod.stats import COUNTERS


@pytest.fixture
def server():
    server = StatusServer()
    yield server
    server.close()


@pytest.fixture
def address(server) -> str:
    """Of the server, with its key."""
    return f"{server.key}@{server.place(['127.0.0.1'])}"


@pytest.fixture
def board(address) -> StatusBoard:
    return StatusBoard([address])


def hold_all(address, workers, absent=(), seconds=2.0):
    """What each rank's activation check ends with: None, or its error."""
    ended: dict[int, BaseException | None] = {}

    def one(rank):
        try:
            view = StatusBoard([address])
            view.put(reports_module.present(0, rank), "here")
            count = reports_module._count if rank == 0 else reports_module._await_verdict
            found = count(view, 0, workers, seconds)
            ended[rank] = NotActivated(reports_module._message(found, workers, view.names)) if found else None
        except OSError as error:
            ended[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(workers) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return ended


@pytest.mark.parametrize("workers", [2, 128])
def test_all_here(address, workers):
    start = time.monotonic()
    ended = hold_all(address, workers, seconds=30)
    assert len(ended) == workers and not any(ended.values()) and time.monotonic() - start < 25


@pytest.mark.parametrize("absent", [{3}, {0}, {0, 2}])
def test_whoever_is_absent_is_named_to_everybody(address, absent, monkeypatch):
    monkeypatch.setenv("DGC_HOSTS", "a:2,b:2")
    named = ", ".join(f"rank {rank} ({'aabb'[rank]})" for rank in sorted(absent))
    ended = hold_all(address, 4, absent, seconds=0.5)
    assert set(ended) == set(range(4)) - absent
    assert all(f"not active on {named} of 4 ranks" in str(error) for error in ended.values())


def test_without_a_store_it_lets_everybody_pass(monkeypatch):
    for name in ("DGC_STATUS_SERVER", "HOROVOD_GLOO_RENDEZVOUS_ADDR"):
        monkeypatch.delenv(name, raising=False)
    reports_module.hold(1, 2)
    monkeypatch.setenv("DGC_TIMEOUT", "30")
    monkeypatch.delenv("HOROVOD_STALL_CHECK_TIME_SECONDS", raising=False)
    reports_module.prepare()
    assert envvars.environment()["HOROVOD_STALL_CHECK_TIME_SECONDS"] == "15"


def test_an_unreachable_store_is_a_warning_and_soon_over(monkeypatch, caplog):
    monkeypatch.setenv("DGC_STATUS_SERVER", "127.0.0.1:9")
    monkeypatch.setenv("DGC_STATUS_KEY", "key")
    monkeypatch.delenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", raising=False)
    start = time.monotonic()
    reports_module.hold(0, 2)
    assert "cannot reach its launcher at 127.0.0.1:9" in caplog.text and time.monotonic() - start < 10


def test_a_dead_address_and_a_dead_store_do_not_hide_a_live_one(server):
    live = f"{server.key}@{server.place(['127.0.0.9', '127.0.0.1'])}"
    view = StatusBoard(["key@127.0.0.1:9", live])
    view.put("key", [1])
    assert view.get("key") == [1] == server.get("key") and view.get("other") is None


@pytest.fixture
def comes_back():
    """An address where nobody answers, and a function after which a server does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    servers = []

    def start() -> StatusServer:
        servers.append(StatusServer(port))
        servers[0].key = "key"
        return servers[0]

    yield f"key@127.0.0.1:{port}", start
    servers[0].close()


def test_a_store_that_was_out_of_reach_is_asked_again(comes_back, monkeypatch):
    """A rank had given it up for the rest of the job."""
    monkeypatch.setattr(desk_module, "_GIVEN_UP_SECONDS", 0.5)
    monkeypatch.setattr(desk_module, "_PAUSES", (0.1,))
    address, start = comes_back
    view = StatusBoard([address])
    for least, most in ((0.1, 5), (0, 0.1)):  # the second time without a try
        begin = time.monotonic()
        with pytest.raises(OSError, match="refused"):
            view.put("a", 1)
        assert least <= time.monotonic() - begin < most
    back = start()
    time.sleep(0.5)
    view.put("a", 1)
    assert back.get("a") == 1


def test_reports_go_on_after_an_outage(comes_back, monkeypatch):
    """They had ended with the first that did not arrive."""
    for module, name, value in (
        (reports_module, "EVERY", 0.1), (desk_module, "_GIVEN_UP_SECONDS", 0.1), (desk_module, "_PAUSES", ()),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    address, start = comes_back
    reports = Reports(address)
    reports.go_on_as(0, 1)
    time.sleep(0.5)
    back, deadline = start(), time.monotonic() + 20
    while not back.heard_of and time.monotonic() < deadline:
        time.sleep(0.05)
    assert back.get("figures.0")["rank"] == 0 and back.silent_for("figures.0") < 20
    reports.end()


def end_of(server: StatusServer, settings: Job) -> int:
    """The exit code of a job of two ranks that has ended without an error."""
    return job.exit_code(server, settings, lambda status: launcher.why_uncompressed(status, 2))


@pytest.mark.parametrize(
    ("told", "silent", "code", "said"),
    [
        ({}, 0, 3, "no rank has called hvd.init()"),
        ({"0.rank0": "here"}, 0, 3, "has made no DistributedOptimizer"),
        ({"0.rank0": "here"}, 100, 0, "rank 0 was out of reach for the last 100 s"),
        ({"0.rank0": "here", "figures.1": {"timed_steps": 5}}, 100, 0, "no summary"),
        ({"0.rank0": "here", "figures.1": {"timed_steps": 0}}, 0, 3, "has made no DistributedOptimizer"),
        ({"0.rank0": "here", "wrapped": True}, 0, 0, "no summary"),
        ({"0.rank0": "here", "end": {"inactive": "a reason"}}, 100, 3, ""),
        ({"0.rank0": "here", "end": {"inactive": ""}}, 0, 0, ""),
    ],
    ids=["nobody", "nothing wrapped", "out of reach", "steps of another", "no steps", "wrapped", "inactive", "active"],
)
def test_a_word_that_is_missing_is_no_proof(server, board, told, silent, code, said, capsys):
    """A job that was compressed had failed because rank 0 could not reach dgcrun at its end."""
    for key, entry in told.items():
        board.put(key, entry)
        server.times[key] -= silent
    assert end_of(server, resolve({"DGC_COMPRESSION": "dgc"}, {})) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "path", "length"),
    [("GET", "/dgc-0/key", 0), ("HEAD", "/cli.py", 0), ("PUT", "/x/key", 3), ("PUT", "own", 9999)],
)
def test_strangers_get_and_leave_nothing(server, method, path, length):
    assert ask(server, method, f"/{server.key}/key" if path == "own" else path, b"1" * length) in (400, 404, 501)
    assert not server.heard_of


def ask(server, method: str, path: str, body: bytes = b"") -> int:
    """The status of the answer."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as connection:
        connection.request(method, path, body=body or None)
        return connection.getresponse().status


@contextlib.contextmanager
def knocking(server, count: int):
    """Connections that begin a request; no answer is read."""
    with contextlib.ExitStack() as opened:
        made = [opened.enter_context(socket.create_connection(("127.0.0.1", server.port), 10)) for _ in range(count)]
        for connection in made:
            connection.sendall(b"GET / HTTP/1.1\r\n")
        yield made


def hung_up(connection: socket.socket) -> bool:
    """Whether the other end has closed it, within 10 s."""
    connection.settimeout(10)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_strangers_who_hold_connections_open_keep_nobody_out(server, board, monkeypatch):
    monkeypatch.setattr(desk_module._Handler, "timeout", 1.0)
    with knocking(server, 40) as strangers:
        board.put("key", 1)
        assert server.get("key") == 1
        assert all(hung_up(connection) for connection in strangers)


def test_what_is_no_entry_is_not_kept(server):
    """In name and content, even for those who have the key."""
    assert ask(server, "PUT", f"/{server.key}/a", b"1") == 200
    cases = [("a" * 65, b"1"), ("a/b", b"1"), ("", b"1"), ("a", b"[1"), ("a", b'"\xff"'), ("a*", b"1")]
    for name, body in cases:
        assert ask(server, "PUT", f"/{server.key}/{name}", body) == 400
    assert server.get_all("") == {"a": 1}


@pytest.mark.parametrize(
    ("place", "key"),
    [("a..b:80", "k"), (f"{'x' * 70}:80", "k"), ("[:9", "k"), ("\udcff:9", "k"), ("127.0.0.1:9", "\udcff")],
    ids=ascii,
)
def test_a_place_that_no_machine_can_have_is_out_of_reach(monkeypatch, place, key):
    """It had ended in an error of Python's codecs."""
    monkeypatch.setattr(desk_module, "_PAUSES", ())
    with pytest.raises(OSError, match=r"."):
        StatusBoard([f"{key}@{place}"]).get("a")


@pytest.mark.parametrize(
    ("command", "python"),
    [
        (["python", "train.py"], "python"),
        (["/a/python3.11", "-u", "train.py"], "/a/python3.11"),
        (["env", "-u", "X", "A=b", "python3", "x.py"], "python3"),
        (["numactl", "-N", "0", "python3.13t", "x.py"], "python3.13t"),
        (["bash", "-c", "python x.py"], None),
        (["bash", "run.sh", "python"], None),
        (["./train", "python", "train.py"], None),
        (["nothing-like-it"], None),
        ([], None),
    ],
)
def test_the_python_of_a_command(command, python):
    assert hosts.interpreter_of(command) == python


def test_all_entries_of_a_kind_are_read_at_once(server, board):
    assert board.get_all("figures.") == {}
    for rank in range(3):
        board.put(f"figures.{rank}", {"rank": rank})
    board.put("figure", 1)
    server.put("run", {"command": "x" * 10_000})  # what dgcrun itself says has no limit
    assert board.get_all("figures.") == {f"figures.{rank}": {"rank": rank} for rank in range(3)}
    assert len(board.get("run")["command"]) == 10_000
    with pytest.raises(OSError, match="400"):
        board.put("figures.*", 1)


def test_the_ranks_reports_reach_rank_0_and_those_that_have_left_do_not(address):
    reports = [Reports(address) for _ in range(3)]
    for rank, each in enumerate(reports):
        each.go_on_as(rank, 3)
    for each in reversed(reports):  # rank 0 ends last, and waits for nobody
        start = time.monotonic()
        each.end()
    assert [figures["rank"] for figures in reports[0].of_all()] == [0, 1, 2] and time.monotonic() - start < 1.5
    alone = Reports(address)
    alone.go_on_as(0, 2)
    alone.end()
    assert [figures["rank"] for figures in alone.of_all()] == [0, 1]


ODD = [None, True, 7, "x", [], [1], {}, {"rank": 1}, {"rank": 1, "last": True}, [1, 2, 3], 10**400, float("nan")]
COUNTS = {name: 1.0 for name in COUNTERS}
ODD_VALUES = [None, True, "1", [1], -1, 10**400, float("inf"), float("nan")]


def test_what_is_no_report_is_left_out(server, address, board, monkeypatch):
    """An entry that is none had ended the thread and the exit handler of rank 0: no summary, no last record."""
    monkeypatch.setattr(reports_module, "_LAST_SECONDS", 0)
    for entry in [*ODD, *({"rank": 1, **COUNTS, "step_seconds": odd} for odd in ODD_VALUES)]:
        reports = Reports(address)
        reports.go_on_as(0, 3)
        server.put("figures.1", entry)
        server.put("figures.7", entry)
        board.put("figures.2", {"rank": 2, "host": "b\n", **COUNTS, "overlap": 0.5, "a b": 1, "c": "d", "last": True})
        reports.end()
        told = reports.of_all()
        assert [figures["rank"] for figures in told] == [0, 2], entry
        assert told[1] == {"rank": 2, "host": "", **COUNTS, "overlap": 0.5}
        reports._judge(told)
        assert len(list(recording._numbers({"ranks": recording.bounded(told)}))) >= 2 * len(COUNTERS)


def test_a_word_of_another_shape_is_no_word(server, monkeypatch):
    """Nor is an entry under any other name of ours an error of whoever reads it."""
    monkeypatch.setenv("DGC_STATUS_SERVER", server.place(["127.0.0.1"]))
    monkeypatch.setenv("DGC_STATUS_KEY", server.key)
    monkeypatch.setattr(reports_module, "_LOOK_AT_LEAST_EVERY", 0.01)
    outcome = Outcome(resolve({"DGC_COMPRESSION": "dgc"}, {}))
    for entry in ODD[1:]:
        for key in ("end", "wrapped", "figures.0", "0.rank0", "run", reports_module.verdict(0)):
            outcome._desk.put(key, entry)
        assert isinstance(outcome._run(), dict)
        assert end_of(server, outcome.job) in (0, 3)
        found = reports_module._await_verdict(outcome._desk, 0, 1, 0.0)
        assert found == (entry if isinstance(entry, list) else [])
