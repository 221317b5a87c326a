"""Where ranks report to their launcher: small JSON entries over HTTP, in `dgcrun` and in Horovod's own Gloo launcher.

Entries are JSON, never pickles: nothing that a stranger puts there is executed.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import math
import re
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_REQUEST_SECONDS, _SECONDS_WHEN_FULL = 5.0, 0.5  # in which a request must be complete
_PAUSES = (0.2, 1.0)  # seconds, before another try
_GIVEN_UP_SECONDS = 30.0  # for which a store that could not be reached is not asked again
_MOST_BYTES, _MOST_BYTES_OF_A_REQUEST = 4096, 16384  # of an entry, and with the request around it
_MOST_CONNECTIONS = 512  # at once; each has a thread
_MOST_ENTRIES = 2**15  # a rank makes one at each hvd.init()
_ALL = "*"  # at the end of what is asked for: all entries whose names begin so
_NAME = re.compile(r"[\w.-]{1,64}\*?")


class StatusServer(ThreadingHTTPServer):
    """The store in `dgcrun`: bounded in connections, in how long each may last, and in what it keeps.

    A key that nobody guesses keeps strangers out.

    Args:
        port: port to listen on; 0: one that the system chooses.
    """

    request_queue_size = 1024  # all ranks come at once
    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        self.key = f"dgc-{secrets.token_hex(16)}"
        self.entries: dict[str, bytes] = {}
        self.times: dict[str, float] = {}  # when a rank has put each there last
        self.listing = threading.Lock()  # held while many entries are sent, which may be 128 MiB
        self._open: dict[socket.socket, float] = {}  # since when, the oldest first
        self._changed = threading.Condition()
        super().__init__(("", port), _Handler)
        threading.Thread(target=self.serve_forever, name="dgc-status", daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self.server_address[1]

    def place(self, own_addresses: Sequence[str]) -> str:
        """What ranks need to find it, beside the key: ``ADDRESS,ADDRESS:PORT``."""
        return f"{','.join(own_addresses)}:{self.port}"

    @property
    def heard_of(self) -> bool:
        """Whether any rank has reported anything."""
        return bool(self.times)

    def get(self, key: str) -> Any:
        """The entry under `key`, None if there is none."""
        data = self.entries.get(key)
        return None if data is None else json.loads(data)

    def get_all(self, prefix: str) -> dict[str, Any]:
        """The entries whose keys begin with `prefix`."""
        found: dict[str, Any] = json.loads(self.beginning_with(prefix))
        return found

    def silent_for(self, key: str) -> float:
        """Seconds since a rank last put something under `key`; infinity if none has."""
        return time.monotonic() - self.times.get(key, -math.inf)

    def put(self, key: str, entry: Any) -> None:
        """Keep `entry`, of any size, under `key`, for ranks to read."""
        with self._changed:
            self.entries[key] = json.dumps(entry).encode()

    def close(self) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            while len(self._open) >= _MOST_CONNECTIONS:  # new ones wait in the system's queue meanwhile
                self._hang_up_on_those_older_than(_SECONDS_WHEN_FULL)
                self._changed.wait_for(lambda: len(self._open) < _MOST_CONNECTIONS, _SECONDS_WHEN_FULL)
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._changed:
            self._open.pop(request, None)
            self._changed.notify()
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called at least every half second: a timeout of a socket alone would not end what comes byte by byte."""
        with self._changed:
            self._hang_up_on_those_older_than(_REQUEST_SECONDS)

    def _hang_up_on_those_older_than(self, seconds: float) -> None:
        late = time.monotonic() - seconds
        for request in [request for request, since in self._open.items() if since < late]:
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)  # its thread wakes up, and takes it out of the list

    def keep(self, name: str, data: bytes) -> bool:
        """Keep an entry of a rank; returns whether there was room for it."""
        with self._changed:
            if name not in self.entries and len(self.entries) >= _MOST_ENTRIES:
                return False
            self.entries[name], self.times[name] = data, time.monotonic()
            return True

    def beginning_with(self, prefix: str) -> bytes:
        """All entries whose names begin so: one JSON object."""
        with self._changed:
            found = [(name, data) for name, data in self.entries.items() if name.startswith(prefix)]
        return b"{" + b", ".join(json.dumps(name).encode() + b": " + data for name, data in found) + b"}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a rank that hangs up asks again; the job's output is no place for it


class _Handler(BaseHTTPRequestHandler):
    server: StatusServer
    timeout = _REQUEST_SECONDS

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_AtMost(self.connection, _MOST_BYTES_OF_A_REQUEST))

    def do_GET(self) -> None:
        name = self._name()
        if name.endswith(_ALL):
            with self.server.listing:
                return self._answer(200, self.server.beginning_with(name[: -len(_ALL)]))
        data = self.server.entries.get(name)
        self._answer(404 if data is None else 200, data or b"")

    def do_PUT(self) -> None:
        name, length = self._name(), self.headers.get("Content-Length", "")
        sized = length.isascii() and length.isdigit() and 0 < int(length) <= _MOST_BYTES
        data = self.rfile.read(int(length)) if sized else b""
        if not name or name.endswith(_ALL) or not _is_entry(data):  # or it is cut off
            return self._answer(400)
        self._answer(200 if self.server.keep(name, data) else 507)

    def _name(self) -> str:
        """What the request asks for; "" without the key."""
        key, _, name = self.path.lstrip("/").partition("/")
        known = secrets.compare_digest(key.encode(), self.server.key.encode())
        return name if known and _NAME.fullmatch(name) else ""

    def _answer(self, status: int, data: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


class _AtMost(io.RawIOBase):
    """What a connection receives, up to so many bytes: headers alone could be megabytes."""

    def __init__(self, connection: socket.socket, left: int) -> None:
        self._connection, self._left = connection, left

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._left -= count
        return count


def _is_entry(data: bytes) -> bool:
    """Whether it is JSON of one value, or of a list or an object of single values: ranks report nothing deeper."""
    try:
        entry = json.loads(data.decode())  # from bytes JSON would take UTF-16 too, which does not go with other entries
    except (ValueError, RecursionError):
        return False
    parts = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ()
    return not any(isinstance(part, (dict, list)) for part in parts)


class StatusBoard:
    """A rank's view of the stores that it can report to; whoever can reach any of them sees what is there.

    Args:
        addresses: addresses of the stores, each ``KEY@ADDRESS,ADDRESS:PORT``, see ``envvars.store_addresses``.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self.names = ", ".join(address.split("@")[-1] for address in addresses)
        self._stores = [_Store(address) for address in addresses]

    def put(self, key: str, entry: Any) -> None:
        """Report `entry` under `key`, to every store. Raises OSError if none can be reached."""
        self._each(key, json.dumps(entry).encode())

    def get(self, key: str) -> Any:
        """The entry under `key`, None if there is none yet. Raises OSError if no store can be reached."""
        found = [data for data in self._each(key, None) if data]
        return json.loads(found[0]) if found else None

    def get_all(self, prefix: str) -> dict[str, Any]:
        """The entries whose keys begin with `prefix`. Raises OSError if no store can be reached."""
        found: dict[str, Any] = {}
        for data in self._each(f"{prefix}{_ALL}", None):
            found |= json.loads(data or b"{}")
        return found

    def _each(self, key: str, data: bytes | None) -> list[bytes | None]:
        answers, failed = [], OSError("there is no store")
        for store in self._stores:
            try:
                answers.append(store.request(key, data))
            except OSError as error:
                failed = error
        if not answers:
            raise failed
        return answers


class _Store:
    def __init__(self, address: str) -> None:
        self._key, _, place = address.rpartition("@")
        names, _, port = place.rpartition(":")
        self._places = [f"{name}:{port}" for name in names.split(",")]
        self._failed = OSError()  # when it was asked last
        self._again = 0.0  # the time from which on it is asked again

    def request(self, key: str, data: bytes | None) -> bytes | None:
        """GET, or PUT of `data`; None for what is not there. Raises OSError, and for a while then does so at once."""
        if time.monotonic() < self._again:
            raise self._failed
        for pause in (0.0, *_PAUSES):
            time.sleep(pause)
            for place in list(self._places):
                try:
                    answer = self._ask(place, key, data)
                except (OSError, ValueError, http.client.HTTPException) as error:  # no host can have such a name
                    self._failed = OSError(str(error) or type(error).__name__)
                    continue
                self._places = [place]  # the one that works
                return answer
        self._again = time.monotonic() + _GIVEN_UP_SECONDS
        raise self._failed

    def _ask(self, place: str, key: str, data: bytes | None) -> bytes | None:
        # which knows no proxy of the cluster: that is for the world outside
        with contextlib.closing(http.client.HTTPConnection(place, timeout=_REQUEST_SECONDS)) as connection:
            connection.request("PUT" if data else "GET", f"/{self._key}/{key}", data)
            response = connection.getresponse()
            if response.status == 404:
                return None
            if response.status != 200:
                raise OSError(f"HTTP error {response.status} {response.reason}")
            return response.read()
