"""A wire between two tunnel devices, at a rate and with a delay: for kernels without netem.

    python -m benchmarks.wire FIRST SECOND BYTES_PER_S DELAY_S

Each packet that one device sends goes on to the other once those before it have been sent at that rate, and the delay
is over. What would wait behind `QUEUE` bytes is dropped, as a router does. Runs until it is killed.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

__all__ = ["open_tunnel"]

QUEUE = 256 * 1024
"""Bytes that wait to be sent, of one direction."""
_LARGEST = 65536
_SET_DEVICE, _TUNNEL, _NO_HEADER = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h


def open_tunnel(name: str) -> int:
    """A new tunnel device of this network namespace, for as long as the descriptor is open, wherever it is moved.

    Raises: `OSError` where this machine has none, or one of this name.
    """
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(descriptor, _SET_DEVICE, struct.pack("16sH", name.encode(), _TUNNEL | _NO_HEADER))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Direction:
    """Packets from one device to the other."""

    def __init__(self, source: int, target: int, rate: float, delay_s: float) -> None:
        self.source, self.target, self.rate, self.delay_s = source, target, rate, delay_s
        self.under_way: deque[tuple[float, bytes]] = deque()
        self.free_at = 0.0

    def take(self) -> None:
        """What the source has sent."""
        while True:
            try:
                packet = os.read(self.source, _LARGEST)
            except BlockingIOError:
                return
            now = time.monotonic()
            start = max(now, self.free_at)
            if (start - now) * self.rate <= QUEUE:
                self.free_at = start + len(packet) / self.rate
                self.under_way.append((self.free_at + self.delay_s, packet))

    def give(self) -> float:
        """Pass on what is due; seconds until the next one is."""
        while self.under_way:
            wait = self.under_way[0][0] - time.monotonic()
            if wait > 0:
                return wait
            os.write(self.target, self.under_way.popleft()[1])
        return 3600.0


def main() -> None:
    """Be the wire, before whatever else this machine does."""
    os.nice(-20)
    first, second = int(sys.argv[1]), int(sys.argv[2])
    rate, delay_s = float(sys.argv[3]), float(sys.argv[4])
    ways = {first: Direction(first, second, rate, delay_s), second: Direction(second, first, rate, delay_s)}
    while True:
        ready, _, _ = select.select(list(ways), [], [], min(way.give() for way in ways.values()))
        for descriptor in ready:
            ways[descriptor].take()


if __name__ == "__main__":
    main()
