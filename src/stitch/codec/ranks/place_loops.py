"""Compiled loops of `ranks` from distances inside classes back to positions and words.

Import it only through :mod:`stitch.codec.ranks.kernels`. See docs/format.md, "ranks".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable

from stitch.codec.compiling import NUMPY_UINT, UINT, compiled, input_array, output_array
from stitch.codec.intrinsics import trailing_zeros
from stitch.codec.ranks.table import INVERTED, LANE_CHANGED, LANE_CODED, LANES, MAX_CLASSES
from stitch.codec.ranks.tile_loops import (
    FIRST,
    MANY_PLACED,
    NUM_KEYS,
    ROOM,
    TILE,
    WIDTH,
    aim,
    bits_outside,
    count_inside,
    fill,
    fill_keys,
    how_many,
    judge,
    key_at,
    lane_bits,
    lowest,
    no_window,
    without_lowest,
)
from stitch.codec.vectors import GROUP, equal_bits

_LANE_CHANGED, _LANE_CODED = LANE_CHANGED.start, LANE_CODED.start
_UNROLLED = 8
_ONE = np.uint32(1)
_BIT = np.uint64(1)
_NEVER = np.uint32(0xFFFFFFFF)
"""More elements of a class than a bucket can hold."""
NO_KEY = NUM_KEYS
"""What fills up a last group of elements: nothing ever happens there."""

NO_WORD = -1
"""What `place_words` returns when a value leads to a word that does not exist."""


def _move(word_bytes: int, ordered: bool) -> Any:
    """(word, value, flip) -> (new word, whether there is one)."""
    word = NUMPY_UINT[word_bytes]
    top = word(8 * word_bytes - 1)
    most = (1 << (8 * word_bytes - 1)) - 1
    size_bits = word(most)

    if ordered:

        @register_jitable
        def by_magnitude(old, value, flip):  # type: ignore[no-untyped-def]
            # A sum beyond 64 bits wraps to a negative number.
            size = np.int64(old & size_bits) + value
            sign = word(word(old >> top) ^ word(flip)) << top
            return word(size) | sign, 0 <= size <= most

        return by_magnitude

    @register_jitable
    def by_step(old, value, flip):  # type: ignore[no-untyped-def]
        return word(old + word(value)), flip == 0 and -most - 1 <= value <= most

    return by_step


@cache
def unfold_gaps() -> Callable[..., Any]:
    """(table, gaps, waits, ends) -> whether there are enough changed elements.

    What comes before each changed element (k,), of its class and lane, into `waits`; and after the
    last one into `ends` (rows, LANES), where the gaps tell (they do if they lead to unchanged
    elements), else -1.
    """

    def loop(table, gaps, waits, ends):  # type: ignore[no-untyped-def]
        at = 0
        gap_at = 0
        for r in range(table.shape[0]):
            row = table[r]
            for lane in range(LANES):
                stop = at + row[_LANE_CHANGED + lane]
                gap_stop = gap_at + row[_LANE_CODED + lane]
                if row[INVERTED] == 0:
                    waits[at:stop] = gaps[gap_at:gap_stop]
                    ends[r, lane] = -1
                else:
                    wait = np.uint32(0)
                    for gap in gaps[gap_at:gap_stop]:
                        if gap > stop - at:
                            return False
                        for _ in range(gap):
                            waits[at] = wait
                            at += 1
                            wait = np.uint32(0)
                        wait += _ONE
                    for i in range(at, stop):
                        waits[i] = wait
                        wait = np.uint32(0)
                    ends[r, lane] = wait
                at = stop
                gap_at = gap_stop
        return True

    return compiled(
        loop,
        types.boolean,
        input_array(types.int64, 2),
        input_array(types.uint32),
        output_array(types.uint32),
        output_array(types.int64, 2),
    )


@register_jitable
def _one_by_one(keys, size, waits, now, following, stop, hits, which):  # type: ignore[no-untyped-def]
    """Offsets of the changed elements of a tile into hits, their entries into which; how many."""
    keys[size : size + _UNROLLED] = NO_KEY
    count = 0
    # So little happens at a hit that this loop can be unrolled.
    for group in range(0, size, _UNROLLED):
        eight = keys[group : group + _UNROLLED]
        for j in range(_UNROLLED):
            key = eight[j]
            wait = now[key]
            now[key] = np.uint32(wait - _ONE)
            if wait == 0:
                hits[count] = group + j
                at = following[key]
                which[count] = at
                count += 1
                at += 1
                following[key] = at
                now[key] = waits[at] if at < stop[key] else _NEVER
    return count


@register_jitable
def _mark(tile, key, number, phase, waits, now, following, stop, entries, marks):  # type: ignore[no-untyped-def]
    """Mark the changed ones of `number` elements of a key in a tile; returns how many they are."""
    wait = np.int64(now[key])
    mine = lane_bits(phase, key >> 8)
    kind = np.uint8(key & (MAX_CLASSES - 1))
    count = 0
    before = np.int64(0)
    group = 0
    at = following[key]
    while wait < number:
        bits = equal_bits(tile, group, kind) & mine
        here = how_many(bits)
        while before + here <= wait:
            before += here
            group += GROUP
            bits = equal_bits(tile, group, kind) & mine
            here = how_many(bits)
        for _ in range(wait - before):
            bits = without_lowest(bits)
        offset = group + lowest(bits)
        entries[offset] = at
        marks[offset >> 6] |= _BIT << np.uint64(offset & 63)
        count += 1
        at += 1
        wait += 1 + np.int64(waits[at]) if at < stop[key] else 1 + np.int64(_NEVER)
    following[key] = at
    now[key] = np.uint32(wait - number)
    return count


@cache
def place_words(word_bytes: int, class_bytes: int, ordered: bool) -> Callable[..., Any]:
    """(words, class words, shift, mask, origin, waits, now, next, stop, values, flips, found,
    positions, old, new) -> found, or NO_WORD.

    The inverse of `rank_words`. `waits` (k,): how many words of its key come before each changed
    one. `now` (NUM_KEYS + 1,): the same for the next one of each key; `next`, `stop` (NUM_KEYS,):
    where that is in `waits`, and where the key's end; state between calls. From entry `found` on,
    `positions`, `old` and `new` get the changed elements. `ordered`: words are sign and magnitude.
    """
    fill_tile, move = fill(class_bytes), _move(word_bytes, ordered)

    def loop(  # type: ignore[no-untyped-def]
        words,
        class_words,
        shift,
        mask,
        origin,
        waits,
        now,
        following,
        stop,
        values,
        flips,
        found,
        positions,
        old,
        new,
    ):
        tile = np.zeros(ROOM, np.uint8)
        keys = np.empty(TILE + _UNROLLED, np.uint16)
        window = no_window()
        counts = np.zeros(NUM_KEYS, np.uint32)
        entries = np.empty(TILE, np.int64)
        marks = np.zeros(TILE >> 6, np.uint64)
        hits = np.empty(TILE, np.int64)
        which = np.empty(TILE, np.int64)
        count = 0
        for start in range(0, words.size, TILE):
            size = min(TILE, words.size - start)
            piece = words[start : start + size]
            fill_tile(class_words[start : start + size], shift, mask, tile)
            first = origin + start
            phase = first & (LANES - 1)
            # Changes come in swarms: a tile after one with many has many.
            many = count >= MANY_PLACED
            if size == TILE and not many:
                aim(tile, window)
            if many or window[WIDTH] == 0:
                fill_keys(tile, size, phase, keys)
                count = _one_by_one(keys, size, waits, now, following, stop, hits, which)
            else:
                count_inside(tile, size, phase, window, counts)
                count = 0
                for lane in range(LANES):
                    for kind in range(window[FIRST], window[FIRST] + window[WIDTH]):
                        key = lane << 8 | kind
                        number = counts[key]
                        counts[key] = 0
                        if number <= now[key]:
                            now[key] -= number
                        else:
                            count += _mark(
                                tile, key, np.int64(number), phase, waits, now, following, stop,
                                entries, marks,
                            )  # fmt: skip
                num_outside = 0
                for group in range(0, size, GROUP):
                    bits = bits_outside(tile, group, size, window)
                    while bits != 0:
                        offset = group + lowest(bits)
                        bits = without_lowest(bits)
                        num_outside += 1
                        key = key_at(tile, offset, phase)
                        wait = now[key]
                        now[key] = np.uint32(wait - _ONE)
                        if wait == 0:
                            at = following[key]
                            entries[offset] = at
                            marks[offset >> 6] |= _BIT << np.uint64(offset & 63)
                            count += 1
                            at += 1
                            following[key] = at
                            now[key] = waits[at] if at < stop[key] else _NEVER
                judge(num_outside, window)
                listed = 0
                for number in range(marks.size):
                    bits64 = marks[number]
                    marks[number] = 0
                    while bits64 != 0:
                        offset = number << 6 | np.int64(trailing_zeros(bits64))
                        bits64 &= bits64 - _BIT
                        hits[listed] = offset
                        which[listed] = entries[offset]
                        listed += 1
            for i in range(count):
                word = piece[hits[i]]
                at = which[i]
                moved, exists = move(word, values[at], flips[at])
                if not exists:
                    return NO_WORD
                positions[found] = first + hits[i]
                old[found] = word
                new[found] = moved
                found += 1
        return found

    word = UINT[word_bytes]
    return compiled(
        loop,
        types.int64,
        input_array(word),
        input_array(UINT[class_bytes]),
        types.uint64,
        types.uint64,
        types.int64,
        input_array(types.uint32),
        output_array(types.uint32),
        output_array(types.int64),
        input_array(types.int64),
        input_array(types.int64),
        input_array(types.uint8),
        types.int64,
        output_array(types.int64),
        output_array(word),
        output_array(word),
    )
