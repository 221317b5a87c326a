"""Where ranks report to their launcher: Horovod's key-value store over HTTP, in `dgcrun` or Horovod's rendezvous.

Entries are JSON, never pickles: nothing that a stranger puts there is executed.
"""

from __future__ import annotations

import json
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from horovod.runner.http.http_server import KVStoreServer

_SECONDS = 5.0  # for one request
_PAUSES = (0.1, 0.3, 1.0)  # seconds, before another try
ACTIVE = "active"  # the key under which rank 0 says that Horovod was imported and compression is on


class DeskServer:
    """The store in `dgcrun`, reachable from every host; a scope that nobody guesses keeps strangers' entries apart."""

    def __init__(self) -> None:
        self._server = KVStoreServer(verbose=0)
        self._scope = f"dgc-{secrets.token_hex(8)}"
        self.port: int = self._server.start_server()

    def address(self, own_addresses: Sequence[str]) -> str:
        """What ranks need to find it: ``SCOPE@ADDRESS,ADDRESS:PORT``."""
        return f"{self._scope}@{','.join(own_addresses)}:{self.port}"

    def has(self, key: str) -> bool:
        """Whether somebody has reported `key`."""
        with self._server.httpd.cache_lock:
            return key in self._server.httpd.cache.get(self._scope, {})

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown_server()


class Desk:
    """A rank's view of a store.

    Args:
        address: as `DeskServer.address` gives it.
    """

    def __init__(self, address: str) -> None:
        self._scope, place = address.split("@")
        names, port = place.rsplit(":", 1)
        self._bases = [f"http://{name}:{port}" for name in names.split(",")]

    def put(self, key: str, entry: Any) -> None:
        """Report `entry` under `key`. Raises OSError if the store cannot be reached."""
        self._request(key, json.dumps(entry).encode())

    def get(self, key: str) -> Any:
        """The entry under `key`, None if there is none yet. Raises OSError if the store cannot be reached."""
        answer = self._request(key, None)
        return None if answer is None else json.loads(answer)

    def _request(self, key: str, data: bytes | None) -> bytes | None:
        for pause in _PAUSES:  # one thread serves all ranks, who all come at once
            try:
                return self._try(key, data)
            except OSError:
                time.sleep(pause)
        return self._try(key, data)

    def _try(self, key: str, data: bytes | None) -> bytes | None:
        failed: OSError | None = None
        for base in list(self._bases):
            request = urllib.request.Request(f"{base}/{self._scope}/{key}", data, method="PUT" if data else "GET")
            try:
                # a proxy of the cluster is for the world outside
                opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
                with opener.open(request, timeout=_SECONDS) as response:
                    answer = response.read()
            except urllib.error.HTTPError as error:
                if error.code != 404:
                    raise
                answer = None
            except OSError as error:
                failed = error
                continue
            self._bases = [base]  # the one that works
            return answer
        raise failed or OSError(f"no address of the store: {key}")
