"""Binned streams: the same from kernels and reference, exact, and one error for anything else."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch.codec import bins
from stitch.codec.reference_bins import read_binned, tokenised, untokenised, write_binned
from stitch.codec.streams import BINS, PCODEC, read_numbers, write_numbers
from stitch.errors import CorruptPatchError

CODES = ("<u4", "<i2", "<i4", "<i8")
GOLDEN = Path(__file__).parent / "golden_streams"


def spread(code: str, count: int, seed: int) -> bins.Numbers:
    """Numbers of every magnitude and sign, most of them small, with the extremes among them."""
    dtype = np.dtype(code)
    rng = np.random.default_rng(seed)
    top = np.iinfo(dtype).max
    noise = np.frombuffer(rng.bytes(count * dtype.itemsize), dtype)
    numbers = noise >> rng.integers(0, 8 * dtype.itemsize, count).astype(dtype)
    numbers[: min(count, 4)] = [top, np.iinfo(dtype).min, 0, 1][:count]
    return numbers.astype(dtype)


def read(body: bytes, count: int, code: str) -> bins.Numbers:
    return bins.read(memoryview(body), count, np.dtype(code), "test")


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 63, 1000])
def test_kernels_and_reference_read_each_other(code: str, count: int) -> None:
    dtype = np.dtype(code)
    for shift in (0, 3):
        numbers = spread(code, count, count) >> dtype.type(shift) << dtype.type(shift)
        body = bins.write(numbers)
        assert np.array_equal(read(body, count, code), numbers)
        assert read_binned(body, count, dtype) == numbers.tolist()
        for fine in range(3 if dtype.itemsize == 8 else 4):
            slow = write_binned(numbers.tolist(), dtype, fine, shift)
            assert np.array_equal(read(slow, count, code), numbers)


@pytest.mark.parametrize("count", [4, 5, 70_000])
@pytest.mark.parametrize("value", [0, 1, 5, -1, -32768, 32767])
def test_one_number_over_and_over_takes_next_to_nothing(value: int, count: int) -> None:
    numbers = np.full(count, value, np.int16)
    body = bins.write(numbers)
    assert np.array_equal(read(body, count, "<i2"), numbers)
    assert len(body) < 240 + (0 if abs(value) < 8 or value == -32768 else 2 * count)


def test_the_size_is_near_the_entropy() -> None:
    numbers = np.random.default_rng(1).geometric(0.005, 50_000).astype(np.uint32)
    _, counts = np.unique(numbers, return_counts=True)
    p = 0.005
    bits = -(p * np.log2(p) + (1 - p) * np.log2(1 - p)) / p
    assert counts.sum() == 50_000
    assert len(bins.write(numbers)) < 50_000 * bits / 8 * 1.005 + 300


def test_zeros_below_every_number_cost_nothing() -> None:
    numbers = np.random.default_rng(2).integers(-9, 9, 5000).astype(np.int32)
    assert len(bins.write(numbers << np.int32(16))) == len(bins.write(numbers))


def test_tokens_of_all_small_numbers_and_the_largest_ones_are_in_order() -> None:
    for fine in range(5):
        coded = [tokenised(u, fine) for u in range(5000)]
        assert [token for token, _, _ in coded] == sorted(token for token, _, _ in coded)
        for u, (token, r, low) in enumerate(coded):
            assert untokenised(token, fine) == (u - low, r)
        for bits in range(1, 65):
            assert tokenised((1 << bits) - 1, fine)[0] == bins.num_tokens(bits, fine) - 1


@pytest.mark.parametrize("code", CODES)
def test_many_numbers_are_binned_and_few_are_not(code: str) -> None:
    numbers = np.random.default_rng(3).geometric(0.05, 9000).astype(code)
    assert write_numbers(numbers)[0] == BINS
    assert write_numbers(numbers[:2000])[0] == PCODEC
    again, rest = read_numbers(memoryview(write_numbers(numbers)), 9000, np.dtype(code), "test")
    assert np.array_equal(again, numbers)
    assert not len(rest)


@pytest.mark.parametrize("code", CODES)
def test_the_golden_streams_still_read_and_write_the_same(code: str) -> None:
    state, drawn = 1, []
    for _ in range(400):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        drawn.append((state >> 33) >> (state >> 28) % 31)
    signs = [(-1) ** (n & 1) if code[1] == "i" else 1 for n in drawn]
    numbers = np.array([n * s % 30_000 for n, s in zip(drawn, signs, strict=True)], code)
    path = GOLDEN / f"bins-{code[1:]}.stream"
    if os.environ.get("STITCH_WRITE_GOLDEN"):
        path.write_bytes(bins.write(numbers))
    assert bins.write(numbers) == path.read_bytes()
    assert np.array_equal(read(path.read_bytes(), 400, code), numbers)


def body_with(**changes: int | bytes) -> bytes:
    """A body of the numbers 1, 2, 3, 300, parts of it replaced."""
    body = bytearray(bins.write(np.array([1, 2, 3, 300], np.uint32)))
    for place, value in changes.items():
        at = int(place[1:])
        new = bytes([value]) if isinstance(value, int) else value
        body[at : at + len(new)] = new
    return bytes(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "too few"),
        (body_with()[:22], "too few"),
        (body_with(_0=32), "is not of"),
        (body_with(_0=255), "is not of"),
        (body_with(_1=5), "is not of"),
        (body_with(_2=255), "is not of"),
        (body_with(_2=3), "do not sum"),
        (body_with(_24=9), "do not sum"),
        (body_with(_3=b"\xff\xff\0\0"), "do not fit"),
        (body_with(_19=b"\xff\xff\xff\xff"), "do not fit"),
        (body_with()[:-1], "do not fit"),
        (body_with()[:-4], "does not hold"),
        (body_with() + bytes(4), "does not hold"),
        (body_with(_3=b"\xff\xff\xff\xff"), "does not hold"),
    ],
)
def test_broken_bodies_are_refused(body: bytes, message: str) -> None:
    with pytest.raises(CorruptPatchError, match=message):
        read(body, 4, "<u4")


@pytest.mark.parametrize("count", [0, 1, 3, 5, 8, 1000, 1 << 20])
def test_another_number_of_numbers_is_refused(count: int) -> None:
    with pytest.raises(CorruptPatchError, match="does not hold"):
        read(body_with(), count, "<u4")


def test_a_bit_after_the_last_is_refused() -> None:
    body = bytearray(body_with())
    body[-1] ^= 0x80
    with pytest.raises(CorruptPatchError, match="does not hold"):
        read(bytes(body), 4, "<u4")


@given(
    st.sampled_from(CODES),
    st.integers(1, 400),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), max_size=6),
    st.one_of(st.none(), st.integers(0, 2000)),
    st.integers(-3, 3),
)
def test_altered_streams_give_numbers_or_the_one_error(
    code: str, count: int, flips: list[tuple[int, int]], cut: int | None, more: int
) -> None:
    body = bytearray(bins.write(spread(code, count, count))[:cut])
    for at, mask in flips:
        if body:
            body[at % len(body)] ^= mask
    try:
        numbers = read(bytes(body), max(0, count + more), code)
    except CorruptPatchError:
        return
    assert numbers.size == max(0, count + more)
