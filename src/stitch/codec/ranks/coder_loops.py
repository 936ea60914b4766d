"""Compiled loops of the entropy coder: models of 16 symbols that learn, on rANS.

Import it only through :mod:`stitch.codec.ranks.kernels`. Symbols come in runs of one model, which
keeps what a run touches in registers. See docs/format.md, "The coder".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable

from stitch.codec.compiling import compiled, input_array, output_array

SYMBOLS = 16
TOTAL_BITS = 12
TOTAL = 1 << TOTAL_BITS
LOWEST_STATE = 1 << 16
"""A state between symbols is in [LOWEST_STATE, 2^32)."""

STEP = 2
"""What a symbol adds to its count."""
SHORTEST_PERIOD, LONGEST_PERIOD = 8, 256
"""Symbols between two renewals of the intervals: it doubles from the one to the other."""
MOST, MOST_AT_START = 8192, 80
"""Counts are halved at a renewal, and when a run begins, while their sum is above this."""

GUESS_WEIGHT = 64
"""Sum of the counts that a first guess of a distribution amounts to."""

STATE, WORD = 0, 1
"""Registers of a reader: the state, and the next word of its stream."""


@register_jitable
def _renew(counts, starts, most):  # type: ignore[no-untyped-def]
    """Intervals from counts (16,), halved before that until their sum is at most `most`.

    Symbol s gets [starts[s], starts[s + 1]).
    """
    while True:
        total = np.uint64(0)
        for s in range(SYMBOLS):
            total += np.uint64(counts[s])
        if total <= np.uint64(most):
            break
        for s in range(SYMBOLS):
            counts[s] = (counts[s] + 1) >> 1
    best = 0
    used = 0
    for s in range(SYMBOLS):
        starts[s + 1] = 1 + np.int64(np.uint64(counts[s] * (TOTAL - SYMBOLS)) // total)
        used += starts[s + 1]
        if counts[s] > counts[best]:
            best = s
    starts[best + 1] += TOTAL - used
    starts[0] = 0
    for s in range(SYMBOLS):
        starts[s + 1] += starts[s]


@register_jitable
def guess(counts, ratio):  # type: ignore[no-untyped-def]
    """Counts (16,) as if symbol s + 1 were ratio / 65536 times as likely as s."""
    above = 65536
    for s in range(SYMBOLS):
        after = (above * ratio) >> 16 if s < SYMBOLS - 1 else 0
        counts[s] = 1 + (((above - after) * GUESS_WEIGHT) >> 16)
        above = after


@register_jitable
def write_run(counts, symbols, lows, widths):  # type: ignore[no-untyped-def]
    """A run of one model.

    `lows` and `widths` (n,) uint16 get the interval of each symbol (n,) uint8. `counts` (16,)
    learn.
    """
    starts = np.empty(SYMBOLS + 1, np.int64)
    period = SHORTEST_PERIOD
    most = MOST_AT_START
    begin = 0
    while begin < symbols.size:
        _renew(counts, starts, most)
        most = MOST
        block = symbols[begin : begin + period]
        low = lows[begin : begin + period]
        width = widths[begin : begin + period]
        for i in range(block.size):
            symbol = block[i]
            low[i] = starts[symbol]
            width[i] = starts[symbol + np.uint8(1)] - starts[symbol]
        for i in range(block.size):
            counts[block[i]] += STEP
        begin += period
        period = min(2 * period, LONGEST_PERIOD)


@cache
def fold() -> Callable[..., Any]:
    """(lows, widths, out) -> first: rANS over intervals (n,), from the last to the first.

    `out` (n + 2,) uint16 is filled from its end; the stream is out[first:].
    """

    def loop(lows, widths, out):  # type: ignore[no-untyped-def]
        state = np.uint64(LOWEST_STATE)
        first = out.size
        for at in range(lows.size - 1, -1, -1):
            width = np.uint64(widths[at])
            if state >= width << np.uint64(32 - TOTAL_BITS):
                first -= 1
                out[first] = np.uint16(state & np.uint64(0xFFFF))
                state >>= np.uint64(16)
            turns = np.uint64(np.uint32(state) // np.uint32(width))
            state += turns * (np.uint64(TOTAL) - width) + np.uint64(lows[at])
        out[first - 1] = np.uint16(state >> np.uint64(16))
        out[first - 2] = np.uint16(state & np.uint64(0xFFFF))
        return first - 2

    return compiled(
        loop,
        types.int64,
        input_array(types.uint16),
        input_array(types.uint16),
        output_array(types.uint16),
    )


@register_jitable
def read_run(counts, stream, registers, wanted, more, symbols):  # type: ignore[no-untyped-def]
    """Read until `wanted` symbols other than `more` have come or `symbols` (uint8) are full.

    Returns how many were read. Past the end of `stream` (uint16) come zeros; the registers tell.
    """
    starts = np.empty(SYMBOLS + 1, np.int64)
    slots = np.empty(TOTAL, np.uint8)
    state = registers[STATE]
    word = registers[WORD]
    end = np.uint64(stream.size)
    period = SHORTEST_PERIOD
    most = MOST_AT_START
    begin = 0
    while wanted > 0 and begin < symbols.size:
        _renew(counts, starts, most)
        most = MOST
        for s in range(SYMBOLS):
            slots[starts[s] : starts[s + 1]] = s
        block = symbols[begin : begin + period]
        size = 0
        while size < block.size and wanted > 0:
            place = state & np.uint64(TOTAL - 1)
            symbol = slots[place]
            low = np.uint64(starts[symbol])
            width = np.uint64(starts[symbol + np.uint8(1)]) - low
            state = width * (state >> np.uint64(TOTAL_BITS)) + (place - low)
            if state < np.uint64(LOWEST_STATE):
                state <<= np.uint64(16)
                if word < end:
                    state |= np.uint64(stream[word])
                word += np.uint64(1)
            block[size] = symbol
            size += 1
            wanted -= symbol != more
        for i in range(size):
            counts[block[i]] += STEP
        begin += size
        period = min(2 * period, LONGEST_PERIOD)
    registers[STATE] = state
    registers[WORD] = word
    return begin
