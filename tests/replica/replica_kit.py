"""Replicas in the tests' own event loop: in front of a scripted upstream or of a FakeEngine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from stitch.engines.port import CommitReceipt, Engine, EngineDescription
from stitch.errors import EngineUnreachableError, StitchError
from stitch.replica.app import ReplicaApp
from stitch.replica.config import ReplicaConfig
from stitch.replica.hosts import AttachedHost
from stitch.replica.run import serve_until
from stitch.tensors import HostWeights
from stitch.testing.fake_engine import FakeEngine, fake_engine_app
from stitch.testing.published import PublishedRun
from stitch.types import ReplicaState, VersionRef

TOKEN = "a control token for tests"
DEADLINE_S = 60.0
"""For what must happen; only a test that fails waits so long."""


async def until(condition: Callable[[], Any], what: str = "the condition") -> Any:
    """Wait for `condition()` to be true; fails with its name after the deadline."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"{what} did not come true"
        await asyncio.sleep(0.005)
    return value


# --- a scripted upstream ---------------------------------------------------------------------


@dataclass
class Asked:
    """One request as the upstream saw it."""

    head: bytes
    body: bytes

    @property
    def fields(self) -> dict[str, str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}


Script = Callable[[Asked, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Upstream:
    """An engine of raw bytes: `script` writes the answer to each request."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.asked: list[Asked] = []
        self.gone = asyncio.Event()
        """Set when a connection was closed by the proxy."""
        self.num_connections = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await self._head(reader):
                asked = Asked(head, b"")
                asked.body = await reader.readexactly(int(asked.fields.get("content-length", 0)))
                self.asked.append(asked)
                await self._script(asked, reader, writer)
                await writer.drain()
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.gone.set()
            writer.close()

    async def _head(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return (await reader.readuntil(b"\r\n\r\n")).removesuffix(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return b""


def answer(
    body: bytes = b'{"text":"hi"}',
    kind: str = "application/json",
    status: str = "200 OK",
    headers: str = "",
) -> bytes:
    """An answer with a length."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{headers}"
    return head.encode() + b"\r\n" + body


def says(data: bytes) -> Upstream:
    """An upstream that gives the same bytes to every request."""

    async def script(_: Asked, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return Upstream(script)


class _NoEngine:
    """The host of an engine that only has an address."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    async def begin(self) -> None: ...

    async def ready(self, run: object) -> Engine:
        raise NotImplementedError

    async def watch(self) -> None: ...

    async def stop(self) -> None: ...


def description(**changes: Any) -> EngineDescription:
    fields: dict[str, Any] = {
        "engine": "scripted",
        "boot": "1",
        "ref": VersionRef("r", 5),
        "schema_digest": "0" * 32,
        "state": "ready",
        "salt_field": "cache_salt",
    }
    return EngineDescription(**(fields | changes))


@contextlib.asynccontextmanager
async def front_of(
    upstream: str | Upstream, **config: Any
) -> AsyncIterator[tuple[ReplicaApp, aiohttp.ClientSession]]:
    """A replica that says it serves r@5, without a reconciler; and a client of it."""
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(upstream, Upstream):
            upstream = await stack.enter_async_context(upstream.running())
        settings: dict[str, Any] = {"board": "memory://none", "model": Path("none"), "port": 0}
        app = ReplicaApp(ReplicaConfig(**(settings | config)), _NoEngine(upstream))
        status = app.status
        status.run, status.applied, status.newest = "r", 5, 5
        status.engine, status.caught_up = description(), True
        status.move(ReplicaState.SERVING)
        await stack.enter_async_context(app.listening())
        session = await stack.enter_async_context(
            aiohttp.ClientSession(app.url, auto_decompress=False)
        )
        yield app, session


async def raw_exchange(app: ReplicaApp, request: bytes) -> bytes:
    """Send bytes to the replica and read until it closes."""
    host, port = app.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        async with asyncio.timeout(DEADLINE_S):
            return await reader.read()
    finally:
        writer.close()


# --- a FakeEngine ----------------------------------------------------------------------------


@dataclass
class Replica:
    """A whole replica around a FakeEngine."""

    app: ReplicaApp
    engine: FakeEngine
    client: aiohttp.ClientSession
    ended: asyncio.Task[None]
    stop: asyncio.Event

    async def serves(self, version: int) -> None:
        await until(
            lambda: self.app.status.applied == version and self.app.status.caught_up,
            f"serving version {version}",
        )

    async def post(self, path: str, body: Any = None, **more: Any) -> tuple[int, Any]:
        async with self.client.post(path, json=body, **more) as got:
            return got.status, await got.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.client.get(path) as got:
            return got.status, await got.json()

    async def complete(self, **body: Any) -> tuple[int, Any]:
        return await self.post("/v1/completions", {"prompt": "p", "max_tokens": 4} | body)

    async def failure(self) -> StitchError:
        """What it FAILED with."""
        async with asyncio.timeout(DEADLINE_S):
            try:
                await self.ended
            except StitchError as error:
                return error
        raise AssertionError("the replica stopped without an error")


@contextlib.asynccontextmanager
async def served(engine: FakeEngine) -> AsyncIterator[str]:
    """The FakeEngine over HTTP."""
    runner = web.AppRunner(
        fake_engine_app(engine, TOKEN), handler_cancellation=True, shutdown_timeout=0.5
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


QUICK: dict[str, Any] = {
    "port": 0,
    "poll_interval_s": 0.05,
    "heartbeat_interval_s": 0.3,
    "watchdog_interval_s": 0.05,
    "engine_start_timeout_s": DEADLINE_S,
    "engine_timeout_s": DEADLINE_S,
    "engine_down_budget_s": DEADLINE_S,
    "commit_resolve_s": DEADLINE_S,
    "max_backoff_s": 0.3,
    "drain_s": 0.2,
    "replica_id": "one",
}


@contextlib.asynccontextmanager
async def replica_of(
    published: PublishedRun,
    engine: FakeEngine | None = None,
    *,
    model: Path | None = None,
    **config: Any,
) -> AsyncIterator[Replica]:
    """A replica of the run, from its base unless `engine` holds something else."""
    engine = engine or engine_at(published, 0)
    async with served(engine) as base_url:
        settings = ReplicaConfig(
            **{
                **QUICK,
                "board": published.board.url,
                "model": model or published.base,
                "engine": "attach",
                "engine_url": base_url,
                "engine_token": TOKEN,
                **config,
            }
        )
        host = AttachedHost(
            base_url,
            TOKEN,
            start_timeout_s=settings.engine_start_timeout_s,
            call_timeout_s=settings.engine_timeout_s,
        )
        stop = asyncio.Event()
        apps: asyncio.Queue[ReplicaApp] = asyncio.Queue()
        ended = asyncio.create_task(
            serve_until(settings, host, stop, lambda app, _: apps.put_nowait(app))
        )
        app = await apps.get()
        try:
            async with aiohttp.ClientSession(app.url) as client:
                yield Replica(app, engine, client, ended, stop)
        finally:
            stop.set()
            engine.faults.hang.clear()
            engine.faults.release.set()
            with contextlib.suppress(StitchError):
                await asyncio.wait_for(ended, DEADLINE_S)


def hold_commits(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """From now on commits do not reach the engine, and their callers wait for an answer.

    Setting the event breaks those off that wait; later ones pass.
    """
    assert replica.app._committer is not None
    engine = replica.app._committer.engine
    real, lost = engine.commit, asyncio.Event()

    async def commit(stage_id: str) -> CommitReceipt:
        if lost.is_set():
            return await real(stage_id)
        await lost.wait()
        raise EngineUnreachableError("the commit was lost on its way")

    monkeypatch.setattr(engine, "commit", commit)
    return lost


def engine_at(published: PublishedRun, version: int, **options: Any) -> FakeEngine:
    """An engine that holds what `version` holds."""
    return FakeEngine(HostWeights.load(published.weights[version]), **options)
