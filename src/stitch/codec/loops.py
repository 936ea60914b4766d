"""The compiled loops. Import it only through :mod:`stitch.codec.kernels`.

See :mod:`stitch.codec.compiling` for how they are compiled and for the habits they keep.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types

from stitch.codec.compiling import NUMPY_UINT, UINT, compiled, input_array, output_array
from stitch.codec.constants import GOLDEN, MIX_1, MIX_2, MIX_3

_GOLDEN, _M1, _M2, _M3 = (np.uint64(c) for c in (GOLDEN, MIX_1, MIX_2, MIX_3))
_ZERO, _ONE, _S29, _S32 = (np.uint64(n) for n in (0, 1, 29, 32))

_LOG2_LANES = {1: 3, 2: 2, 4: 1, 8: 0}
"""Bytes of an element -> log2 of how many fill a 64-bit word."""

_GATHER = 256
"""Old words that `sum_change` fetches before it mixes them, so that cache misses overlap."""

_BLOCK = 1 << 12
"""Elements per block of the dense loops; the block's steps stay in the first-level cache."""


@cache
def find_changed(word_bytes: int) -> Callable[..., Any]:
    """(old, new, out) -> count; old and new are (m, 8) 64-bit words, out has room for every lane.

    Writes the ascending positions of unequal elements.
    """
    lanes = 1 << _LOG2_LANES[word_bytes]
    mask = np.uint64((1 << (8 * word_bytes)) - 1)
    shift = np.uint64(8 * word_bytes % 64)

    def loop(old, new, out):  # type: ignore[no-untyped-def]
        count = 0
        for row in range(old.shape[0]):
            seen = _ZERO
            for j in range(8):
                seen |= old[row, j] ^ new[row, j]
            if seen != _ZERO:
                for j in range(8):
                    bits = old[row, j] ^ new[row, j]
                    if bits != _ZERO:
                        position = (row * 8 + j) * lanes
                        # No branch per lane: write always, advance only if the lane differs.
                        for lane in range(lanes):
                            out[count] = position + lane
                            count += bits & mask != _ZERO
                            bits >>= shift
        return count

    rows = input_array(types.uint64, 2)
    return compiled(loop, types.int64, rows, rows, output_array(types.uint32))


@cache
def sum_words() -> Callable[..., Any]:
    """(words, first, out): add to out (2,) the digest lanes of 64-bit words from index `first`."""

    def loop(words, first, out):  # type: ignore[no-untyped-def]
        a = _ZERO
        b = _ZERO
        # Adding to the key, rather than multiplying anew, is worth a third of the speed.
        key = (first + _ONE) * _GOLDEN
        for i in range(words.size):
            h = (words[i] ^ key) * _M1
            key += _GOLDEN
            h ^= h >> _S32
            h *= _M2
            h ^= h >> _S29
            a += h
            g = h * _M3
            g ^= g >> _S32
            b += g
        out[0] += a
        out[1] += b

    return compiled(
        loop, types.void, input_array(types.uint64), types.uint64, output_array(types.uint64)
    )


@cache
def sum_change(word_bytes: int) -> Callable[..., Any]:
    """(whole, tail, first, positions, new, out): add to out (2,) what the lanes gain.

    `whole` and `tail` (0 or 1 word) are the old 64-bit words, the first of index `first` in its
    tensor; `positions` count elements from there and ascend.
    """
    log2 = _LOG2_LANES[word_bytes]
    lane = np.int64((1 << log2) - 1)
    lane_bits = np.uint64(8 * word_bytes)
    mask = np.uint64((1 << (8 * word_bytes)) - 1)

    def loop(whole, tail, first, positions, new, out):  # type: ignore[no-untyped-def]
        fetched = np.empty(_GATHER + 8, np.uint64)
        a = _ZERO
        b = _ZERO
        start = 0
        while start < positions.size:
            stop = min(start + _GATHER, positions.size)
            while stop < positions.size and positions[stop] >> log2 == positions[stop - 1] >> log2:
                stop += 1
            for k in range(start, stop):
                index = positions[k] >> log2
                fetched[k - start] = whole[index] if index < whole.size else tail[0]
            k = start
            while k < stop:
                index = positions[k] >> log2
                old_word = fetched[k - start]
                new_word = old_word
                while k < stop and positions[k] >> log2 == index:
                    at = np.uint64(positions[k] & lane) * lane_bits
                    new_word = (new_word & ~(mask << at)) | (np.uint64(new[k]) << at)
                    k += 1
                key = (first + np.uint64(index) + _ONE) * _GOLDEN
                h = (new_word ^ key) * _M1
                h ^= h >> _S32
                h *= _M2
                h ^= h >> _S29
                a += h
                g = h * _M3
                b += g ^ (g >> _S32)
                h = (old_word ^ key) * _M1
                h ^= h >> _S32
                h *= _M2
                h ^= h >> _S29
                a -= h
                g = h * _M3
                b -= g ^ (g >> _S32)
            start = stop
        out[0] += a
        out[1] += b

    return compiled(
        loop,
        types.void,
        input_array(types.uint64),
        input_array(types.uint64),
        types.uint64,
        input_array(types.int64),
        input_array(UINT[word_bytes]),
        output_array(types.uint64),
    )


@cache
def split_steps(word_bytes: int, ordered: bool) -> Callable[..., Any]:
    """(old, new, first, out): zigzag ULP steps as byte planes out (width, n), from column `first`.

    `ordered`: the words are sign and magnitude.
    """
    word = NUMPY_UINT[word_bytes]
    zero, one, top = word(0), word(1), word(8 * word_bytes - 1)
    sign = word(1 << (8 * word_bytes - 1))

    def loop(old, new, first, out):  # type: ignore[no-untyped-def]
        zigzag = np.empty(_BLOCK, word)
        for start in range(0, old.size, _BLOCK):
            olds = old[start : start + _BLOCK]
            news = new[start : start + _BLOCK]
            n = olds.size
            for i in range(n):
                x = olds[i]
                y = news[i]
                if ordered:
                    x = word(x ^ word(sign | word(zero - word(x >> top))))
                    y = word(y ^ word(sign | word(zero - word(y >> top))))
                step = word(y - x)
                zigzag[i] = word(word(step << one) ^ word(zero - word(step >> top)))
            for plane in range(word_bytes):
                shift = word(8 * plane)
                row = out[plane, first + start : first + start + n]
                for i in range(n):
                    row[i] = np.uint8(zigzag[i] >> shift)

    words = input_array(UINT[word_bytes])
    return compiled(loop, types.void, words, words, types.int64, output_array(types.uint8, 2))


@cache
def join_steps(word_bytes: int, ordered: bool) -> Callable[..., Any]:
    """(old, planes, first, out) -> count: the inverse of `split_steps`; out (n,) gets the words.

    `planes` (width, total) are read from column `first`. Returns how many words moved.
    """
    word = NUMPY_UINT[word_bytes]
    zero, one, top = word(0), word(1), word(8 * word_bytes - 1)
    sign = word(1 << (8 * word_bytes - 1))

    def loop(old, planes, first, out):  # type: ignore[no-untyped-def]
        zigzag = np.empty(_BLOCK, word)
        moved = 0
        for start in range(0, old.size, _BLOCK):
            olds = old[start : start + _BLOCK]
            n = olds.size
            news = out[start : start + n]
            row = planes[0, first + start : first + start + n]
            for i in range(n):
                zigzag[i] = word(row[i])
            for plane in range(1, word_bytes):
                shift = word(8 * plane)
                row = planes[plane, first + start : first + start + n]
                for i in range(n):
                    zigzag[i] = word(zigzag[i] | word(word(row[i]) << shift))
            for i in range(n):
                z = zigzag[i]
                x = olds[i]
                if ordered:
                    x = word(x ^ word(sign | word(zero - word(x >> top))))
                y = word(x + word(word(z >> one) ^ word(zero - word(z & one))))
                if ordered:
                    y = word(y ^ word(sign | word(word(y >> top) - one)))
                news[i] = y
            for i in range(n):
                moved += zigzag[i] != zero
        return moved

    words = input_array(UINT[word_bytes])
    return compiled(
        loop,
        types.int64,
        words,
        input_array(types.uint8, 2),
        types.int64,
        output_array(UINT[word_bytes]),
    )
