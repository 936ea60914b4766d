"""Measure the link itself: `python -m benchmarks._link_probe serve|measure ADDRESS`."""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time

PORT = 9201
NUM_BYTES = 24 * 2**20


def serve(address: str) -> None:
    """Send NUM_BYTES to everyone who connects and asks."""
    with socket.create_server((address, PORT)) as listening:
        print("{}", flush=True)
        while True:
            client, _ = listening.accept()
            with client:
                if client.recv(1):
                    client.sendall(bytes(NUM_BYTES))


def measure(address: str) -> dict[str, float]:
    trips = []
    for _ in range(5):
        began_s = time.perf_counter()
        socket.create_connection((address, PORT)).close()
        trips.append(time.perf_counter() - began_s)
    with socket.create_connection((address, PORT)) as connection:
        connection.sendall(b"x")
        left = NUM_BYTES
        half_s = 0.0
        while left and (data := connection.recv(1 << 20)):
            left -= len(data)
            if not half_s and left < NUM_BYTES // 2:
                half_s, half = time.perf_counter(), left  # TCP has found its speed
        rate = 8 * half / (time.perf_counter() - half_s) / 1e6
    return {"rtt_ms": round(1000 * statistics.median(trips), 1), "mbit_s": round(rate, 1)}


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    print(json.dumps(measure(sys.argv[2])), flush=True)
