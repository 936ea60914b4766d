"""A recording HTTP proxy on loopback, in a thread of its own; `fault_proxy` makes it misbehave."""

from __future__ import annotations

import asyncio
import io
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from email.utils import format_datetime, parsedate_to_datetime
from types import TracebackType
from typing import Self

import aiohttp
from aiohttp import web
from yarl import URL

READS = ("GET", "HEAD")
WRITES = ("PUT", "POST", "DELETE")
ALL = (*READS, *WRITES)

_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "upgrade"})
_START_S = 30.0


@dataclass
class Answer:
    """An upstream's whole answer, which a fault may change before it is sent on."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class ProxyFault:
    """One planned fault; `num_hits` counts how often it struck."""

    methods: tuple[str, ...]
    match: str
    times: int | None
    after: int
    play: Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]
    num_hits: int = 0

    def strikes(self, method: str, path: str) -> bool:
        if method not in self.methods or self.match not in path or self.times == 0:
            return False
        if self.after > 0:
            self.after -= 1
            return False
        if self.times is not None:
            self.times -= 1
        self.num_hits += 1
        return True


class RecordingProxy:
    """Passes requests on with the headers and bytes that came, so that signatures hold.

    `requests` lists what came, as (method, raw path and query).
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._faults: list[ProxyFault] = []
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stitch-fault-proxy")
        self._released = asyncio.Event()
        self._clock_offset = timedelta(0)
        self.requests: list[tuple[str, str]] = []
        self.port = 0

    # --- counting --------------------------------------------------------------------------

    @property
    def counts(self) -> Counter[str]:
        """Number of requests by method."""
        with self._lock:
            return Counter(method for method, _ in self.requests)

    @property
    def num_requests(self) -> int:
        with self._lock:
            return len(self.requests)

    def forget_requests(self) -> None:
        with self._lock:
            self.requests.clear()

    # --- the proxy -------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(_START_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(_START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_S)
        self._loop.close()

    async def _start(self) -> int:
        self._client = aiohttp.ClientSession(
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port: int = self._runner.addresses[0][1]
        return port

    async def _stop(self) -> None:
        self._released.set()
        await self._runner.cleanup()
        await self._client.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        with self._lock:
            self.requests.append((request.method, request.raw_path))
            struck = next(
                (f for f in self._faults if f.strikes(request.method, request.raw_path)), None
            )
        if struck is not None:
            return await struck.play(request, data)
        return respond(await self.ask(request, data))

    async def ask(self, request: web.Request, data: bytes, without: str = "") -> Answer:
        headers = [
            (name, value)
            for name, value in request.headers.items()
            if name.lower() not in _HOP_BY_HOP and name.lower() not in (without, "content-length")
        ]
        if request.method in WRITES:
            headers.append(("Content-Length", str(len(data))))
        url = URL(self._upstream + request.raw_path, encoded=True)
        async with self._client.request(
            request.method,
            url,
            headers=headers,
            data=io.BytesIO(data) if data else None,
            allow_redirects=False,
        ) as answer:
            found = Answer(answer.status, dict(answer.headers), await answer.read())
        for name in ("Date", "Last-Modified"):
            if name in found.headers:
                moved = parsedate_to_datetime(found.headers[name]) + self._clock_offset
                found.headers[name] = format_datetime(moved, usegmt=True)
        return found

    async def begin(self, request: web.Request, found: Answer, keep: int) -> web.StreamResponse:
        """Send the head, with the full length, and the first `keep` bytes."""
        response = web.StreamResponse(status=found.status, headers=end_to_end(found))
        response.content_length = len(found.body)
        await response.prepare(request)
        await response.write(found.body[:keep])
        return response


def respond(found: Answer) -> web.Response:
    headers = end_to_end(found)
    length = found.headers.get("Content-Length")
    response = web.Response(status=found.status, headers=headers, body=found.body)
    if not found.body and length is not None:  # HEAD: the length that a GET would have
        response.headers["Content-Length"] = length
    return response


def end_to_end(found: Answer) -> dict[str, str]:
    return {
        name: value
        for name, value in found.headers.items()
        if name.lower() not in _HOP_BY_HOP | {"content-length"}
    }


def break_off(
    request: web.Request, response: web.StreamResponse | None = None
) -> web.StreamResponse:
    """Close the connection under the client's feet."""
    if request.transport is not None:
        request.transport.abort()
    return response or web.Response(status=500)
