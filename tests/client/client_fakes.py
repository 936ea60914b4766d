"""A board and replicas that are fakes with real sockets: scripted aiohttp servers."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from stitch.client import Client
from stitch.client.loop import LoopThread
from stitch.errors import StoreError
from stitch.records import EpochRecord, Heartbeat
from stitch.types import ReplicaState

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def wait_until(condition: Callable[[], object], what: str, limit_s: float = 20.0) -> None:
    """Wait for a condition; fail with `what` after a generous deadline."""
    ends = time.monotonic() + limit_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < ends, f"not within {limit_s} s: {what}"
        pause.wait(0.005)


class LeapingClock:
    """Stands in for `time` where requests are given up: the test decides when that is."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_s

    def leap(self, span_s: float) -> None:
        self._ahead_s += span_s


def beat_of(replica: str, url: str, **changes: Any) -> Heartbeat:
    beat = Heartbeat(
        replica=replica,
        run="run",
        url=url,
        region="here",
        state=ReplicaState.SERVING,
        applied=5,
        newest_seen=5,
        ready=True,
        reason="",
        last_error="",
        boot="boot-1",
        seq=1,
        sent_unix_s=0.0,
    )
    return replace(beat, **changes)


@dataclass
class FakeRun:
    """Heartbeats by replica id; every reading moves the beating ones on."""

    name: str = "run"
    beats: dict[str, Heartbeat] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    broken: bool = False
    num_reads: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Held by the client's reading and by the test's changes, or one would undo the other."""

    def heartbeats(self) -> list[Heartbeat]:
        self.num_reads += 1
        if self.broken:
            raise StoreError("the store does not answer")
        with self.lock:
            for name, beat in self.beats.items():
                if name not in self.frozen:
                    self.beats[name] = replace(beat, seq=beat.seq + 1)
            return list(self.beats.values())

    def put(self, name: str, beat: Heartbeat) -> None:
        with self.lock:
            self.beats[name] = beat

    def change(self, name: str, **changes: Any) -> None:
        with self.lock:
            self.beats[name] = replace(self.beats[name], **changes)

    def clear(self) -> None:
        with self.lock:
            self.beats.clear()


class FakeBoard:
    def __init__(self) -> None:
        self.runs: dict[str, FakeRun] = {"run": FakeRun()}
        self.epochs = ["run"]

    def open_run(self, name: str) -> FakeRun:
        return self.runs[name]

    def current_epoch(self, after: int = 0) -> EpochRecord | None:
        if not self.epochs:
            return None
        number = len(self.epochs)
        return EpochRecord(epoch=number, run=self.epochs[-1], writer="w", created_unix_s=0.0)


class FakeReplica:
    """Answers by its script, then as a healthy replica would."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.applied = 5
        self.script: deque[Handler] = deque()
        self.always: Handler | None = None
        self.requests: list[SimpleNamespace] = []
        self.aborted = 0
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(
            SimpleNamespace(path=request.path, headers=dict(request.headers), body=body)
        )
        handler = self.always or (self.script.popleft() if self.script else self.answer)
        try:
            return await handler(request)
        except asyncio.CancelledError:
            self.aborted += 1
            raise

    async def answer(self, request: web.Request) -> web.StreamResponse:
        stamps = {"weight_version_start": self.applied, "weight_version_end": self.applied}
        choice = {"index": 0, "text": f"from {self.name}"}
        return web.json_response({"choices": [choice], **stamps})

    async def not_on_version(self, request: web.Request) -> web.StreamResponse:
        return not_ready(self.applied, 7)

    def answer_after(self, release: threading.Event) -> Handler:
        """A healthy answer, held back until the test lets it go."""

        async def handler(request: web.Request) -> web.StreamResponse:
            await asyncio.to_thread(release.wait, 20)
            return await self.answer(request)

        return handler

    async def hang(self, request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def hang_up(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()


def not_ready(applied: int | None, target: int, retry_after: str = "0") -> web.Response:
    reason = "booting" if applied is None else "behind" if applied < target else "ahead"
    error = {
        "type": "WeightVersionNotReady",
        "reason": reason,
        "target_version": target,
        "applied": applied,
        "message": "not on that version",
    }
    return web.json_response({"error": error}, status=409, headers={"Retry-After": retry_after})


def status(code: int, message: str = "no", **headers: str) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        body = {"error": {"type": "Refused", "message": message}}
        shown = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response(body, status=code, headers=shown)

    return handler


def events(*rows: object, done: bool = True, start: int | None = None) -> Handler:
    """A stream of these events; a missing `[DONE]` is a stream that broke off."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if start is not None:
            response.headers["X-Stitch-Version-Start"] = str(start)
        await response.prepare(request)
        for row in rows:
            await response.write(f"data: {json.dumps(row)}\n\n".encode())
        if done:
            await response.write(b"data: [DONE]\n\n")
        return response

    return handler


class Site:
    """The fakes of one test, and the client on them."""

    def __init__(self) -> None:
        self.board = FakeBoard()
        self.run = self.board.runs["run"]
        self._loop = LoopThread("fakes")
        self._runners: list[web.AppRunner] = []
        self._clients: list[Client] = []
        self._reserved: list[socket.socket] = []

    def replica(self, name: str, **beat: Any) -> FakeReplica:
        """A serving replica, listed on the board."""
        fake = FakeReplica(name)
        fake.url = self._loop.call(self._serve(fake))
        fake.applied = beat.get("applied", fake.applied)
        self.run.put(name, beat_of(name, fake.url, **beat))
        return fake

    def dead_replica(self, name: str, **beat: Any) -> None:
        """One whose heartbeat lingers on the board, with nobody at its address."""
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))  # without listening; held, so that nobody else gets the port
        self._reserved.append(sock)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self.run.frozen.add(name)
        self.run.put(name, beat_of(name, url, **beat))

    def client(self, run: str | None = "run", **settings: Any) -> Client:
        settings = {"deadline_s": 20.0, "refresh_s": 0.05, **settings}
        client = Client(self.board, run, **settings)
        self._clients.append(client)
        return client

    def on_loop(self, action: Callable[[], object]) -> None:
        """Do something on the servers' event loop."""

        async def act() -> None:
            action()

        self._loop.call(act())

    async def _serve(self, fake: FakeReplica) -> str:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", fake.handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self._runners.append(runner)
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _stop(self) -> None:
        for runner in self._runners:
            await runner.cleanup()

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for sock in self._reserved:
            sock.close()
        self._loop.call(self._stop())
        self._loop.close(asyncio.sleep(0))
