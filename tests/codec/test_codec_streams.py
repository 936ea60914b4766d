"""Number streams: the smallest form, exact counts, and an error for anything else."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from stitch.codec.streams import PCODEC, RAW, ZSTD, read_numbers, write_numbers
from stitch.errors import CorruptPatchError, UnsupportedFormatError

CODES = ("<u4", "<i2", "<i4", "<i8")


def frame(tag: int, body: bytes) -> memoryview:
    return memoryview(struct.pack("<BI", tag, len(body)) + body)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("count", [0, 1, 2, 100, 5000, 300_000])
def test_numbers_survive(code: str, count: int) -> None:
    dtype = np.dtype(code)
    rng = np.random.default_rng(count)
    kinds = {
        "noise": np.frombuffer(rng.bytes(count * dtype.itemsize), dtype),
        "small": rng.geometric(0.1, count).astype(dtype),
        "same": np.full(count, 7, dtype),
    }
    for numbers in kinds.values():
        data = write_numbers(numbers)
        assert len(data) <= 5 + numbers.nbytes
        again, rest = read_numbers(memoryview(data + b"next"), count, dtype, "test")
        assert np.array_equal(again, numbers)
        assert bytes(rest) == b"next"


def test_short_streams_are_raw_and_long_ones_are_pcodec() -> None:
    numbers = np.random.default_rng(0).geometric(0.01, 4000).astype(np.uint32)
    assert write_numbers(numbers[:3])[0] == RAW
    assert write_numbers(numbers)[0] == PCODEC
    assert write_numbers(np.zeros(1000, np.uint32))[0] in (PCODEC, ZSTD)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (memoryview(b"\0\0\0"), "3 bytes left"),
        (memoryview(struct.pack("<BI", RAW, 9) + b"12345678"), "only 8 are left"),
        (frame(RAW, b"1234567"), "expected 2 numbers"),
        (frame(PCODEC, b""), "test"),
        (frame(PCODEC, b"garbage" * 9), "test"),
        (frame(PCODEC, write_numbers(np.arange(100, dtype=np.uint32) ** 3)[5:]), "expected 2"),
        (frame(PCODEC, write_numbers(np.arange(100, dtype=np.int64) ** 5)[5:]), "test"),
        (frame(ZSTD, b"garbage" * 9), "test"),
        (frame(ZSTD, zstandard.compress(bytes(9))), "zstd frame of 9 bytes"),
        (frame(ZSTD, zstandard.compress(bytes(8)) + b"more"), "test"),
        (frame(ZSTD, zstandard.compress(bytes(8))[:-1]), "test"),
    ],
)
def test_streams_that_do_not_hold_the_wanted_numbers_are_refused(
    data: memoryview, message: str
) -> None:
    with pytest.raises(CorruptPatchError, match=message):
        read_numbers(data, 2, np.dtype("<u4"), "test")


def test_an_unknown_form_is_of_a_later_release() -> None:
    with pytest.raises(UnsupportedFormatError, match="form 4"):
        read_numbers(frame(4, b""), 0, np.dtype("<u4"), "test")


def test_a_frame_that_hides_its_size_is_refused() -> None:
    hidden = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(8))
    with pytest.raises(CorruptPatchError, match="zstd frame"):
        read_numbers(frame(ZSTD, hidden), 2, np.dtype("<u4"), "test")


@given(
    st.sampled_from(CODES),
    st.integers(1, 600),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), max_size=6),
    st.one_of(st.none(), st.integers(0, 2000)),
)
def test_altered_pcodec_streams_give_numbers_or_the_one_error(
    code: str, count: int, flips: list[tuple[int, int]], cut: int | None
) -> None:
    dtype = np.dtype(code)
    numbers = np.random.default_rng(count).geometric(0.01, count).astype(dtype)
    body = bytearray(write_numbers(np.concatenate([numbers, numbers, numbers, numbers]))[5:][:cut])
    for at, mask in flips:
        if body:
            body[at % len(body)] ^= mask
    try:
        again, rest = read_numbers(frame(PCODEC, bytes(body)), 4 * count, dtype, "test")
    except CorruptPatchError:
        return
    assert again.size == 4 * count
    assert not len(rest)
