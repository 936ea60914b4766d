"""Reading HTTP/1.1 answers: the head, and bodies by length, in chunks or until the close.

Pure functions and small state machines on bytes, without I/O. Source: RFC 9112.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

MAX_HEAD_BYTES = 256 * 1024
MAX_LINE_BYTES = 16 * 1024

_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([^\r\n]*))?")
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_NO_CONTROLS = bytes({9, 10, 13, *range(32, 127), *range(128, 256)})
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?")


class ProtocolError(Exception):
    """An answer that is not HTTP/1.1."""


@dataclass(slots=True)  # made per request: frozen would cost more to build
class Head:
    """Status line and header fields, in order; names are in lower case."""

    status: int
    reason: str
    fields: list[tuple[bytes, bytes]]
    last: dict[bytes, bytes]
    """Name -> value, of repeated ones the last."""
    keep_alive: bool

    def get(self, name: bytes) -> bytes | None:
        """The (last) field of that lower-case name."""
        return self.last.get(name)

    @property
    def content_type(self) -> bytes:
        """Media type in lower case, without parameters."""
        return (self.get(b"content-type") or b"").partition(b";")[0].strip().lower()


def take_head(data: bytes) -> tuple[bytes | None, bytes]:
    """Split the first complete head (without its blank line) off `data`."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        if len(data) > MAX_HEAD_BYTES:
            raise ProtocolError(f"the head is longer than {MAX_HEAD_BYTES} bytes")
        return None, data
    return data[:end], data[end + 4 :]


def parse_head(raw: bytes) -> Head:
    """Parse a head; raises ProtocolError."""
    first, *lines = raw.split(b"\r\n")
    status, reason, keep_alive = _status_line(first)
    if not raw.count(b"\n") == raw.count(b"\r") == len(lines):
        raise ProtocolError("a line break inside the head")
    if raw.translate(None, _NO_CONTROLS):
        raise ProtocolError("a control character inside the head")
    fields = []
    for line in lines:
        name, colon, value = line.partition(b":")
        lowered = _lowered.get(name) or _lower(name)
        if not colon or lowered is None:
            raise ProtocolError(f"header line {line[:80]!r}")
        fields.append((lowered, value.strip(b" \t")))
    last = dict(fields)
    if b"connection" in last:
        tokens = {t.strip() for n, v in fields if n == b"connection" for t in v.lower().split(b",")}
        keep_alive = b"close" not in tokens and (keep_alive or b"keep-alive" in tokens)
    return Head(status, reason, fields, last, keep_alive)


@functools.lru_cache(maxsize=64)
def _status_line(line: bytes) -> tuple[int, str, bool]:
    """Status, reason, and whether the connection stays open by default."""
    match = _STATUS.fullmatch(line)
    if match is None:
        raise ProtocolError(f"status line {line[:80]!r}")
    return int(match[2]), (match[3] or b"").decode("latin-1"), match[1] == b"1"


_lowered: dict[bytes, bytes] = {}
"""Field names seen before and their lower-case form; engines repeat themselves."""


def _lower(name: bytes) -> bytes | None:
    """A field name in lower case, or None if it is not a token."""
    if not _NAME.fullmatch(name):
        return None
    if len(_lowered) < 1000:
        _lowered[name] = name.lower()
    return name.lower()


class BodyReader:
    """Takes the bytes after a head and gives the body's; `ended` once it is complete."""

    ended = False
    ends_at_close = False

    def feed(self, data: bytes) -> list[bytes]:
        raise NotImplementedError


class _ByLength(BodyReader):
    def __init__(self, length: int) -> None:
        self._left = length
        self.ended = length == 0

    def feed(self, data: bytes) -> list[bytes]:
        if len(data) > self._left:
            raise ProtocolError(f"{len(data) - self._left} bytes follow the answer")
        self._left -= len(data)
        self.ended = self._left == 0
        return [data] if data else []


class _UntilClose(BodyReader):
    ends_at_close = True

    def feed(self, data: bytes) -> list[bytes]:
        return [data] if data else []


class _Chunked(BodyReader):
    """RFC 9112, section 7.1. Extensions and trailers are read and dropped.

    `_at` walks over `_data`, which is cut once per feed: work grows with the bytes, however many
    small chunks they hold.
    """

    def __init__(self) -> None:
        self._data = b""
        self._at = 0
        self._left = 0  # bytes of the current chunk still to come
        self._after_chunk = False
        self._in_trailer = False

    def feed(self, data: bytes) -> list[bytes]:
        self._data = self._data + data if self._data else data
        parts: list[bytes] = []
        while self._at < len(self._data) and not self.ended and self._step(parts):
            pass
        self._data, self._at = self._data[self._at :], 0
        if self.ended and self._data:
            raise ProtocolError(f"{len(self._data)} bytes follow the answer")
        return parts

    def _step(self, parts: list[bytes]) -> bool:
        """Consume one element; False when more bytes are needed."""
        if self._left:
            part = self._data[self._at : self._at + self._left]
            parts.append(part)
            self._at += len(part)
            self._left -= len(part)
            self._after_chunk = self._left == 0
            return True
        line = self._line()
        if line is None:
            return False
        if self._after_chunk:
            if line:
                raise ProtocolError(f"{line[:40]!r} after a chunk")
            self._after_chunk = False
        elif self._in_trailer:
            self.ended = not line
        else:
            match = _SIZE.fullmatch(line)
            if match is None:
                raise ProtocolError(f"chunk size {line[:40]!r}")
            self._left = int(match[1], 16)
            self._in_trailer = self._left == 0
        return True

    def _line(self) -> bytes | None:
        start, end = self._at, self._data.find(b"\r\n", self._at)
        if end < 0:
            if len(self._data) - start > MAX_LINE_BYTES:
                raise ProtocolError("a chunk's size line has no end")
            return None
        self._at = end + 2
        return self._data[start:end]


def has_no_body(method: bytes, head: Head) -> bool:
    """Whether the answer ends with its head, whatever its fields say."""
    return method == b"HEAD" or head.status in (204, 304)


def body_reader(method: bytes, head: Head) -> BodyReader:
    """How the body after `head` ends (RFC 9112, section 6.3)."""
    if has_no_body(method, head):
        return _ByLength(0)
    coding = head.get(b"transfer-encoding")
    if coding is not None:
        if coding.lower() != b"chunked":
            raise ProtocolError(f"transfer coding {coding[:40]!r}")
        return _Chunked()
    length = head.get(b"content-length")
    if length is None:
        return _UntilClose()
    differ = len(head.last) != len(head.fields) and any(
        name == b"content-length" and value != length for name, value in head.fields
    )
    if differ or not length.isdigit() or len(length) > 18:
        raise ProtocolError(f"content-length {length[:40]!r}")
    return _ByLength(int(length))
