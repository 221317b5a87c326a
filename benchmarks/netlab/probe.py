"""One end of a measured TCP stream, for `Lab.measure`; run as a script, with the standard library alone.

receive SECONDS: say the port, say "connected"; at a line on the input read for so long and say the Mbit/s
send ADDRESS PORT: send until the receiver hangs up
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time

UNCOUNTED_SECONDS = 0.3  # at the beginning: TCP's slow start, full buffers, and what a shaped link passes in one burst
PATIENCE_SECONDS = 10.0


def receive(seconds: float) -> float:
    """Mbit/s of payload that arrive on one connection; the receiver holds the clock."""
    buffer = bytearray(1 << 20)
    with socket.create_server(("", 0)) as server:
        server.settimeout(PATIENCE_SECONDS)
        print(server.getsockname()[1], flush=True)
        link, _ = server.accept()
    with link:
        link.settimeout(PATIENCE_SECONDS)
        print("connected", flush=True)
        sys.stdin.readline()  # all streams that are measured together begin together
        begin = now = time.perf_counter() + UNCOUNTED_SECONDS
        counted = 0
        while now < begin + seconds:
            size = link.recv_into(buffer)
            if not size:
                raise ConnectionError("the sender hung up")
            now = time.perf_counter()
            counted += size if now > begin else 0
    return counted * 8e-6 / (now - begin)


def send(address: str, port: int) -> None:
    """Send as fast as it goes."""
    block = bytes(1 << 18)
    with socket.create_connection((address, port), PATIENCE_SECONDS) as link, contextlib.suppress(ConnectionError):
        while True:
            link.sendall(block)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        print(receive(float(sys.argv[2])))
    else:
        send(sys.argv[2], int(sys.argv[3]))
