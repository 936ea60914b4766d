"""A closed-loop load generator: each connection sends its next request when the answer is in.

Its own process and a bare asyncio protocol, so that it takes little of the machine. Targets are
measured in turns within one run, so that both meet the same noise. Prints JSON: for each target
the number of answers, the throughput and the latencies' quantiles.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time

BODY = json.dumps(
    {
        "model": "stub",
        "prompt": "What is 17 + 25? Think step by step, then answer with one number. " * 3,
        "max_tokens": 24,
        "temperature": 1.0,
        "seed": 7,
        "logprobs": 0,
        "weight_version": {"min_version": 3},
    }
).encode()
_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)


class Asking(asyncio.Protocol):
    """One connection; `latencies_s` grows while `running`."""

    def __init__(self, request: bytes, must_contain: bytes) -> None:
        self._request = request
        self._must_contain = must_contain
        self.latencies_s: list[float] = []
        self.idle = asyncio.Event()
        self.idle.set()
        self.running = False
        self.fault: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._data = b""

    def start(self) -> None:
        self.running = True
        self.idle.clear()
        self._send()

    def _send(self) -> None:
        self._sent_s = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._data = self._data + data if self._data else data
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return
        match = _LENGTH.search(self._data, 0, end + 2)
        if match is None or len(self._data) < end + 4 + int(match[1]):
            return
        self.latencies_s.append(time.perf_counter() - self._sent_s)
        if b" 200 " not in self._data[:20] or self._must_contain not in self._data:
            self.fault = self._data.decode(errors="replace")[:500]
            self.running = False
        self._data = b""
        if self.running:
            self._send()
        else:
            self.idle.set()

    def connection_lost(self, error: Exception | None) -> None:
        if self.running:
            self.fault = f"connection lost: {error}"
        self.running = False
        self.idle.set()


def request_bytes(port: int) -> bytes:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAccept: */*\r\n"
        f"User-Agent: load\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
    )
    return head.encode() + BODY


async def connect(port: int, connections: int, must_contain: bytes) -> list[Asking]:
    loop = asyncio.get_running_loop()
    request = request_bytes(port)
    made = [
        await loop.create_connection(lambda: Asking(request, must_contain), "127.0.0.1", port)
        for _ in range(connections)
    ]
    return [protocol for _, protocol in made]


async def turn(asking: list[Asking], seconds_s: float) -> float:
    """Run one target for a while; returns the seconds it took."""
    started_s = time.perf_counter()
    for one in asking:
        one.start()
    await asyncio.sleep(seconds_s)
    for one in asking:
        one.running = False
    await asyncio.gather(*(one.idle.wait() for one in asking))
    for one in asking:
        if one.fault is not None:
            raise SystemExit(f"a request failed: {one.fault}")
    return time.perf_counter() - started_s


def quantile_ms(latencies_s: list[float], q: float) -> float:
    return latencies_s[min(len(latencies_s) - 1, int(q * len(latencies_s)))] * 1e3


async def measure(
    ports: dict[str, int], connections: int, seconds_s: float, turns: int
) -> dict[str, dict[str, float]]:
    targets = {}
    for name, port in ports.items():
        stamped = b"" if name == "direct" else b'"weight_version_end"'
        targets[name] = await connect(port, connections, stamped)
    for asking in targets.values():  # warm up: connections, caches
        await turn(asking, min(0.3, seconds_s / 4))
        for one in asking:
            one.latencies_s.clear()
    results = {name: Quietest() for name in targets}
    for _ in range(turns):
        for name, asking in targets.items():
            took_s = await turn(asking, seconds_s / turns)
            latencies_s = [s for one in asking for s in one.latencies_s]
            for one in asking:
                one.latencies_s.clear()
            results[name].add(sorted(latencies_s), took_s)
    return {name: result.to_json() for name, result in results.items()}


class Quietest:
    """What one target did in several turns.

    Median and throughput are those of its quietest turn, since on a shared machine other work only
    ever adds to the time taken. The 99th percentile is over all turns.
    """

    def __init__(self) -> None:
        self._all_s: list[float] = []
        self._p50_ms = float("inf")
        self._requests_per_s = 0.0

    def add(self, latencies_s: list[float], took_s: float) -> None:
        """One turn; `latencies_s` ascend."""
        self._all_s += latencies_s
        self._p50_ms = min(self._p50_ms, quantile_ms(latencies_s, 0.50))
        self._requests_per_s = max(self._requests_per_s, len(latencies_s) / took_s)

    def to_json(self) -> dict[str, float]:
        return {
            "answers": len(self._all_s),
            "requests_per_s": self._requests_per_s,
            "p50_ms": self._p50_ms,
            "p99_ms": quantile_ms(sorted(self._all_s), 0.99),
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", action="append", required=True, metavar="NAME=PORT")
    parser.add_argument("--connections", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=3.0, help="per target")
    parser.add_argument("--turns", type=int, default=8)
    args = parser.parse_args()
    ports = {name: int(port) for name, port in (t.split("=") for t in args.target)}
    print(json.dumps(asyncio.run(measure(ports, args.connections, args.seconds, args.turns))))


if __name__ == "__main__":
    main()
