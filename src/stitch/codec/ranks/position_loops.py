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
from stitch.codec.ranks.table import MAX_CLASSES

_TILE = 1 << 14
"""Elements whose classes are worked out at a time; they stay in the first-level cache."""
_ONE = np.uint32(1)
_NEVER = np.uint32(0xFFFFFFFF)
"""More elements of a class than a bucket can hold."""


def _classify(word_bytes: int) -> Any:
    """(words, shift, mask, out): the class of each word (n,) to out (n,)."""
    word = NUMPY_UINT[word_bytes]
    if word_bytes < 8:

        @register_jitable
        def narrow(words, shift, mask, out):  # type: ignore[no-untyped-def]
            shift, mask = word(shift), word(mask)
            for i in range(words.size):
                out[i] = np.uint8((words[i] >> shift) & mask)

        return narrow

    @register_jitable
    def wide(words, shift, mask, out):  # type: ignore[no-untyped-def]
        for i in range(words.size):
            field = np.int64((words[i] >> shift) & mask) - F64_LOWEST
            out[i] = min(max(field, 0), MAX_CLASSES - 1)

    return wide


@register_jitable
def _count(classes, counts):  # type: ignore[no-untyped-def]
    """Count each class (n,) into counts (8, 256).

    Eight counters for each class, so that a run of one class does not wait for itself.
    """
    even = classes.size & ~7
    for i in range(0, even, 8):
        eight = classes[i : i + 8]
        for j in range(8):
            counts[j, eight[j]] += _ONE
    for cls in classes[even:]:
        counts[0, cls] += _ONE


@cache
def rank_words(word_bytes: int) -> Callable[..., Any]:
    """(words, shift, mask, positions, origin, counts, ranks, classes).

    `positions` (k,) ascend and lie in [origin, origin + n). For each, its class and how many words
    of the class came before it go to `classes` and `ranks` (k,). `counts` (8, 256), of which the
    sums over the first axis are meant, hold the words of each class seen so far.
    """
    classify = _classify(word_bytes)

    def loop(words, shift, mask, positions, origin, counts, ranks, classes):  # type: ignore[no-untyped-def]
        tile = np.empty(_TILE, np.uint8)
        at = 0
        for start in range(0, words.size, _TILE):
            piece = words[start : start + _TILE]
            classify(piece, shift, mask, tile)
            done = 0
            while at < positions.size and positions[at] - origin - start < piece.size:
                stop = positions[at] - origin - start
                _count(tile[done:stop], counts)
                cls = tile[stop]
                rank = np.uint32(0)
                for j in range(8):
                    rank += counts[j, cls]
                ranks[at] = rank
                classes[at] = cls
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
        output_array(types.uint32, 2),
        output_array(types.uint32),
        output_array(types.uint8),
    )


NEXT_GAP, GAPS_END, NEXT_VALUE, VALUES_END, INVERTED, RUN = range(6)
"""Rows of the cursors of `place_words`: where a class's next gap and value are, where they end,
whether its gaps lead to unchanged elements, and how many changed ones come before the next."""


@cache
def place_words(word_bytes: int) -> Callable[..., Any]:
    """(words, shift, mask, origin, gaps, cursors, waits, found, positions, order) -> found or -1.

    The inverse of `rank_words`. `cursors` (6, 256) as above and `waits` (256,): how many words of
    the class come before the next event, are the state between calls. From entry `found` on,
    `positions` gets the changed elements and `order` the index of each one's value. -1: a class
    has more changed elements than values.
    """
    classify = _classify(word_bytes)

    def loop(words, shift, mask, origin, gaps, cursors, waits, found, positions, order):  # type: ignore[no-untyped-def]
        tile = np.empty(_TILE, np.uint8)
        for start in range(0, words.size, _TILE):
            piece = words[start : start + _TILE]
            classify(piece, shift, mask, tile)
            for i in range(piece.size):
                cls = tile[i]
                wait = waits[cls]
                waits[cls] = np.uint32(wait - _ONE)
                if wait != 0:
                    continue
                if cursors[INVERTED, cls] != 0:
                    waits[cls] = np.uint32(0)
                    if cursors[RUN, cls] == 0:
                        gap = cursors[NEXT_GAP, cls] + 1
                        cursors[NEXT_GAP, cls] = gap
                        more = gap < cursors[GAPS_END, cls]
                        cursors[RUN, cls] = gaps[gap] if more else _NEVER
                        continue
                    cursors[RUN, cls] -= 1
                else:
                    gap = cursors[NEXT_GAP, cls] + 1
                    cursors[NEXT_GAP, cls] = gap
                    waits[cls] = gaps[gap] if gap < cursors[GAPS_END, cls] else _NEVER
                value = cursors[NEXT_VALUE, cls]
                if value == cursors[VALUES_END, cls]:
                    return -1
                cursors[NEXT_VALUE, cls] = value + 1
                positions[found] = origin + start + i
                order[found] = value
                found += 1
        return found

    return compiled(
        loop,
        types.int64,
        input_array(UINT[word_bytes]),
        types.uint64,
        types.uint64,
        types.int64,
        input_array(types.uint32),
        output_array(types.int64, 2),
        output_array(types.uint32),
        types.int64,
        output_array(types.int64),
        output_array(types.int64),
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
