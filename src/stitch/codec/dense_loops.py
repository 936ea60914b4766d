"""The compiled loops of `dense`. Imported when the first one is needed.

See :mod:`stitch.codec.compiling` for how they are compiled and for the habits they keep.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types

from stitch.codec.compiling import NUMPY_UINT, UINT, compiled, input_array, output_array
from stitch.codec.order_loops import zigzag as zigzag_of

_BLOCK = 1 << 12
"""Elements per block of `join_planes`; the block's steps stay in the first-level cache."""

_ESCAPE = 3
"""The token of a zigzag step that does not fit a token."""


def warm(word_bytes: int, ordered: bool) -> None:
    """Compile all loops for these words, or load them from numba's cache."""
    split_tokens(word_bytes, ordered)
    split_planes(word_bytes, ordered)
    join_tokens(word_bytes, ordered)
    join_planes(word_bytes, ordered)


@cache
def split_tokens(word_bytes: int, ordered: bool) -> Callable[..., Any]:
    """(old, new, first, tokens, planes, done) -> done: zigzag steps as 2-bit tokens, 4 in a byte.

    Adds those of elements from `first` on to tokens, zeros so far. By how much the steps of
    escaped elements exceed 3 goes to planes (width, room), from column `done` on.
    `ordered`: the words are sign and magnitude.
    """
    word = NUMPY_UINT[word_bytes]
    escape = word(_ESCAPE)
    between, _ = zigzag_of(word_bytes, ordered)

    def loop(old, new, first, tokens, planes, done):  # type: ignore[no-untyped-def]
        zigzag = np.empty(_BLOCK, word)
        places = np.empty(_BLOCK + 1, np.uint16)
        spread = np.empty(_BLOCK + 8, np.uint8)
        for start in range(0, old.size, _BLOCK):
            olds = old[start : start + _BLOCK]
            news = new[start : start + _BLOCK]
            n = olds.size
            for i in range(n):
                zigzag[i] = between(olds[i], news[i])
            lead = (first + start) & 3
            packed = tokens[(first + start) >> 2 : (first + start + n + 3) >> 2]
            spread[:4] = 0
            spread[lead + n : lead + n + 4] = 0
            own = spread[lead : lead + n]
            for i in range(n):
                own[i] = np.uint8(min(zigzag[i], escape))
            for i in range(packed.size):
                low = spread[4 * i] | spread[4 * i + 1] << 2
                packed[i] |= np.uint8(low | spread[4 * i + 2] << 4 | spread[4 * i + 3] << 6)
            # First where the escaped ones are, without a branch, then what they are.
            count = np.uint64(0)  # unsigned: numba need not ask whether it is negative
            for i in range(n):
                places[count] = i
                count += np.uint64(zigzag[i] >= escape)
            end = done + np.int64(count)
            for plane in range(word_bytes):
                shift = word(8 * plane)
                row = planes[plane, done:end]
                for i in range(row.size):
                    row[i] = np.uint8(word(zigzag[places[i]] - escape) >> shift)
            done = end
        return done

    words = input_array(UINT[word_bytes])
    return compiled(
        loop,
        types.int64,
        words,
        words,
        types.int64,
        output_array(types.uint8),
        output_array(types.uint8, 2),
        types.int64,
    )


@cache
def split_planes(word_bytes: int, ordered: bool) -> Callable[..., Any]:
    """(old, new, first, planes): zigzag steps as byte planes (width, total), from column `first`.

    `ordered`: the words are sign and magnitude.
    """
    word = NUMPY_UINT[word_bytes]
    between, _ = zigzag_of(word_bytes, ordered)

    def loop(old, new, first, planes):  # type: ignore[no-untyped-def]
        zigzag = np.empty(_BLOCK, word)
        for start in range(0, old.size, _BLOCK):
            olds = old[start : start + _BLOCK]
            news = new[start : start + _BLOCK]
            n = olds.size
            for i in range(n):
                zigzag[i] = between(olds[i], news[i])
            for plane in range(word_bytes):
                shift = word(8 * plane)
                row = planes[plane, first + start : first + start + n]
                for i in range(n):
                    row[i] = np.uint8(zigzag[i] >> shift)

    words = input_array(UINT[word_bytes])
    return compiled(loop, types.void, words, words, types.int64, output_array(types.uint8, 2))


@cache
def join_tokens(word_bytes: int, ordered: bool) -> Callable[..., Any]:
    """(old, tokens, first, planes, cursor, out) -> cursor: the inverse of `split_tokens`.

    Words of elements from `first` on go to out (n,). planes (width, m) have one column for each
    escaped element, and are read from column `cursor` on. Returns -1 if a step is too wide.
    """
    word = NUMPY_UINT[word_bytes]
    zero, escape = word(0), word(_ESCAPE)
    _, take = zigzag_of(word_bytes, ordered)
    limit = word((1 << (8 * word_bytes)) - 1 - _ESCAPE)

    def loop(old, tokens, first, planes, cursor, out):  # type: ignore[no-untyped-def]
        unpacked = np.empty(_BLOCK + 8, word)
        places = np.empty(_BLOCK + 1, np.uint16)
        wide = np.empty(_BLOCK, word)
        widest = zero
        for start in range(0, old.size, _BLOCK):
            olds = old[start : start + _BLOCK]
            n = olds.size
            news = out[start : start + n]
            lead = (first + start) & 3
            packed = tokens[(first + start) >> 2 : (first + start + n + 3) >> 2]
            for i in range(packed.size):
                four = packed[i]
                unpacked[4 * i] = four & 3
                unpacked[4 * i + 1] = (four >> 2) & 3
                unpacked[4 * i + 2] = (four >> 4) & 3
                unpacked[4 * i + 3] = four >> 6
            zigzag = unpacked[lead : lead + n]
            # First where the escaped ones are, without a branch, then what they are.
            count = np.uint64(0)  # unsigned: numba need not ask whether it is negative
            for i in range(n):
                places[count] = i
                count += np.uint64(zigzag[i] == escape)
            end = cursor + np.int64(count)
            wide[:] = zero
            for plane in range(word_bytes):
                shift = word(8 * plane)
                row = planes[plane, cursor:end]
                for i in range(row.size):
                    wide[i] = word(wide[i] | word(word(row[i]) << shift))
            cursor = end
            for i in range(np.int64(count)):
                widest = max(widest, wide[i])
                zigzag[places[i]] = word(wide[i] + escape)
            for i in range(n):
                news[i] = take(olds[i], zigzag[i])
        return cursor if widest <= limit else -1

    words = input_array(UINT[word_bytes])
    return compiled(
        loop,
        types.int64,
        words,
        input_array(types.uint8),
        types.int64,
        input_array(types.uint8, 2),
        types.int64,
        output_array(UINT[word_bytes]),
    )


@cache
def join_planes(word_bytes: int, ordered: bool) -> Callable[..., Any]:
    """(old, planes, first, out) -> count: the inverse of `split_planes`; out (n,) gets the words.

    `planes` (width, total) are read from column `first`. Returns how many words moved.
    """
    word = NUMPY_UINT[word_bytes]
    zero = word(0)
    _, take = zigzag_of(word_bytes, ordered)

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
                news[i] = take(olds[i], zigzag[i])
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
