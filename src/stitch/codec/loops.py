"""The compiled loops that digest, and those that digest what they find or fetch.

Import it only through :mod:`stitch.codec.kernels`. See :mod:`stitch.codec.compiling` for how they
are compiled and for the habits they keep.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable

from stitch.codec.compiling import (
    NUMPY_INT,
    NUMPY_UINT,
    SIGNED,
    UINT,
    compiled,
    input_array,
    output_array,
)
from stitch.codec.constants import GOLDEN, MIX_1, MIX_2, MIX_3
from stitch.codec.intrinsics import (
    load_at,
    load_byte_at,
    prefetch,
    prefetch_at,
    trailing_zeros,
)
from stitch.codec.kernels import BLOCK_ROWS, ROW_WORDS
from stitch.codec.order_loops import order

_GOLDEN, _M1, _M2, _M3 = (np.uint64(c) for c in (GOLDEN, MIX_1, MIX_2, MIX_3))
_ZERO, _ONE, _THREE, _S29, _S32 = (np.uint64(n) for n in (0, 1, 3, 29, 32))

_ROW_SHIFT, _ROW_MASK = np.uint64(ROW_WORDS.bit_length() - 1), np.uint64(ROW_WORDS - 1)

_LOG2_LANES = {1: 3, 2: 2, 4: 1, 8: 0}
"""Bytes of an element -> log2 of how many fill a 64-bit word."""

_SCAN_AHEAD = 512
"""64-bit words between asking for a row and comparing it."""

_AHEAD = 32
"""Changes between asking for an old word and using it, so that cache misses overlap."""


@register_jitable
def _mix(word, key):  # type: ignore[no-untyped-def]
    """The two terms of a word; see docs/format.md, "Digest"."""
    h = (word ^ key) * _M1
    h ^= h >> _S32
    h *= _M2
    h ^= h >> _S29
    g = h * _M3
    return h, g ^ (g >> _S32)


@register_jitable
def _lower_bound(ascending, lo, value):  # type: ignore[no-untyped-def]
    """The first index from `lo` on where an ascending array is not below the value."""
    hi = np.int64(ascending.size)
    while lo < hi:
        middle = (lo + hi) >> 1
        if ascending[np.uint64(middle)] < value:
            lo = middle + 1
        else:
            hi = middle
    return lo


@cache
def sum_words() -> Callable[..., Any]:
    """(words, first, out): add to out (2,) the digest lanes of 64-bit words from index `first`."""

    def loop(words, first, out):  # type: ignore[no-untyped-def]
        a = _ZERO
        b = _ZERO
        # Adding to the key, rather than multiplying anew, is worth a third of the speed.
        key = (first + _ONE) * _GOLDEN
        for i in range(words.size):
            h, g = _mix(words[i], key)
            key += _GOLDEN
            a += h
            b += g
        out[0] += a
        out[1] += b

    return compiled(
        loop, types.void, input_array(types.uint64), types.uint64, output_array(types.uint64)
    )


@cache
def scan(word_bytes: int) -> Callable[..., Any]:
    """(old, new, row, first, base, positions, olds, news, count, lanes) -> (row, count).

    Lists the unequal elements of old and new, rows of 64-bit words (m, 8), from `row` on. Their
    positions, from `base` at row 0, and their old and new words go to positions, olds and news
    from index `count`. What the digest gains is added to lanes (2,); `first` is the index of the
    first 64-bit word. Returns where it stopped: at m, or before rows whose changes may not fit.
    """
    word = NUMPY_UINT[word_bytes]
    log2, per_word = _LOG2_LANES[word_bytes], 1 << _LOG2_LANES[word_bytes]
    log2_bits = np.uint64(6 - log2)
    mask = np.uint64((1 << (8 * word_bytes)) - 1)

    def loop(old, new, row, first, base, positions, olds, news, count, lanes):  # type: ignore[no-untyped-def]
        where = np.empty(BLOCK_ROWS * ROW_WORDS + 1, np.int64)
        a = _ZERO
        b = _ZERO
        num_rows = old.shape[0]
        stopped = num_rows
        for start in range(row, num_rows, BLOCK_ROWS):
            found = 0
            for r in range(start, min(start + BLOCK_ROWS, num_rows)):
                # Both come from memory, and faster than the processor would fetch them by itself.
                prefetch(old, r * ROW_WORDS + _SCAN_AHEAD)
                prefetch(new, r * ROW_WORDS + _SCAN_AHEAD)
                seen = _ZERO
                for j in range(ROW_WORDS):
                    seen |= old[r, j] ^ new[r, j]
                if seen != _ZERO:
                    for j in range(ROW_WORDS):
                        # No branch to mispredict: write always, advance if the words differ.
                        where[found] = r * ROW_WORDS + j
                        found += old[r, j] != new[r, j]
            if count + found * per_word > positions.size:
                stopped = start
                break
            for i in range(found):
                # Unsigned indices spare the check for negative ones.
                index = np.uint64(where[i])
                x = old[index >> _ROW_SHIFT, index & _ROW_MASK]
                y = new[index >> _ROW_SHIFT, index & _ROW_MASK]
                at = base + (where[i] << log2)
                bits = x ^ y
                while bits != _ZERO:
                    lane = trailing_zeros(bits) >> log2_bits
                    shift = lane << log2_bits
                    positions[np.uint64(count)] = at + np.int64(lane)
                    olds[np.uint64(count)] = word((x >> shift) & mask)
                    news[np.uint64(count)] = word((y >> shift) & mask)
                    count += 1
                    bits &= ~(mask << shift)
                key = (first + index + _ONE) * _GOLDEN
                h, g = _mix(y, key)
                a += h
                b += g
                h, g = _mix(x, key)
                a -= h
                b -= g
        lanes[0] += a
        lanes[1] += b
        return stopped, count

    rows = input_array(types.uint64, 2)
    words = output_array(UINT[word_bytes])
    return compiled(
        loop,
        types.UniTuple(types.int64, 2),
        rows,
        rows,
        types.int64,
        types.uint64,
        types.int64,
        output_array(types.int64),
        words,
        words,
        types.int64,
        output_array(types.uint64),
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
        a = _ZERO
        b = _ZERO
        last_index = np.int64(-1)
        word = _ZERO
        size = positions.size
        for k in range(size):
            prefetch(whole, positions[min(k + _AHEAD, size - 1)] >> log2)
            index = positions[k] >> log2
            # Changes of one 64-bit word follow each other, each from where the last one led.
            before = whole[index] if index < whole.size else tail[0]
            before = word if index == last_index else before
            at = np.uint64(positions[k] & lane) * lane_bits
            word = (before & ~(mask << at)) | (np.uint64(new[k]) << at)
            last_index = index
            key = (first + np.uint64(index) + _ONE) * _GOLDEN
            h, g = _mix(word, key)
            a += h
            b += g
            h, g = _mix(before, key)
            a -= h
            b -= g
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
def take_steps(word_bytes: int, ordered: bool, known: bool = False) -> Callable[..., Any]:
    """(places, positions, steps, olds, news, gains, ends) -> number of bad steps, or -1.

    Fetches the words at `positions` (k,) and takes `steps` (k,) from them: old and new words go to
    olds and news. `places` (n, 4) say where the words of each slice are, see `kernels.PLACE`;
    `positions` count along the slices, ascend inside them, and are made to count from the start of
    their tensor. What the digest gains by a slice goes to its row of gains (n, 2), where its
    positions end to ends (n,). A step is bad that is 0 or too wide for a word.
    -1: a position is not inside the slices, or its word not inside the memory.
    `ordered`: the words are sign and magnitude. `known`: old and new words are there already, and
    there are no steps.
    """
    word, signed, wide = NUMPY_UINT[word_bytes], NUMPY_INT[word_bytes], max(2, word_bytes)
    number, back = order(word_bytes, ordered)
    log2 = _LOG2_LANES[word_bytes]
    lane = np.int64((1 << log2) - 1)
    lane_bits = np.uint64(8 * word_bytes)
    mask = np.uint64((1 << (8 * word_bytes)) - 1)
    wider = NUMPY_INT[wide]

    def loop(places, positions, steps, olds, news, gains, ends):  # type: ignore[no-untyped-def]
        bad = 0
        hi = np.int64(0)
        offset = np.int64(0)
        for row in range(places.shape[0]):
            start, count = places[row, 0], places[row, 1]
            address, num_words = np.uint64(places[row, 2]), places[row, 3]
            lo = hi
            hi = _lower_bound(positions, lo, offset + count)
            ends[row] = hi
            shift = start - offset
            offset += count
            if lo == hi:
                continue
            num_whole = num_words >> log2
            tail = _ZERO
            last = positions[np.uint64(hi - 1)] + shift
            if positions[np.uint64(lo)] + shift < 0 or last >= num_words:
                return -1
            if last >= num_whole << log2:
                for byte in range((num_words & lane) * word_bytes):
                    at = address + np.uint64((num_whole << 3) + byte)
                    tail |= np.uint64(load_byte_at(at)) << np.uint64(8 * byte)
            a = _ZERO
            b = _ZERO
            last_index = np.int64(-1)
            word64 = _ZERO
            for n in range(lo, hi):
                k = np.uint64(n)
                ahead = positions[np.uint64(min(n + _AHEAD, hi - 1))] + shift
                prefetch_at(address + (np.uint64(ahead >> log2) << _THREE))
                place = positions[k] + shift
                positions[k] = place
                index = place >> log2
                found = tail
                if index < num_whole:
                    found = load_at(address + (np.uint64(index) << _THREE))
                at = np.uint64(place & lane) * lane_bits
                if known:
                    y = news[k]
                else:
                    step = signed(steps[k])
                    bad += (step == 0) | (wider(step) != steps[k])
                    x = word((found >> at) & mask)
                    olds[k] = x
                    y = back(word(number(x) + word(step)))
                    news[k] = y
                # Changes of one 64-bit word follow each other, each from where the last one led.
                # Only here: so the next change need not wait for this one's step.
                before = word64 if index == last_index else found
                word64 = (before & ~(mask << at)) | (np.uint64(y) << at)
                last_index = index
                key = np.uint64(index + 1) * _GOLDEN
                h, g = _mix(word64, key)
                a += h
                b += g
                h, g = _mix(before, key)
                a -= h
                b -= g
            gains[row, 0] = a
            gains[row, 1] = b
        return bad if hi == positions.size else -1

    words = output_array(UINT[word_bytes])
    return compiled(
        loop,
        types.int64,
        input_array(types.int64, 2),
        output_array(types.int64),
        input_array(SIGNED[wide]),
        words,
        words,
        output_array(types.uint64, 2),
        output_array(types.int64),
    )
