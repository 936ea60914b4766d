"""Compiled loops of `ranks`: from positions to ranks inside classes, and back.

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
from stitch.codec.ranks.classes import F64_LOWEST
from stitch.codec.ranks.table import INVERTED, LANE_CHANGED, LANE_CODED, LANES, MAX_CLASSES

_LANE_CHANGED, _LANE_CODED = LANE_CHANGED.start, LANE_CODED.start
_TILE = 1 << 12
"""Elements whose keys are worked out at a time; they stay in the first-level cache."""
_UNROLLED = 8
_ONE = np.uint32(1)
_NEVER = np.uint32(0xFFFFFFFF)
"""More elements of a class than a bucket can hold."""

NUM_KEYS = LANES * MAX_CLASSES
"""A key is a class and a lane: class + 256 * lane. Elements take turns at the lanes, so that those
of one class that follow each other do not wait for each other's counters."""
NO_KEY = NUM_KEYS
"""What fills up a last group of elements: nothing ever happens there."""

_PATTERN = np.arange(_TILE + LANES, dtype=np.uint16) % np.uint16(LANES) << np.uint16(8)
"""256 times the lane of one element after the other."""

NO_WORD = -1
"""What `place_words` returns when a value leads to a word that does not exist."""


def _key(word_bytes: int) -> Any:
    """(words, shift, mask, phase, out): the key of each word (n,); word i is in lane i + phase."""
    word = NUMPY_UINT[word_bytes]
    if word_bytes < 8:

        @register_jitable
        def narrow(words, shift, mask, phase, out):  # type: ignore[no-untyped-def]
            shift, mask = word(shift), word(mask)
            lanes = _PATTERN[phase & (LANES - 1) :]
            for i in range(words.size):
                # Narrow at every step, so that as many as possible fit a vector register.
                out[i] = np.uint16(np.uint16(word(words[i] >> shift) & mask) | lanes[i])

        return narrow

    @register_jitable
    def wide(words, shift, mask, phase, out):  # type: ignore[no-untyped-def]
        lanes = _PATTERN[phase & (LANES - 1) :]
        for i in range(words.size):
            field = np.int64((words[i] >> shift) & mask) - F64_LOWEST
            if field < 0:
                field = np.int64(0)
            if field > MAX_CLASSES - 1:
                field = np.int64(MAX_CLASSES - 1)
            out[i] = np.int64(lanes[i]) + field

    return wide


@register_jitable
def _count(keys, counts):  # type: ignore[no-untyped-def]
    for key in keys:
        counts[key] += _ONE


@cache
def rank_words(word_bytes: int) -> Callable[..., Any]:
    """(words, shift, mask, positions, origin, counts, ranks, keys).

    `positions` (k,) ascend and lie in [origin, origin + n). For each, its key and how many words
    of the key came before it go to `keys` and `ranks` (k,). `counts` (NUM_KEYS,) hold the words of
    each key seen so far.
    """
    key_of = _key(word_bytes)

    def loop(words, shift, mask, positions, origin, counts, ranks, keys):  # type: ignore[no-untyped-def]
        tile = np.empty(_TILE, np.uint16)
        at = 0
        for start in range(0, words.size, _TILE):
            piece = words[start : start + _TILE]
            key_of(piece, shift, mask, origin + start, tile)
            done = 0
            while at < positions.size and positions[at] - origin - start < piece.size:
                stop = positions[at] - origin - start
                _count(tile[done:stop], counts)
                key = tile[stop]
                ranks[at] = counts[key]
                keys[at] = key
                at += 1
                done = stop
            _count(tile[done : piece.size], counts)

    return compiled(
        loop,
        types.void,
        input_array(UINT[word_bytes]),
        types.uint64,
        types.uint64,
        input_array(types.int64),
        types.int64,
        output_array(types.uint32),
        output_array(types.uint32),
        output_array(types.uint16),
    )


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


@cache
def place_words(word_bytes: int, class_bytes: int, ordered: bool) -> Callable[..., Any]:
    """(words, class words, shift, mask, origin, waits, now, next, stop, values, flips, found,
    positions, old, new) -> found, or NO_WORD.

    The inverse of `rank_words`. `waits` (k,): how many words of its key come before each changed
    one. `now` (NUM_KEYS + 1,): the same for the next one of each key; `next`, `stop` (NUM_KEYS,):
    where that is in `waits`, and where the key's end; state between calls. From entry `found` on,
    `positions`, `old` and `new` get the changed elements. `ordered`: words are sign and magnitude.
    """
    key_of, move = _key(class_bytes), _move(word_bytes, ordered)

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
        tile = np.empty(_TILE + _UNROLLED, np.uint16)
        hits = np.empty(_TILE + _UNROLLED, np.int64)
        hit_values = np.empty(_TILE + _UNROLLED, np.int64)
        for start in range(0, words.size, _TILE):
            piece = words[start : start + _TILE]
            key_of(class_words[start : start + _TILE], shift, mask, origin + start, tile)
            tile[piece.size : piece.size + _UNROLLED] = NO_KEY
            count = 0
            # So little happens at a hit that this loop can be unrolled.
            for group in range(0, piece.size, _UNROLLED):
                eight = tile[group : group + _UNROLLED]
                for j in range(_UNROLLED):
                    key = eight[j]
                    wait = now[key]
                    now[key] = np.uint32(wait - _ONE)
                    if wait == 0:
                        hits[count] = group + j
                        at = following[key]
                        hit_values[count] = at
                        count += 1
                        at += 1
                        following[key] = at
                        now[key] = waits[at] if at < stop[key] else _NEVER
            for i in range(count):
                word = piece[hits[i]]
                at = hit_values[i]
                moved, exists = move(word, values[at], flips[at])
                if not exists:
                    return NO_WORD
                positions[found] = origin + start + hits[i]
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


@cache
def spread_blocks() -> Callable[..., Any]:
    """(blocks, (per row, row words, rows, words), (row, column, skipped), classes).

    Fills `classes` (n,), from a column of a row on, with the value of each element's block of
    `rows` by `words` in rows of `row words`. `blocks` hold whole rows of `per row` values, from the
    one with that row on; only if all is one row may the `skipped` first values be missing.
    """

    def loop(blocks, shape, place, classes):  # type: ignore[no-untyped-def]
        per_row, row_words, rows, words = shape
        row, column, skipped = place
        base = -skipped
        at = 0
        while at < classes.size:
            stop = min(classes.size, at + row_words - column)
            block = base + column // words
            left = words - column % words
            while at < stop:
                run = min(left, stop - at)
                classes[at : at + run] = blocks[block]
                at += run
                block += 1
                left = words
            column = 0
            row += 1
            if row == rows:
                row = 0
                base += per_row

    return compiled(
        loop,
        types.void,
        input_array(types.uint8),
        types.UniTuple(types.int64, 4),
        types.UniTuple(types.int64, 3),
        output_array(types.uint8),
    )
