"""Binned streams: numbers as tokens, coded by rANS, and raw bits. See docs/format.md.

Where there are many numbers this takes a third of the time of pcodec, for nearly the same size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from stitch.errors import CorruptPatchError

Numbers = npt.NDArray[np.integer[Any]]

TOTAL_BITS = 12
TOTAL = 1 << TOTAL_BITS
"""Sum of the widths of all tokens."""
TOKENS = 256
STATES = 4
"""rANS states, which take turns."""
LOWEST_STATE = 1 << 16
"""States between two numbers are in [LOWEST_STATE, 2^32)."""
MOST_FINE = 4
"""Bits of a token after the leading one are at most this many."""

_HEAD = struct.Struct("<BBB4II")
_SPARE_WORDS, _SPARE_BITS = STATES, 10
"""Words after the end that a reader may look at before it finds out that it is there."""


def _fine(dtype: np.dtype[Any]) -> int:
    """Bits after the leading one that are part of a token: 3, or as many as 256 tokens allow."""
    return 2 if dtype.itemsize == 8 else 3


def warm(dtypes: Iterable[np.dtype[Any]]) -> None:
    """Compile the loops for numbers of these types, or load them from numba's cache."""
    from stitch.codec import bin_loops

    bin_loops.measure()
    bin_loops.push()
    bin_loops.fill_slots()
    for dtype in dtypes:
        bin_loops.tokenise(dtype.str[1:])
        bin_loops.read(dtype.str[1:])


def num_tokens(num_bits: int, fine: int) -> int:
    """Tokens of numbers below 2^num_bits."""
    if num_bits <= fine:
        return 1 << num_bits
    return (num_bits + 1 - fine) << fine


def write(numbers: Numbers) -> bytes:
    """The body of a stream holding `numbers` (k,), k > 0."""
    from stitch.codec import bin_loops

    fine = _fine(numbers.dtype)
    every = int(np.bitwise_or.reduce(numbers))
    shift = (every & -every).bit_length() - 1 if every else 0
    tokens = np.empty(numbers.size, np.uint8)
    counts = np.empty(TOKENS, np.int64)
    bits = np.empty(numbers.size * max(1, numbers.itemsize // 4) + 2, np.uint32)
    code = numbers.dtype.str[1:]
    num_bit_words = bin_loops.tokenise(code)(numbers, shift, fine, tokens, counts, bits)
    widths, starts = np.empty((2, TOKENS), np.uint32)
    inverses = np.empty(TOKENS)
    table = np.empty(2 * TOKENS, np.uint8)
    used, table_bytes = bin_loops.measure()(counts, widths, starts, inverses, table)
    words = np.empty(numbers.size + 1, np.uint16)
    states = np.empty(STATES, np.uint64)
    first = bin_loops.push()(tokens, widths, starts, inverses, words, states)
    head = _HEAD.pack(shift, fine, used - 1, *states.tolist(), words.size - first)
    arrays = table[:table_bytes], words[first:], bits[:num_bit_words]
    return b"".join([head, *(array.tobytes() for array in arrays)])


def read(body: memoryview, count: int, dtype: np.dtype[Any], what: str) -> Numbers:
    """The `count` numbers of a body, which must hold exactly as many."""
    from stitch.codec import bin_loops

    if len(body) < _HEAD.size:
        raise CorruptPatchError(f"{what}: {len(body)} bytes are too few for a binned stream")
    shift, fine, last, *states, num_words = _HEAD.unpack_from(body)
    num_bits = 8 * dtype.itemsize - shift
    if num_bits < 1 or fine > MOST_FINE or last >= num_tokens(num_bits, fine):
        raise CorruptPatchError(
            f"{what}: token {last} of {fine} bits, shifted by {shift}, is not of {dtype}"
        )
    # Two zeros more, so that the last width may seem to take two bytes.
    table = np.frombuffer(bytes(body[_HEAD.size : _HEAD.size + 2 * TOKENS]) + bytes(2), np.uint8)
    slots = np.empty(TOTAL, np.uint32)
    table_bytes = bin_loops.fill_slots()(table, last + 1, slots)
    if table_bytes < 0:
        raise CorruptPatchError(f"{what}: widths of {last + 1} tokens do not sum to {TOTAL}")
    start = _HEAD.size + table_bytes
    words_end = start + 2 * num_words
    if words_end > len(body) or (len(body) - words_end) % 4 or min(states) < LOWEST_STATE:
        raise CorruptPatchError(f"{what}: the parts of a binned stream do not fit its length")
    # As bytes: copying what is not aligned takes ten times as long.
    words = np.zeros(num_words + _SPARE_WORDS, np.uint16)
    words.view(np.uint8)[: 2 * num_words] = np.frombuffer(body[start:words_end], np.uint8)
    num_bit_words = (len(body) - words_end) // 4
    bits = np.zeros(num_bit_words + _SPARE_BITS, np.uint32)
    bits.view(np.uint8)[: 4 * num_bit_words] = np.frombuffer(body[words_end:], np.uint8)
    numbers = np.empty(count, dtype)
    ends = np.zeros(2, np.uint64)
    left = np.array(states, np.uint64)
    code = dtype.str[1:]
    verdict = bin_loops.read(code)(
        slots, shift, fine, words, bits, num_bit_words, left, numbers, ends
    )
    used_words, used_bits = ends.tolist()
    if (
        verdict != bin_loops.OK
        or used_words != num_words
        or -(-used_bits // 32) != num_bit_words
        or (used_bits % 32 and int(bits[num_bit_words - 1]) >> used_bits % 32)
        or left.tolist() != [LOWEST_STATE] * STATES
    ):
        raise CorruptPatchError(f"{what}: the binned stream does not hold {count} numbers")
    return numbers
