"""Where ranks report to their launcher: small JSON entries over HTTP, in `dgcrun` and in Horovod's own Gloo launcher.

Entries are JSON, never pickles: nothing that a stranger puts there is executed.
"""

from __future__ import annotations

import http.client
import json
import secrets
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dgc_horovod.errors import ConfigError

_REQUEST_SECONDS = 5.0
_PAUSES = (0.2, 1.0)  # seconds, before another try
_MOST_BYTES = 4096  # of an entry


class DeskServer:
    """The store in `dgcrun`; a scope that nobody guesses keeps strangers out."""

    def __init__(self) -> None:
        self._scope = f"dgc-{secrets.token_hex(8)}"
        self._server = _Server(("", 0), _Handler)
        self._server.scope = self._scope
        threading.Thread(target=self._server.serve_forever, name="dgc-desk", daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.server_address[1]

    def address(self, own_addresses: Sequence[str]) -> str:
        """What ranks need to find it: ``SCOPE@ADDRESS,ADDRESS:PORT``."""
        return f"{self._scope}@{','.join(own_addresses)}:{self.port}"

    @property
    def heard_of(self) -> bool:
        """Whether any rank has reported anything."""
        return bool(self._server.entries)

    def get(self, key: str) -> Any:
        """The entry under `key`, None if there is none."""
        data = self._server.entries.get(key)
        return None if data is None else json.loads(data)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    request_queue_size = 1024  # all ranks come at once
    daemon_threads = True
    scope = ""

    def __init__(self, *args: Any) -> None:
        self.entries: dict[str, bytes] = {}
        super().__init__(*args)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a rank that hangs up asks again; the job's output is no place for it


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        data = self.server.entries.get(self._key() or "")
        self._answer(404 if data is None else 200, data or b"")

    def do_PUT(self) -> None:
        key, length = self._key(), int(self.headers.get("Content-Length") or 0)
        if key is None or not 0 < length <= _MOST_BYTES:
            return self._answer(400, b"")
        self.server.entries[key] = self.rfile.read(length)
        self._answer(200, b"")

    def _key(self) -> str | None:
        scope, _, key = self.path.lstrip("/").partition("/")
        return key if secrets.compare_digest(scope.encode(), self.server.scope.encode()) else None

    def _answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


class Desk:
    """A rank's view of the stores that it can report to; whoever can reach any of them sees what is there.

    Args:
        addresses: each as `DeskServer.address` gives it.
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
        self._scope, _, place = address.partition("@")
        names, _, port = place.rpartition(":")
        if not (self._scope and names.strip(",") and port.isascii() and port.isdigit() and int(port) < 2**16):
            raise ConfigError(f"DGC_DESK must be SCOPE@ADDRESS:PORT, got {address!r}; dgcrun sets it, unset it")
        self._bases = [f"http://{name}:{port}" for name in names.split(",") if name]
        # a proxy of the cluster is for the world outside
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._dead: OSError | None = None

    def request(self, key: str, data: bytes | None) -> bytes | None:
        """GET, or PUT of `data`; None for what is not there. Raises OSError; once it has, it does so at once."""
        if self._dead is not None:
            raise self._dead
        for pause in (*_PAUSES, None):
            for base in list(self._bases):
                try:
                    answer = self._ask(base, key, data)
                except (OSError, http.client.HTTPException) as error:
                    failed = OSError(str(error) or type(error).__name__)
                    continue
                self._bases = [base]  # the one that works
                return answer
            if pause is not None:
                time.sleep(pause)
        self._dead = failed
        raise failed

    def _ask(self, base: str, key: str, data: bytes | None) -> bytes | None:
        request = urllib.request.Request(f"{base}/{self._scope}/{key}", data, method="PUT" if data else "GET")
        try:
            with self._opener.open(request, timeout=_REQUEST_SECONDS) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise
