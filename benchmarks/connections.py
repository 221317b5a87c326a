"""Ends Horovod within a job so that it can be started again, with connections of its own."""

from __future__ import annotations

import os

import horovod.torch as hvd
from horovod.runner.http.http_server import RendezvousServer

_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
_servers: list[RendezvousServer] = []  # of rank 0, which is where horovodrun is; the last one is in use


def shut_down() -> None:
    """``hvd.shutdown()``, after which ``hvd.init()`` is safe.

    The ranks will meet at a server that is new. horovodrun's own may still have addresses of the time before: where a
    rank is done with one scope, it forgets which ranks are done with the others, and never clears those. A rank that
    reads an old address is refused and dies, the more often the more ranks there are.
    """
    port = 0
    if hvd.rank() == 0:
        _servers.append(RendezvousServer())
        port = _servers[-1].start()
        _servers[-1].init([])  # knows no scopes, so each rank takes back its own addresses
    os.environ[_PORT] = str(hvd.broadcast_object(port, name="port"))
    hvd.shutdown()
    if len(_servers) > 1:
        _servers.pop(0).stop()
