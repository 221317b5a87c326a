"""Links with delay, in user space: ``python -m benchmarks.netlab.relay HOSTS SECONDS`` in the switch.

A host's eth0 and its port on the bridge are then TAP devices, and what leaves the host waits here. Not every kernel
has netem; every one has TAP devices. Python moves some ten thousand packets a second: up to about 100 Mbit/s.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

HOST_SIDE, PORT_SIDE = "far{}", "port{}"
_TAP, _NO_PACKET_INFO, _SET_NAME = 0x0002, 0x1000, 0x400454CA  # linux/if_tun.h
_LONGEST = 65536  # bytes of a packet
_AT_ONCE = 64  # packets of one device before the others have their turn


def open_tap(name: str) -> int:
    """A new TAP device; it goes when its descriptor is closed."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _SET_NAME, struct.pack("16sH22x", name.encode(), _TAP | _NO_PACKET_INFO))
    return device


class Relay:
    """Carries packets between each host and its port.

    Args:
        hosts: how many.
        delay: seconds that a packet that leaves a host waits, >= 0.
    """

    def __init__(self, hosts: int, delay: float) -> None:
        self._delay = delay
        self._from_host: dict[int, int] = {}  # host's device -> its port's
        self._from_port: dict[int, int] = {}
        for number in range(1, hosts + 1):
            host, port = open_tap(HOST_SIDE.format(number)), open_tap(PORT_SIDE.format(number))
            self._from_host[host], self._from_port[port] = port, host
        self._waiting: deque[tuple[float, int, bytes]] = deque()  # when it is due, where it goes

    def serve(self) -> None:
        """Carry packets for ever."""
        poll = select.epoll()
        for device in (*self._from_host, *self._from_port):
            poll.register(device, select.EPOLLIN)
        while True:
            left = self._waiting[0][0] - time.monotonic() if self._waiting else -1.0
            for device, _ in poll.poll(max(left, 0) if self._waiting else None):
                self._take(device)
            now = time.monotonic()
            while self._waiting and self._waiting[0][0] <= now:
                _, to, packet = self._waiting.popleft()
                _put(to, packet)

    def _take(self, device: int) -> None:
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(device, _LONGEST)
            except OSError:  # nothing more, or the device is down
                return
            if device in self._from_port:
                _put(self._from_port[device], packet)
            else:
                self._waiting.append((time.monotonic() + self._delay, self._from_host[device], packet))


def _put(device: int, packet: bytes) -> None:
    try:
        os.write(device, packet)
    except OSError:
        pass  # it is down, or full: a packet is lost


def main() -> None:
    """Do what the command line says; a line is printed when the devices are there."""
    relay = Relay(int(sys.argv[1]), float(sys.argv[2]))
    print("ready", flush=True)
    relay.serve()


if __name__ == "__main__":
    main()
