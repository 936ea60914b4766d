"""Compiled parts of the loops of `ranks` that go through all elements, a tile at a time.

A tile holds the classes of TILE elements as bytes. The few classes that most of them have, a
window of classes next to each other, are counted by comparing all elements with each of them at
once; what is outside the window is counted one by one, and so is everything in tiles where that is
cheaper. Import it only from the loops.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

from stitch.codec.compiling import NUMPY_UINT
from stitch.codec.intrinsics import trailing_zeros
from stitch.codec.ranks.classes import F64_LOWEST
from stitch.codec.ranks.table import LANES, MAX_CLASSES
from stitch.codec.vectors import (
    GROUP,
    KINDS,
    MOST_GROUPS,
    TALLIES,
    one_bits,
    outside_bits,
    shift_to_bytes,
    tally,
)

TILE = 1 << 10
"""Elements whose classes are worked out at a time; they stay in the first-level cache."""
ROOM = TILE + GROUP
"""Bytes of a tile: a last group may be read beyond its end."""
assert TILE <= GROUP * MOST_GROUPS
assert TALLIES == LANES

NUM_KEYS = LANES * MAX_CLASSES
"""A key is a class and a lane: class + 256 * lane. Elements take turns at the lanes, so that those
of one class that follow each other do not wait for each other's counters."""

MANY_RANKED, MANY_PLACED = 48, 9
"""Changes of a tile from which on it is cheaper to go through its elements one by one: where the
changes are known, and where they are to be found."""

_LOW_BIT = np.uint32(1)
_EVERY_LANE = np.uint32(sum(1 << bit for bit in range(0, GROUP, LANES)))
_MOST_PASSES = 3
_PASS, _OUTSIDE, _ONE_BY_ONE = 1, 200, 9
"""What a pass costs for each element, what an element outside the window, and what one by one."""
_FEW_OUTSIDE = TILE >> 6
_AGAIN = 16
"""Tiles until a window that has turned out bad is chosen anew."""
_PATTERN = np.arange(TILE + LANES, dtype=np.uint16) % np.uint16(LANES) << np.uint16(8)
"""256 times the lane of one element after the other."""

FIRST, WIDTH, HOLD = range(3)
"""Of a window (3,): its first class, how many it has, and the tiles until it may be chosen anew."""


@register_jitable
def no_window():  # type: ignore[no-untyped-def]
    return np.zeros(3, np.int64)


def fill(word_bytes: int) -> Any:
    """(words, shift, mask, tile): the class of each word (n,), n <= TILE, as a byte of the tile."""
    word = NUMPY_UINT[word_bytes]
    if word_bytes < 8:

        @register_jitable
        def narrow(words, shift, mask, tile):  # type: ignore[no-untyped-def]
            groups = words.size // GROUP
            shift_to_bytes(words, shift, mask, groups, tile)
            for i in range(groups * GROUP, words.size):
                tile[i] = np.uint8(word(words[i] >> word(shift)) & word(mask))

        return narrow

    @register_jitable
    def wide(words, shift, mask, tile):  # type: ignore[no-untyped-def]
        for i in range(words.size):
            field = np.int64((words[i] >> shift) & mask) - F64_LOWEST
            if field < 0:
                field = np.int64(0)
            if field > MAX_CLASSES - 1:
                field = np.int64(MAX_CLASSES - 1)
            tile[i] = np.uint8(field)

    return wide


@register_jitable
def fill_keys(tile, size, phase, keys):  # type: ignore[no-untyped-def]
    """The key of each of the first `size` elements; element i is in lane (i + phase) % LANES."""
    lanes = _PATTERN[phase:]
    for i in range(size):
        keys[i] = np.uint16(tile[i]) | lanes[i]


@register_jitable
def key_at(tile, offset, phase):  # type: ignore[no-untyped-def]
    return np.int64(tile[offset]) | ((offset + phase) & (LANES - 1)) << 8


@register_jitable
def aim(tile, window):  # type: ignore[no-untyped-def]
    """Choose the window for tiles like this one, which must be full, if it is time to.

    A window without classes means that they had better be counted one by one.
    """
    if window[HOLD] > 0:
        window[HOLD] -= 1
        return
    counts = np.zeros(MAX_CLASSES, np.int64)
    for i in range(TILE):
        counts[tile[i]] += 1
    least = np.int64(_ONE_BY_ONE * TILE)
    window[FIRST], window[WIDTH], window[HOLD] = 0, 0, _AGAIN
    for passes in range(1, _MOST_PASSES + 1):
        width = KINDS * passes
        inside = np.int64(0)
        for kind in range(width):
            inside += counts[kind]
        most, first = inside, np.int64(0)
        for kind in range(width, MAX_CLASSES):
            inside += counts[kind] - counts[kind - width]
            if inside > most:
                most, first = inside, np.int64(kind - width + 1)
        cost = _PASS * passes * TILE + _OUTSIDE * (TILE - most)
        if cost < least:
            least = cost
            window[FIRST], window[WIDTH] = first, width


@register_jitable
def count_inside(tile, size, phase, window, counts):  # type: ignore[no-untyped-def]
    """Add the elements of classes of the window, in whole groups, to counts (NUM_KEYS,)."""
    for offset in range(0, window[WIDTH], KINDS):
        first = np.uint8(window[FIRST] + offset)
        tally(tile, size // GROUP, first, counts, MAX_CLASSES, phase)


@register_jitable
def bits_outside(tile, at, size, window):  # type: ignore[no-untyped-def]
    """Which of the GROUP elements from `at` on `count_inside` leaves out, of `size` in the tile."""
    if at + GROUP > size:
        return (_LOW_BIT << np.uint32(size - at)) - _LOW_BIT
    return outside_bits(tile, at, np.uint8(window[FIRST]), np.uint8(window[WIDTH]))


@register_jitable
def judge(num_outside, window):  # type: ignore[no-untyped-def]
    """Keep a window as long as few elements of the tiles are outside."""
    if num_outside <= _FEW_OUTSIDE:
        window[HOLD] = max(window[HOLD], 1)


@register_jitable
def lane_bits(phase, lane):  # type: ignore[no-untyped-def]
    """Which elements of a group are in a lane."""
    return _EVERY_LANE << np.uint32((lane - phase) & (LANES - 1))


@register_jitable
def below(bits, count):  # type: ignore[no-untyped-def]
    """The lowest `count` < 32 of the bits."""
    return bits & ((_LOW_BIT << np.uint32(count)) - _LOW_BIT)


@register_jitable
def lowest(bits):  # type: ignore[no-untyped-def]
    """The index of the lowest one bit; there must be one."""
    return np.int64(trailing_zeros(np.uint64(bits)))


@register_jitable
def without_lowest(bits):  # type: ignore[no-untyped-def]
    return bits & np.uint32(bits - _LOW_BIT)


@register_jitable
def how_many(bits):  # type: ignore[no-untyped-def]
    return np.int64(one_bits(np.uint32(bits)))
