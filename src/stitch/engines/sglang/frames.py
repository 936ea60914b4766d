"""Messages between the front and a rank: JSON behind a length of four bytes."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from stitch.errors import EngineError

MAX_FRAME_BYTES = 1 << 30
_LENGTH_BYTES = 4


def frame(message: dict[str, Any]) -> bytes:
    data = json.dumps(message, separators=(",", ":")).encode()
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """The next message; None when the other side has ended the connection."""
    length = _exactly(connection, _LENGTH_BYTES)
    data = None if length is None else _exactly(connection, _checked(length))
    return None if data is None else _message(data)


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        chunk = connection.recv(min(count - len(data), 1 << 20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


async def read(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next message; raises EOFError (asyncio.IncompleteReadError) at the connection's end."""
    length = await reader.readexactly(_LENGTH_BYTES)
    return _message(await reader.readexactly(_checked(length)))


def _checked(length: bytes) -> int:
    count = int.from_bytes(length, "big")
    if count > MAX_FRAME_BYTES:
        raise EngineError(f"a message of {count} bytes makes no sense here")
    return count


def _message(data: bytes) -> dict[str, Any]:
    message = json.loads(data)
    if not isinstance(message, dict):
        raise EngineError(f"a message must be an object, got {data[:100]!r}")
    return message
