"""Speed of the link between this host and another: TCP throughput in both directions, and the round-trip time.

The other host runs `answer`, connects back twice, and takes part in three measurements: echo of single bytes, a stream
from here to there, a stream from there to here. It needs the standard library only, and every wait has a limit.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

SECONDS = 1.0  # of each stream
_UNCOUNTED_SECONDS = 0.25  # at its begin: TCP's slow start, and the first burst of a shaped link
_ECHOES = 21
_BLOCK = bytes(2**18)
_STALL_SECONDS = 5.0  # longest single wait within a measurement
_STRANGER_SECONDS = 1.0  # longest wait for the token of a connection
_TOKEN_BYTES = 32


@dataclass(frozen=True)
class Link:
    """Measurements between this host and another.

    Args:
        host: name of the other host, as the job gives it.
        there_bits: payload bits a second from here to there.
        back_bits: payload bits a second from there to here.
        round_trip: seconds for one byte there and back, median.
        problem: reason why there are no figures; "" if there are.
    """

    host: str
    there_bits: float = 0.0
    back_bits: float = 0.0
    round_trip: float = 0.0
    problem: str = ""


def measure(
    host: str, address: str, run: Callable[[Sequence[str], str], dict[str, Any]], patience: float = 20.0
) -> Link:
    """Measure the link to `host`; takes about 2.5 s once the program has started there.

    Args:
        host: name of the other host, for the result.
        address: IPv4 address of this host that the other one can reach.
        run: function that runs `answer` there with address and port, and this token as input, and waits for its end;
            returns its result as ``bits``, or what is wrong as ``error``.
        patience: seconds until the other host must have connected.
    """
    token = secrets.token_hex(_TOKEN_BYTES // 2)
    try:
        with socket.create_server((address, 0)) as listener, ThreadPoolExecutor(max_workers=1) as pool:
            there = pool.submit(run, [address, str(listener.getsockname()[1])], token)
            try:
                round_trip, back = serve(listener, token, patience, there.done)
            except OSError as error:
                listener.close()  # the other side, if it comes too late, is refused and ends
                return Link(host, problem=f"{error} ({there.result().get('error', 'no error there')})")
            found = there.result()
            return Link(host, found.get("bits", 0.0), back, round_trip, found.get("error", ""))
    except OSError as error:
        return Link(host, problem=str(error))


def serve(
    listener: socket.socket, token: str, patience: float, ended: Callable[[], bool] = lambda: False
) -> tuple[float, float]:
    """Do this host's part: wait for the other one, echo, send, receive.

    Args:
        listener: socket that the other host connects to.
        token: text that it must send first; any other connection is closed and forgotten.
        patience: seconds until it must have connected.
        ended: function that says whether the other host's program has ended.

    Returns:
        Round-trip time in seconds, and bits received a second.

    Raises:
        OSError: nobody with the token came, or the connection broke.
    """
    with _admitted(listener, token, patience, ended) as connection:
        round_trip = _echo(connection)
        _send(connection)
    with _admitted(listener, token, patience, ended) as connection:
        return round_trip, _receive(connection)


def _admitted(listener: socket.socket, token: str, patience: float, ended: Callable[[], bool]) -> socket.socket:
    deadline = time.monotonic() + patience
    listener.settimeout(0.1)
    while time.monotonic() < deadline:
        over = ended()  # before the last look: it may have connected and ended in between
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if over:
                raise ConnectionError("the program on that host has ended and has not connected back") from None
            continue
        if _says(connection, token):
            connection.settimeout(_STALL_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        connection.close()
    address, port = listener.getsockname()
    raise TimeoutError(f"no connection from that host to {address}:{port} within {patience:g} s")


def _says(connection: socket.socket, token: str) -> bool:
    deadline, said = time.monotonic() + _STRANGER_SECONDS, b""
    try:
        while len(said) < _TOKEN_BYTES and (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            part = connection.recv(_TOKEN_BYTES - len(said))
            if not part:
                break
            said += part
    except OSError:
        return False
    return hmac.compare_digest(said, token.encode())


def _echo(connection: socket.socket) -> float:
    times = []
    for _ in range(_ECHOES):
        start = time.perf_counter()
        connection.sendall(b"?")
        if not connection.recv(1):
            raise ConnectionError("the other host closed the connection during the echo")
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _send(connection: socket.socket) -> None:
    """Send until the receiver, which measures the time, closes the connection."""
    deadline = time.monotonic() + SECONDS + _STALL_SECONDS
    try:
        while time.monotonic() < deadline:
            connection.send(_BLOCK)
    except OSError:
        pass


def _receive(connection: socket.socket) -> float:
    """Receive for `SECONDS`, then return bits a second; the begin is not counted."""
    buffer = bytearray(2**20)
    counted, begin = 0, 0.0
    start = now = time.perf_counter()
    while now < start + SECONDS:
        size = connection.recv_into(buffer)
        if not size:
            break
        now = time.perf_counter()
        if begin:
            counted += size
        elif now >= start + _UNCOUNTED_SECONDS:
            begin = now
    if not counted:
        raise ConnectionError("the stream broke off before it could be measured")
    return 8 * counted / (now - begin)


def answer(address: str, port: int, token: str) -> float:
    """Do the other host's part of `serve`; returns bits received a second.

    Raises:
        OSError: it cannot connect, or the connection broke.
    """
    with socket.create_connection((address, port), _STALL_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(token.encode())
        for _ in range(_ECHOES):
            connection.sendall(connection.recv(1))
        there = _receive(connection)
    with socket.create_connection((address, port), _STALL_SECONDS) as connection:
        connection.sendall(token.encode())
        _send(connection)
    return there
