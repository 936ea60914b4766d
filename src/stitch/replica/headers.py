"""Which headers cross the proxy, in each direction."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from multidict import CIMultiDict

from stitch.replica.framing import Head
from stitch.types import VersionRef

START = "X-Stitch-Version-Start"
END = "X-Stitch-Version-End"
RUN = "X-Stitch-Run"
RUN_END = "X-Stitch-Run-End"
MIN = "X-Stitch-Min-Version"
EXACT = "X-Stitch-Exact-Version"

HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
    b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
})  # fmt: skip
"""RFC 9110, section 7.6.1, and the old Proxy-Connection."""

_NOT_UPSTREAM = HOP_BY_HOP | {
    b"host", b"content-length", b"accept-encoding", b"expect",
    b"content-encoding",  # the server has decoded the body
    MIN.lower().encode(), EXACT.lower().encode(), RUN.lower().encode(),
}  # fmt: skip
_START, _END, _RUN, _RUN_END = START.encode(), END.encode(), RUN.encode(), RUN_END.encode()
ENGINE_START, ENGINE_END = _START.lower(), _END.lower()
_NOT_DOWNSTREAM = HOP_BY_HOP | {
    b"content-length", ENGINE_START, ENGINE_END, _RUN.lower(), _RUN_END.lower(),
}  # fmt: skip


@functools.lru_cache(maxsize=256)
def to_engine(fields: tuple[tuple[bytes, bytes], ...]) -> bytes:
    """Lines of a request's end-to-end headers; the engine is asked not to compress.

    Clients repeat themselves: those that send equal headers find the lines ready.
    """
    lowered = [(name.lower(), value) for name, value in fields]
    dropped = _NOT_UPSTREAM | named_by_connection(lowered)
    kept = [field for field in lowered if field[0] not in dropped]
    kept.append((b"accept-encoding", b"identity"))
    return b"".join(b"%b: %b\r\n" % field for field in kept)


def to_client(head: Head) -> list[tuple[bytes, bytes]]:
    """An answer's end-to-end headers without its length and the engine's own stamps."""
    dropped = _NOT_DOWNSTREAM
    if b"connection" in head.last:
        dropped = dropped | named_by_connection(head.fields)
    return [field for field in head.fields if field[0] not in dropped]


def as_text(fields: Iterable[tuple[bytes, bytes]]) -> CIMultiDict[str]:
    return CIMultiDict(
        [(name.decode("ascii"), value.decode("utf-8", "replace")) for name, value in fields]
    )


def stamps(start: VersionRef, end: VersionRef | None) -> list[tuple[bytes, bytes]]:
    """The headers that say which version an answer began and, if known, ended on."""
    fields = [(_RUN, start.run.encode()), (_START, b"%d" % start.version)]
    if end is not None:
        fields.append((_END, b"%d" % end.version))
        if end.run != start.run:
            fields.append((_RUN_END, end.run.encode()))
    return fields


def named_by_connection(fields: Iterable[tuple[bytes, bytes]]) -> set[bytes]:
    """Header names that a Connection header declares to be for this hop only."""
    named: set[bytes] = set()
    for name, value in fields:
        if name == b"connection":
            named.update(token.strip() for token in value.lower().split(b","))
    return named


def version(head: Head, name: bytes) -> int | None:
    """A version number that the engine put into a header (named in lower case)."""
    text = head.last.get(name)
    return int(text) if text is not None and len(text) <= 8 and text.isdigit() else None
