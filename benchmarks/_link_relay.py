"""A link between two TUN devices, with a rate and a delay: run as a process, told over its pipes.

    python -m benchmarks._link_relay DEVICE DEVICE MBIT_S ONE_WAY_MS

Whole IP packets are passed on, so that TCP meets what it would meet on such a line: each direction
sends at the rate, holds up every packet by the delay, and drops what finds the queue full. Prints a
line when the devices are there (they may then be moved to other network namespaces), and for each
line that it reads one with the bytes that were passed on so far, by direction.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MAX_PACKET = 65_535
QUEUE_S = 0.1
"""What the line's buffer holds, in seconds at its rate."""
BATCH = 64
"""Packets that are taken in one direction before the other one is looked at."""


class Lane:
    """One direction. Times are in seconds; packets come in and go out in order."""

    def __init__(self, bytes_per_s: float, delay_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._delay_s = delay_s
        self._free_s = 0.0
        self._flying: deque[tuple[float, bytes]] = deque()
        self.num_bytes = 0
        self.num_dropped = 0

    def take(self, packet: bytes, now_s: float) -> None:
        start_s = max(now_s, self._free_s)
        if start_s - now_s > QUEUE_S:
            self.num_dropped += 1
            return
        self._free_s = start_s + len(packet) / self._bytes_per_s
        self._flying.append((self._free_s + self._delay_s, packet))
        self.num_bytes += len(packet)

    def due(self, now_s: float) -> bytes | None:
        """The next packet that has arrived by now."""
        if self._flying and self._flying[0][0] <= now_s:
            return self._flying.popleft()[1]
        return None

    @property
    def next_s(self) -> float | None:
        """When the next packet arrives."""
        return self._flying[0][0] if self._flying else None


def open_device(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI)
    fcntl.ioctl(descriptor, TUNSETIFF, request)
    return descriptor


def relay(descriptors: tuple[int, int], lanes: tuple[Lane, Lane]) -> None:
    """Pass packets on until standard input is closed."""
    while True:
        times = [lane.next_s for lane in lanes if lane.next_s is not None]
        wait_s = max(0.0, min(times) - time.monotonic()) if times else None
        ready, _, _ = select.select([*descriptors, 0], [], [], wait_s)
        for source, lane in zip(descriptors, lanes, strict=True):
            if source in ready:
                _take_all(source, lane)
        for target, lane in zip(reversed(descriptors), lanes, strict=True):
            while (packet := lane.due(time.monotonic())) is not None:
                with contextlib.suppress(OSError):  # a device that is not up yet, or full
                    os.write(target, packet)
        if 0 in ready:
            if not sys.stdin.readline():
                return
            counts = {
                "bytes": [lane.num_bytes for lane in lanes],
                "dropped": [lane.num_dropped for lane in lanes],
            }
            print(json.dumps(counts), flush=True)


def _take_all(source: int, lane: Lane) -> None:
    for _ in range(BATCH):
        try:
            packet = os.read(source, MAX_PACKET)
        except OSError:  # nothing more, or the device is not up
            return
        lane.take(packet, time.monotonic())


def main() -> None:
    first, second, mbit_s, one_way_ms = sys.argv[1:]
    with contextlib.suppress(OSError):
        os.nice(-15)  # a line does not wait for the machines at its ends
    devices = (open_device(first), open_device(second))
    rate = float(mbit_s) * 1e6 / 8
    lanes = (Lane(rate, float(one_way_ms) / 1000), Lane(rate, float(one_way_ms) / 1000))
    print("{}", flush=True)
    relay(devices, lanes)


if __name__ == "__main__":
    main()
