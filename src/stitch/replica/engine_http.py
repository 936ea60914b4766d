"""A small HTTP/1.1 client for one engine on this machine: a pool of kept connections.

It does what a reverse proxy needs and no more: raw headers in and out, no redirects, cookies,
decompression, proxies or TLS, no limit on connections, no total time-out. That makes it several
times lighter than a general client (measured: "Proxy" in docs/benchmarks.md). The engine is the
replica's own, so answers are read strictly and whatever is malformed closes the connection.

Source: RFC 9112 (message framing: sections 6 and 7).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast
from urllib.parse import urlsplit

from stitch.errors import EngineUnreachableError, UsageError
from stitch.replica.framing import (
    BodyReader,
    Head,
    ProtocolError,
    body_reader,
    parse_head,
    take_head,
)

IDLE_S = 4.0
"""Idle connections are dropped before the engine does it (uvicorn: after 5 s)."""
HIGH_WATER_BYTES = 512 * 1024
WRITE_SLICE_BYTES = 1024 * 1024


class StaleConnectionError(EngineUnreachableError):
    """A kept connection was closed before a byte of the answer came."""


class _Connection(asyncio.Protocol):
    """One connection; one request at a time. Errors are raised where the answer is awaited."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.head: Head | None = None
        self.chunks: deque[bytes] = deque()
        self.ended = True
        self.used = False
        self.idle_since_s = 0.0
        self._method = b""
        self._buffered = b""
        self._body: BodyReader | None = None
        self._num_held = 0
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._drain: asyncio.Future[None] | None = None
        self._write_paused = False
        self._error: EngineUnreachableError | None = None

    # --- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        if self.ended:  # nothing was asked
            self.close()
            return
        try:
            if self._body is None:
                data = self._take_head(data)
            if self._body is not None and (data or self._body.ended):
                self._take_body(data)
        except ProtocolError as error:
            self._fail(EngineUnreachableError(f"the engine's answer is malformed: {error}"))
            self.close()
            return
        self._notify()

    def eof_received(self) -> None:
        return None

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended:
            if self._body is not None and self._body.ends_at_close and error is None:
                self.ended = True
            elif self.head is None and not self._buffered:
                detail = error or "connection closed before the answer"
                self._fail(StaleConnectionError(f"the engine broke off: {detail}"))
            else:
                detail = error or "connection closed inside the answer"
                self._fail(EngineUnreachableError(f"the engine broke off: {detail}"))
        self.transport = None
        self._notify()
        self.resume_writing()

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._drain is not None and not self._drain.done():
            self._drain.set_result(None)

    # --- one exchange --------------------------------------------------------------------------

    async def send(self, method: bytes, head: bytes, body: bytes) -> Head:
        """Write a request and return the head of its answer."""
        transport = self.transport
        if transport is None:
            raise StaleConnectionError("the engine broke off: connection closed")
        self.head, self._body, self._buffered, self._error = None, None, b"", None
        self._method, self.ended = method, False
        if len(body) <= WRITE_SLICE_BYTES:
            transport.write(head + body)
        else:
            transport.write(head)
            await self._write_slices(body)
        while self.head is None:
            await self._wait()
        return self.head

    async def next_chunk(self) -> bytes | None:
        """The next bytes of the body, or None at its end."""
        while not self.chunks:
            if self.ended and self._error is None:
                return None
            await self._wait()
        chunk = self.chunks.popleft()
        self._num_held -= len(chunk)
        if self._paused and self._num_held < HIGH_WATER_BYTES // 2 and self.transport is not None:
            self._paused = False
            self.transport.resume_reading()
        return chunk

    @property
    def is_complete(self) -> bool:
        """The whole answer is here, read or not."""
        return self.ended and self._error is None

    def is_reusable(self) -> bool:
        transport = self.transport
        return (
            self.is_complete
            and not self.chunks
            and self.head is not None
            and self.head.keep_alive
            and transport is not None
            and not transport.is_closing()
        )

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()
            self.transport = None

    async def _write_slices(self, body: bytes) -> None:
        """Large bodies go in slices, so that they are not copied into the transport whole."""
        view = memoryview(body)
        for start in range(0, len(view), WRITE_SLICE_BYTES):
            if self.transport is None:
                return  # the answer's reader raises
            self.transport.write(view[start : start + WRITE_SLICE_BYTES])
            if self._write_paused:
                self._drain = asyncio.get_running_loop().create_future()
                await self._drain

    def _take_head(self, data: bytes) -> bytes:
        """Collect the head; returns what follows it. Interim answers (1xx) are skipped."""
        self._buffered += data
        while True:
            raw, self._buffered = take_head(self._buffered)
            if raw is None:
                return b""
            head = parse_head(raw)
            if head.status >= 200:
                break
            if head.status == 101:
                raise ProtocolError("it switches protocols, which nobody asked for")
        self._body = body_reader(self._method, head)
        self.head = head
        rest, self._buffered = self._buffered, b""
        return rest

    def _take_body(self, data: bytes) -> None:
        assert self._body is not None
        for part in self._body.feed(data):
            self.chunks.append(part)
            self._num_held += len(part)
        if self._body.ended:
            self.ended = True
        elif self._num_held > HIGH_WATER_BYTES and self.transport is not None:
            self._paused = True
            self.transport.pause_reading()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        if self.transport is None:
            raise EngineUnreachableError("the engine broke off: connection closed")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None and not self.chunks:
            raise self._error

    def _fail(self, error: EngineUnreachableError) -> None:
        self._error = error
        self.ended = True

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineAnswer:
    """Status and headers of an answer, its body still to be read. Must be `release`d."""

    __slots__ = ("_connection", "_pool", "head")

    def __init__(self, head: Head, connection: _Connection, pool: EngineClient) -> None:
        self.head = head
        self._connection = connection
        self._pool = pool

    def whole(self) -> bytes | None:
        """The body, if it has already come in one piece with the head."""
        connection = self._connection
        if connection.is_complete and len(connection.chunks) == 1:
            return connection.chunks.popleft()
        return None

    async def read(self) -> bytes:
        """The whole body."""
        parts = [part async for part in self.chunks()]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises EngineUnreachableError if it breaks off."""
        while (chunk := await self._connection.next_chunk()) is not None:
            yield chunk

    def release(self) -> None:
        """Done with it: the connection is kept if the body was read to its end, else closed."""
        self._pool.put_back(self._connection)


class EngineClient:
    """Sends requests to one engine. Lives on one event loop.

    `vouch` is awaited whenever a connection was opened, before anything is sent on it; it raises
    EngineUnreachableError if it is not the proven engine that answers at that address now. An
    engine that restarts loses its connections, so those that live on lead to the proven one.
    """

    def __init__(
        self,
        base_url: str,
        *,
        connect_timeout_s: float = 10.0,
        vouch: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme != "http" or parts.hostname is None or parts.path not in ("", "/"):
            raise UsageError(f"the engine's address must be http://HOST:PORT, got {base_url!r}")
        self._host, self._port = parts.hostname, parts.port or 80
        self._host_header = b"host: " + parts.netloc.rpartition("@")[2].encode() + b"\r\n"
        self._connect_timeout_s = connect_timeout_s
        self._vouch = vouch
        self._idle: deque[_Connection] = deque()
        self._closed = False

    async def send(
        self, method: str, target: str, header_lines: bytes, body: bytes
    ) -> EngineAnswer:
        """The engine's answer up to its headers; raises EngineUnreachableError.

        `header_lines`: without host and content-length, each with its line break.

        A kept connection can be closed by the engine just as it is used. The request was then not
        answered, and generating has no side effects, so it is sent again on a new connection.
        """
        verb = method.encode("ascii")
        sized = body or method in ("POST", "PUT", "PATCH")
        length = b"content-length: %d\r\n" % len(body) if sized else b""
        path = target.encode("utf-8", "surrogateescape")
        parts = (verb, b" ", path, b" HTTP/1.1\r\n", self._host_header, header_lines, length)
        head = b"".join((*parts, b"\r\n"))
        connection = self._take_idle()
        if connection is not None:
            try:
                return await self._exchange(connection, verb, head, body)
            except StaleConnectionError:
                pass
        return await self._exchange(await self._connect(), verb, head, body)

    async def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def put_back(self, connection: _Connection) -> None:
        if self._closed or not connection.is_reusable():
            connection.close()
            return
        connection.idle_since_s = time.monotonic()
        self._idle.append(connection)

    def _take_idle(self) -> _Connection | None:
        """The connection used last, if one is still good; those idle for too long are dropped."""
        oldest_s = time.monotonic() - IDLE_S
        while self._idle and self._idle[0].idle_since_s < oldest_s:
            self._idle.popleft().close()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable():
                return connection
            connection.close()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(_Connection, self._host, self._port)
        except (OSError, TimeoutError) as error:
            raise EngineUnreachableError(
                f"no connection to the engine at {self._host}:{self._port}: "
                f"{error or type(error).__name__}"
            ) from error
        if self._vouch is not None:
            try:
                await self._vouch()
            except BaseException:
                connection.close()
                raise
        return connection

    async def _exchange(
        self, connection: _Connection, method: bytes, head: bytes, body: bytes
    ) -> EngineAnswer:
        try:
            return EngineAnswer(await connection.send(method, head, body), connection, self)
        except BaseException:
            connection.close()
            raise
