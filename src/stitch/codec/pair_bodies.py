"""Compiled loops that read whole bodies of paired streams, and take the steps they tell of.

Import it only through :mod:`stitch.codec.pairs`. See docs/format.md, "Paired streams".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable

from stitch.codec.bins import LOWEST_STATE, STATES, TOKENS, TOTAL
from stitch.codec.compiling import UINT, compiled, inlined, input_array, output_array
from stitch.codec.loops import take_steps
from stitch.codec.pair_loops import OK as READ
from stitch.codec.pair_loops import fill_slots, read_changes
from stitch.codec.pairs import (
    BAD_PARTS,
    BAD_STEPS,
    BAD_WIDTHS,
    GAP_BITS,
    HEAD_BYTES,
    IMPOSSIBLE,
    MOST_FINE,
    MOST_SHIFT,
    OK,
    OTHER_COUNT,
    OUTSIDE,
    SHORT_HEAD,
    STEP_CLASSES,
    WIDE_STEP,
)

_STATES_AT, _WORDS_AT = 5, 5 + 4 * STATES
"""Bytes of the head before the states, and before the number of words."""


@register_jitable
def _number(data, at, size):  # type: ignore[no-untyped-def]
    """The little-endian number in `size` bytes."""
    number = np.int64(0)
    for byte in range(size):
        number |= np.int64(data[at + byte]) << (8 * byte)
    return number


@cache
def read_body() -> Callable[..., Any]:
    """(data, begin, end, positions, steps) -> OK, or why it is not the body of so many changes.

    The body is data[begin:end]; at least SPARE_BYTES follow it in `data`. The changes go to
    positions (k,) and steps (k,).
    """

    def loop(data, begin, end, positions, steps):  # type: ignore[no-untyped-def]
        if end - begin < HEAD_BYTES:
            return SHORT_HEAD
        shift, fine = np.int64(data[begin]), np.int64(data[begin + 1])
        last_class, last = np.int64(data[begin + 2]), _number(data, begin + 3, 2)
        if shift > MOST_SHIFT or fine > MOST_FINE or last_class >= STEP_CLASSES:
            return IMPOSSIBLE
        if last >= ((GAP_BITS + 1 - fine) << fine) * (last_class + 1):
            return IMPOSSIBLE
        slots = np.empty(TOTAL, np.uint32)
        least = np.empty(TOKENS, np.uint32)
        sizes = np.empty(TOKENS, np.uint16)
        start = begin + HEAD_BYTES
        table_bytes = fill_slots(
            data[start:end], last + 1, last_class + 1, fine, slots, least, sizes
        )
        if table_bytes < 0:
            return BAD_WIDTHS
        start += table_bytes
        num_words = _number(data, begin + _WORDS_AT, 4)
        bits_start = start + 2 * num_words
        left = np.empty(STATES, np.uint64)
        lowest = np.int64(LOWEST_STATE)
        for i in range(STATES):
            state = _number(data, begin + _STATES_AT + 4 * i, 4)
            left[i] = np.uint64(state)
            lowest = min(lowest, state)
        if bits_start > end or lowest < LOWEST_STATE:
            return BAD_PARTS
        num_bits = 8 * (end - bits_start)
        if positions.size > num_bits:  # each change has at least one
            return OTHER_COUNT
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
        types.int64,
        types.int64,
        output_array(types.int64),
        output_array(types.int16),
    )


@cache
def take_changes(word_bytes: int, ordered: bool) -> Callable[..., Any]:
    """(data, bodies, places, positions, steps, olds, news, gains, ends, found) -> how many are OK.

    Reads bodies one after another and takes their steps, as `loops.take_steps` does, and stops at
    the first that is not OK: found (2,) says why, and the position that is OUTSIDE or the number of
    BAD_STEPS. bodies (n, 5): where each begins and ends in `data`, see `read_body`, its changes,
    and the slices and elements of its bucket. places (m, 4) are those of all slices; what they gain
    goes to gains (m, 2), where each one's positions end to ends (m,).
    """
    body, take = inlined(read_body()), inlined(take_steps(word_bytes, ordered))

    def loop(data, bodies, places, positions, steps, olds, news, gains, ends, found):  # type: ignore[no-untyped-def]
        lo, row = np.int64(0), np.int64(0)
        for i in range(bodies.shape[0]):
            begin, end = bodies[i, 0], bodies[i, 1]
            hi, last_row = lo + bodies[i, 2], row + bodies[i, 3]
            here = positions[lo:hi]
            found[0] = body(data, begin, end, here, steps[lo:hi])
            if found[0] != OK:
                return i
            if here[here.size - 1] >= bodies[i, 4]:
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
        output_array(types.int64),
        output_array(types.int16),
        words,
        words,
        output_array(types.uint64, 2),
        output_array(types.int64),
        output_array(types.int64),
    )
