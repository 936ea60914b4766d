"""A recording HTTP proxy on loopback, in a thread of its own; `fault_proxy` makes it misbehave."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from email.utils import format_datetime, parsedate_to_datetime
from types import TracebackType
from typing import Self

import aiohttp
from aiohttp import web
from yarl import URL

from stitch.testing.planned import PlannedFault, Requests

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


@dataclass(kw_only=True)
class ProxyFault(PlannedFault):
    play: Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]


class RecordingProxy(Requests[ProxyFault]):
    """Passes requests on with the headers and bytes that came, so that signatures hold.

    `requests` lists what came, as (method, raw path and query).
    """

    def __init__(self, upstream: str) -> None:
        super().__init__()
        self._upstream = upstream
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stitch-fault-proxy")
        self._released = asyncio.Event()
        self._clock_offset = timedelta(0)
        self.port = 0

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
        struck = self._struck(request.method, request.raw_path)
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
