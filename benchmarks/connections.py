"""A rank of Horovod in a benchmark, and Horovod ended and started again within a job, with connections of its own."""

from __future__ import annotations

import os
from typing import Any

import horovod.torch as hvd
import torch
from horovod.runner.http.http_server import RendezvousServer

_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
_servers: list[RendezvousServer] = []  # of rank 0, which is where horovodrun is; the last one is in use


def start(**options: Any) -> None:
    """``hvd.init(**options)`` with one thread for torch."""
    torch.set_num_threads(1)
    hvd.init(**options)


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


def renew(**options: Any) -> None:
    """New connections: after seconds of dense gradients the same ones are slower for all that follows."""
    shut_down()
    hvd.init(**options)
