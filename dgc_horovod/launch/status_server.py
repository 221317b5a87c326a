"""Where ranks report to their launcher: small JSON entries over HTTP, in `dgcrun` and in Horovod's own Gloo launcher.

Entries are JSON, never pickles: nothing that a stranger puts there is executed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import re
import secrets
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_REQUEST_SECONDS = 5.0  # longest wait for the other end
_PAUSES = (0.2, 1.0)  # seconds, before another try
_GIVEN_UP_SECONDS = 30.0  # for which a store that could not be reached is not asked again
_MOST_BYTES = 4096  # of an entry of a rank
_ALL = "*"  # at the end of what is asked for: all entries whose names begin so
_NAME = re.compile(r"[\w.-]{1,64}\*?")


class StatusServer(ThreadingHTTPServer):
    """The store in `dgcrun`: a key that nobody guesses keeps strangers out, and who has it says little at once.

    Args:
        port: port to listen on; 0: one that the system chooses.
    """

    request_queue_size = 1024  # all ranks come at once
    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        self.key = f"dgc-{secrets.token_hex(16)}"
        self.entries: dict[str, Any] = {}
        self.times: dict[str, float] = {}  # when a rank has put each there last
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
        return self.entries.get(key)

    def get_all(self, prefix: str) -> dict[str, Any]:
        """The entries whose keys begin with `prefix`."""
        found = self.entries.copy()  # other threads add to it
        return {key: entry for key, entry in found.items() if key.startswith(prefix)}

    def silent_for(self, key: str) -> float:
        """Seconds since a rank last put something under `key`; infinity if none has."""
        return time.monotonic() - self.times.get(key, -math.inf)

    def put(self, key: str, entry: Any) -> None:
        """Keep `entry`, of any size, under `key`, for ranks to read."""
        self.entries[key] = entry

    def close(self) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a rank that hangs up asks again; the job's output is no place for it


class _Handler(BaseHTTPRequestHandler):
    server: StatusServer
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        name, entries = self._name(), self.server.entries
        if name.endswith(_ALL):
            return self._answer(200, self.server.get_all(name.removesuffix(_ALL)))
        return self._answer(200, entries[name]) if name in entries else self._answer(404)

    def do_PUT(self) -> None:
        name = self._name()
        try:
            length = int(self.headers.get("Content-Length", 0))
            entry = json.loads(self.rfile.read(length) if 0 < length <= _MOST_BYTES else b"")
        except (ValueError, RecursionError):  # or it is cut off
            name = ""
        if not name or name.endswith(_ALL):
            return self._answer(400)
        self.server.put(name, entry)
        self.server.times[name] = time.monotonic()
        self._answer(200)

    def _name(self) -> str:
        """What the request asks for; "" without the key."""
        key, _, name = self.path.lstrip("/").partition("/")
        known = secrets.compare_digest(key.encode(), self.server.key.encode())
        return name if known and _NAME.fullmatch(name) else ""

    def _answer(self, status: int, entry: Any = None) -> None:
        data = json.dumps(entry).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


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
