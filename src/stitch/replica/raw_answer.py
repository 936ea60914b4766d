"""A complete answer in bytes: the engine's header lines and a body of known length.

aiohttp's Response decodes, completes and encodes headers and costs a third of the proxy's time for
a short answer. This one is written as it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import HttpVersion10, web
from aiohttp.abc import AbstractStreamWriter


class RawAnswer(web.StreamResponse):
    """`fields` must be clean (no line breaks) and hold neither length nor connection headers."""

    def __init__(
        self, status: int, reason: str, fields: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> None:
        super().__init__(status=status, reason=reason)
        self._fields = fields
        self._content = body
        self._stays_open = False
        self._written = False

    @property
    def keep_alive(self) -> bool | None:
        return self._stays_open

    @property
    def prepared(self) -> bool:
        return self._written

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        if self._written:
            return None
        self._written = True
        self._stays_open = request.keep_alive
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        lines = [f"HTTP/1.1 {self.status} {self.reason}\r\n".encode("latin-1", "replace")]
        for name, value in self._fields:
            lines += (name, b": ", value, b"\r\n")
        if not self._stays_open:
            lines.append(b"connection: close\r\n")
        elif request.version == HttpVersion10:
            lines.append(b"connection: keep-alive\r\n")
        lines += (b"content-length: %d\r\n\r\n" % len(self._content), self._content)
        transport.write(b"".join(lines))
        if transport.get_write_buffer_size():
            await request.writer.drain()
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return None
