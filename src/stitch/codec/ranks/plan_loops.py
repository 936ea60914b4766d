"""Compiled loops that prepare the changes of a bucket for coding, class by class.

Import it only through :mod:`stitch.codec.ranks.kernels`. What they choose is the writer's business:
a reader takes any valid table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable

from stitch.codec.compiling import compiled, input_array, output_array
from stitch.codec.ranks.class_loops import DIRECT
from stitch.codec.ranks.table import (
    BASE,
    CHANGED,
    CODED,
    DOWN,
    ESCAPES,
    FLIPS,
    GAP_SHIFT,
    ID,
    INVERTED,
    LANE_CHANGED,
    LANE_CODED,
    LANES,
    LOWEST_RATIO,
    MAX_BASE,
    MAX_CLASSES,
    MAX_GAP_SHIFT,
    MAX_VALUE_SHIFT,
    RATIO,
    RATIO_STEP,
    RATIOS,
    VALUE_SHIFT,
)

_LANE_CHANGED, _LANE_CODED = LANE_CHANGED.start, LANE_CODED.start
_COMMON = 26214
"""65536ths: gaps keep as many low bits as leave less than this for the first symbol."""


@cache
def group() -> Callable[..., Any]:
    """(keys, ranks, values, flips, starts, ranks_out, values_out, flips_out).

    Sorts by key, otherwise keeping the order. `starts` (keys,): where each key begins; used up.
    """

    def loop(keys, ranks, values, flips, starts, ranks_out, values_out, flips_out):  # type: ignore[no-untyped-def]
        for i in range(keys.size):
            key = keys[i]
            to = np.uint64(starts[key])
            starts[key] += 1
            ranks_out[to] = ranks[i]
            values_out[to] = values[i]
            flips_out[to] = flips[i]

    return compiled(
        loop,
        types.void,
        input_array(types.uint16),
        input_array(types.uint32),
        input_array(types.int64),
        input_array(types.uint8),
        output_array(types.int64),
        output_array(types.uint32),
        output_array(types.int64),
        output_array(types.uint8),
    )


@register_jitable
def _gaps_of(ranks, gaps):  # type: ignore[no-untyped-def]
    """How many words of the class come between the ranked ones."""
    follows = np.uint32(0)
    for i in range(ranks.size):
        gaps[i] = np.uint32(ranks[i] - follows)
        follows = np.uint32(ranks[i] + np.uint32(1))
    return ranks.size


@register_jitable
def _gaps_between(ranks, size, gaps):  # type: ignore[no-untyped-def]
    """How many ranked words come before each of the others; `size`: words of the class."""
    count = 0
    run = np.uint32(0)
    at = 0
    for word in range(size):
        if at < ranks.size and ranks[at] == word:
            at += 1
            run += np.uint32(1)
        else:
            gaps[count] = run
            run = np.uint32(0)
            count += 1
    return count


@register_jitable
def _guess_gaps(row, size):  # type: ignore[no-untyped-def]
    """Low bits and ratio for `row[CODED]` gaps among `size` words, as if they lay at random."""
    ratio = ((size - row[CODED]) << 16) // size
    shift = 0
    while shift < MAX_GAP_SHIFT:
        after = (ratio * ratio) >> 16
        if 65536 - after >= _COMMON:
            break
        ratio = after
        shift += 1
    step = (ratio - LOWEST_RATIO + RATIO_STEP // 2) // RATIO_STEP
    row[GAP_SHIFT] = shift
    row[RATIO] = LOWEST_RATIO + RATIO_STEP * min(max(step, 0), RATIOS - 1)


@register_jitable
def _length(number):  # type: ignore[no-untyped-def]
    """Bits of an unsigned integer."""
    length = 0
    while number != np.uint64(0):
        number >>= np.uint64(1)
        length += 1
    return length


@register_jitable
def _fit_values(row, values, flips):  # type: ignore[no-untyped-def]
    """Base, direction and low bits of magnitudes (k,)."""
    lowest = np.uint64(0xFFFFFFFFFFFFFFFF)
    highest = np.uint64(0)
    turned = False
    for i in range(values.size):
        size = np.uint64(-values[i]) if values[i] < 0 else np.uint64(values[i])
        lowest = min(lowest, size)
        highest = max(highest, size)
        turned |= flips[i] != 0
    lowest = min(lowest, np.uint64(MAX_BASE))
    up = np.zeros(65, np.int64)
    down = np.zeros(65, np.int64)
    for i in range(values.size):
        size = np.uint64(-values[i]) if values[i] < 0 else np.uint64(values[i])
        up[_length(size - lowest)] += 1
        down[_length(highest - size)] += 1
    bits_up = np.int64(0)
    bits_down = np.int64(0)
    for length in range(65):
        bits_up += up[length] * length
        bits_down += down[length] * length
    reverse = bits_down < bits_up and highest <= np.uint64(MAX_BASE)
    lengths = down if reverse else up
    base = highest if reverse else lowest
    # The count of magnitudes that certainly are escaped with so many low bits, then the true one.
    shift = 0
    longer = np.int64(0)
    for length in range(4, 65):
        longer += lengths[length]
    while shift < MAX_VALUE_SHIFT and longer * ESCAPES > values.size:
        shift += 1
        longer -= lengths[shift + 3]
    while shift < MAX_VALUE_SHIFT:
        escaped = np.int64(0)
        for i in range(values.size):
            size = np.uint64(-values[i]) if values[i] < 0 else np.uint64(values[i])
            size = base - size if reverse else size - base
            escaped += (size >> np.uint64(shift)) >= np.uint64(DIRECT)
        if escaped * ESCAPES <= values.size:
            break
        shift += 1
    row[FLIPS] = turned
    row[DOWN] = reverse
    row[BASE] = np.int64(base)
    row[VALUE_SHIFT] = shift


@cache
def plan() -> Callable[..., Any]:
    """(totals, changed, ranks, values, flips, table, gaps) -> rows.

    `totals`, `changed` (256, LANES): words and changed words of each class, by lane. `ranks`,
    `values`, `flips` (k,) lie class by class, and lane by lane there. `table` (256, COLUMNS) gets a
    row for each class with changes, `gaps` the gaps in the same order; there are at most k of them.
    """

    def loop(totals, changed, ranks, values, flips, table, gaps):  # type: ignore[no-untyped-def]
        rows = 0
        at = np.int64(0)
        gap_at = 0
        for cls in range(MAX_CLASSES):
            count = np.int64(0)
            size = np.int64(0)
            for lane in range(LANES):
                count += changed[cls, lane]
                size += totals[cls, lane]
            if count == 0:
                continue
            row = table[rows]
            rows += 1
            row[ID] = cls
            row[CHANGED] = count
            row[INVERTED] = 2 * count > size
            begin = at
            for lane in range(LANES):
                end = begin + changed[cls, lane]
                if row[INVERTED]:
                    coded = _gaps_between(ranks[begin:end], totals[cls, lane], gaps[gap_at:])
                else:
                    coded = _gaps_of(ranks[begin:end], gaps[gap_at:])
                row[_LANE_CHANGED + lane] = end - begin
                row[_LANE_CODED + lane] = coded
                row[CODED] += coded
                gap_at += coded
                begin = end
            _guess_gaps(row, size)
            _fit_values(row, values[at : at + count], flips[at : at + count])
            at += count
        return rows

    return compiled(
        loop,
        types.int64,
        input_array(types.int64, 2),
        input_array(types.int64, 2),
        input_array(types.uint32),
        input_array(types.int64),
        input_array(types.uint8),
        output_array(types.int64, 2),
        output_array(types.uint32),
    )
