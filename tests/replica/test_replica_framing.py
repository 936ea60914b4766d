"""Reading the engine's answers, whole or byte by byte, good or bad."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch.replica.framing import BodyReader, ProtocolError, body_reader, parse_head, take_head


def read(raw: bytes, sizes: list[int], method: bytes = b"POST") -> tuple[int, bytes, bool]:
    """Feed an answer in pieces of these sizes; returns status, body, ended."""
    data, reader, status, body = b"", None, 0, b""
    pieces = []
    for size in sizes:
        pieces.append(raw[:size])
        raw = raw[size:]
    for piece in [*pieces, raw]:
        if reader is None:
            head, data = take_head(data + piece)
            if head is None:
                continue
            parsed = parse_head(head)
            reader, status, piece = body_reader(method, parsed), parsed.status, data
        assert isinstance(reader, BodyReader)
        if piece:
            body += b"".join(reader.feed(piece))
    return status, body, reader is not None and reader.ended


LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\nhel\r\n2;ext=1\r\nlo\r\n0\r\nTrailer: x\r\n\r\n"
)
CLOSE = b"HTTP/1.1 200\r\nConnection: close\r\n\r\nhello"


@pytest.mark.parametrize(("raw", "ended"), [(LENGTH, True), (CHUNKED, True), (CLOSE, False)])
@given(sizes=st.lists(st.integers(1, 40), max_size=60))
def test_any_cut_reads_the_same(raw: bytes, ended: bool, sizes: list[int]) -> None:
    assert read(raw, sizes) == (200, b"hello", ended)


def test_answers_without_a_body_end_with_their_head() -> None:
    for method, status in ((b"HEAD", b"200"), (b"GET", b"204"), (b"GET", b"304")):
        raw = b"HTTP/1.1 " + status + b" X\r\nContent-Length: 5\r\n\r\n"
        assert read(raw, [], method)[2]


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"junk\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n folded: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad name: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: b\nc: d\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: b\x00c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello!",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nmore",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 20_000,
        b"HTTP/1.1 200 OK\r\n" + b"a" * 300_000,
    ],
)
def test_malformed_answers_are_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        read(raw, [])


@pytest.mark.parametrize(
    ("head", "keep"),
    [
        (b"HTTP/1.1 200 OK", True),
        (b"HTTP/1.0 200 OK", False),
        (b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive", True),
        (b"HTTP/1.1 200 OK\r\nConnection: x, Close", False),
    ],
)
def test_whether_the_connection_lives_on_is_read_from_the_head(head: bytes, keep: bool) -> None:
    assert parse_head(head).keep_alive is keep


def test_many_small_chunks_are_read_in_time_that_grows_with_their_number() -> None:
    """The bytes copied while reading, counted by a bytes type that tells of its slices."""
    copied = 0

    class Counted(bytes):
        def __getitem__(self, key: object) -> object:  # type: ignore[override]
            nonlocal copied
            part = super().__getitem__(key)  # type: ignore[index]
            copied += len(part) if isinstance(part, bytes) else 0
            return Counted(part) if isinstance(part, bytes) else part

    reader = body_reader(b"GET", parse_head(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked"))
    data = b"1\r\nx\r\n" * 5_000
    assert b"".join(reader.feed(Counted(data))) == b"x" * 5_000
    assert copied < 2 * len(data)
