"""Compiled loops that read whole bodies of paired streams, and take the steps they tell of.

Import it only inside functions, of :mod:`stitch.codec.pairs` and of the encoding that takes the
steps. See docs/format.md, "Paired streams".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable

from stitch.codec.bins import LOWEST_STATE, STATES, TOKENS, TOTAL, num_tokens
from stitch.codec.compiling import UINT, compiled, inlined, input_array, output_array
from stitch.codec.loops import take_steps
from stitch.codec.pair_loops import OK as READ
from stitch.codec.pair_loops import fill_slots, read_changes
from stitch.codec.pairs import (
    BAD_PARTS,
    BAD_STEPS,
    BAD_WIDTHS,
    GAP_BITS,
    IMPOSSIBLE,
    MOST_FINE,
    MOST_SHIFT,
    OK,
    OTHER_COUNT,
    OUTSIDE,
    STEP_CLASSES,
    WIDE_STEP,
)

_num_tokens = register_jitable(num_tokens)


@cache
def read_body() -> Callable[..., Any]:
    """(data, body, positions, steps) -> OK, or why it is not the body of so many changes.

    `data` and `body`, a row, are as `pairs.opened` makes them. The changes go to positions (k,) and
    steps (k,).
    """

    def loop(data, body, positions, steps):  # type: ignore[no-untyped-def]
        start, end = body[0], body[1]
        shift, fine, last_class, last = body[2], body[3], body[4], body[5]
        states, num_words = body[6 : 6 + STATES], body[6 + STATES]
        if shift > MOST_SHIFT or fine > MOST_FINE or last_class >= STEP_CLASSES:
            return IMPOSSIBLE
        if last >= _num_tokens(GAP_BITS, fine) * (last_class + 1):
            return IMPOSSIBLE
        slots = np.empty(TOTAL, np.uint32)
        least = np.empty(TOKENS, np.uint32)
        sizes = np.empty(TOKENS, np.uint16)
        table_bytes = fill_slots(
            data[start:end], last + 1, last_class + 1, fine, slots, least, sizes
        )
        if table_bytes < 0:
            return BAD_WIDTHS
        start += table_bytes
        bits_start = start + 2 * num_words
        if bits_start > end or states.min() < LOWEST_STATE:
            return BAD_PARTS
        num_bits = 8 * (end - bits_start)
        if positions.size > num_bits:  # each change has at least one
            return OTHER_COUNT
        left = states.astype(np.uint64)
        words = data[start : bits_start + 2 * STATES].view(np.uint16)
        ends = np.zeros(3, np.uint64)
        address = np.uint64(data.ctypes.data) + np.uint64(bits_start)
        stream = words, address, np.uint64(num_bits)
        verdict = read_changes(slots, least, sizes, shift, stream, left, positions, steps, ends)
        used_words, used_bits = np.int64(ends[0]), np.int64(ends[1])
        if verdict != READ or used_words != num_words or (used_bits + 7) // 8 != num_bits // 8:
            return OTHER_COUNT
        spare = used_bits % 8
        if spare and np.int64(data[end - 1]) >> spare:
            return OTHER_COUNT
        for i in range(STATES):
            if left[i] != np.uint64(LOWEST_STATE):
                return OTHER_COUNT
        return WIDE_STEP if ends[2] != np.uint64(0) else OK

    return compiled(
        loop,
        types.int64,
        input_array(types.uint8),
        input_array(types.int64),
        output_array(types.int64),
        output_array(types.int16),
    )


@cache
def take_changes(word_bytes: int, ordered: bool) -> Callable[..., Any]:
    """(data, bodies, buckets, places, positions, steps, olds, news, gains, ends, found) -> number.

    Reads bodies, n rows, one after another and takes their steps, as `loops.take_steps` does, and
    returns how many were OK before one was not: found (2,) says why, and the position
    that is OUTSIDE or the number of BAD_STEPS. buckets (n, 3): the changes, slices and elements of
    each. places (m, 4) are those of all slices; what they gain goes to gains (m, 2), where each
    one's positions end to ends (m,).
    """
    read_one, take = inlined(read_body()), inlined(take_steps(word_bytes, ordered))

    def loop(data, bodies, buckets, places, positions, steps, olds, news, gains, ends, found):  # type: ignore[no-untyped-def]
        lo, row = np.int64(0), np.int64(0)
        for i in range(bodies.shape[0]):
            hi, last_row = lo + buckets[i, 0], row + buckets[i, 1]
            here = positions[lo:hi]
            found[0] = read_one(data, bodies[i], here, steps[lo:hi])
            if found[0] != OK:
                return i
            if here[here.size - 1] >= buckets[i, 2]:
                found[0], found[1] = OUTSIDE, here[here.size - 1]
                return i
            bad = take(
                places[row:last_row], here, steps[lo:hi], olds[lo:hi], news[lo:hi],
                gains[row:last_row], ends[row:last_row],
            )  # fmt: skip
            if bad != 0:
                found[0], found[1] = BAD_STEPS, bad
                return i
            for j in range(row, last_row):
                ends[j] += lo
            lo, row = hi, last_row
        return bodies.shape[0]

    words = output_array(UINT[word_bytes])
    return compiled(
        loop,
        types.int64,
        input_array(types.uint8),
        input_array(types.int64, 2),
        input_array(types.int64, 2),
        input_array(types.int64, 2),
        output_array(types.int64),
        output_array(types.int16),
        words,
        words,
        output_array(types.uint64, 2),
        output_array(types.int64),
        output_array(types.int64),
    )
