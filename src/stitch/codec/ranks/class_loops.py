"""Compiled loops between the classes of a bucket (gaps, values, flips) and symbols and raw bits.

Import it only through :mod:`stitch.codec.ranks.kernels`. See docs/format.md, "ranks".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable

from stitch.codec.compiling import compiled, input_array, output_array
from stitch.codec.ranks.coder_loops import (
    LOWEST_STATE,
    STATE,
    SYMBOLS,
    WORD,
    guess,
    read_run,
    write_run,
)
from stitch.codec.ranks.table import (
    BASE,
    CHANGED,
    CODED,
    DOWN,
    FLIPS,
    GAP_SHIFT,
    MORE,
    RATIO,
    VALUE_SHIFT,
)

DIRECT = 7
"""Quotients of magnitudes that have a symbol of their own, for each sign."""
LONGEST = 62
"""The length of an escaped quotient is at most this."""

OK, WRONG_BITS, WRONG_STATES, BAD_GAP, BAD_VALUE = range(5)
"""What `decode` returns."""

_GAPS, _FLIPS, _KEPT, _TURNED, _LENGTHS = range(5)
"""Models: gaps, whether the sign flips, values whose sign stays, those whose sign flips, lengths of
escaped quotients."""
_MODELS = 5
_HIGHEST = np.uint64(1 << 63)


@register_jitable
def _append(bits, at, value, size):  # type: ignore[no-untyped-def]
    """Write the `size` low bits of `value` at bit `at` of zeroed `bits`; returns the next bit."""
    if size > 0:
        word = np.uint64(at) >> np.uint64(6)
        offset = np.uint64(at & 63)
        bits[word] |= value << offset
        if (at & 63) + size > 64:
            bits[word + np.uint64(1)] |= value >> (np.uint64(64) - offset)
    return at + size


@register_jitable
def _take(bits, num_bits, at, size):  # type: ignore[no-untyped-def]
    """`size` bits (up to 63) from bit `at` on; past the end come zeros."""
    if size == 0 or at + size > num_bits:
        return np.uint64(0)
    word = np.uint64(at) >> np.uint64(6)
    offset = np.uint64(at & 63)
    value = bits[word] >> offset
    if (at & 63) + size > 64:
        value |= bits[word + np.uint64(1)] << (np.uint64(64) - offset)
    return value & ((np.uint64(1) << np.uint64(size)) - np.uint64(1))


@register_jitable
def _split_gaps(gaps, shift, symbols, bits, bit):  # type: ignore[no-untyped-def]
    """Symbols and low bits of gaps (g,); returns (symbols, next bit)."""
    mask = (np.uint64(1) << np.uint64(shift)) - np.uint64(1)
    count = 0
    for i in range(gaps.size):
        gap = np.uint64(gaps[i])
        bit = _append(bits, bit, gap & mask, shift)
        quotient = gap >> np.uint64(shift)
        while quotient >= np.uint64(MORE):
            symbols[count] = MORE
            count += 1
            quotient -= np.uint64(MORE)
        symbols[count] = quotient
        count += 1
    return count, bit


@register_jitable
def _split_values(values, flips, row, kept, turned, lengths, bits, bit):  # type: ignore[no-untyped-def]
    """Symbols and low bits of values (k,); returns (kept, turned, lengths, next bit)."""
    shift = row[VALUE_SHIFT]
    mask = (np.uint64(1) << np.uint64(shift)) - np.uint64(1)
    base = np.uint64(row[BASE])
    num_kept = 0
    num_turned = 0
    num_lengths = 0
    for i in range(values.size):
        value = values[i]
        negative = np.uint64(value < 0)
        size = np.uint64(-value) if value < 0 else np.uint64(value)
        size = base - size if row[DOWN] else size - base
        quotient = size >> np.uint64(shift)
        symbol = min(quotient, np.uint64(DIRECT)) * np.uint64(2) + negative
        if flips[i]:
            turned[num_turned] = symbol
            num_turned += 1
        else:
            kept[num_kept] = symbol
            num_kept += 1
        if quotient >= np.uint64(DIRECT):
            rest = quotient - np.uint64(DIRECT - 1)
            length = 0
            while rest >> np.uint64(length + 1) != 0:
                length += 1
            lengths[num_lengths] = min(length, MORE)
            num_lengths += 1
            if length >= MORE:
                bit = _append(bits, bit, np.uint64(length - MORE), 6)
            bit = _append(bits, bit, rest ^ (np.uint64(1) << np.uint64(length)), length)
        bit = _append(bits, bit, size & mask, shift)
    return num_kept, num_turned, num_lengths, bit


@cache
def encode() -> Callable[..., Any]:
    """(table, gaps, values, flips, symbols, lows, widths, bits, used).

    `gaps`, `values` and `flips` lie class by class, as in the table. `lows` and `widths` (uint16)
    get the interval of each symbol, `bits` (zeroed uint64) the raw bits, `used` (2,) how many there
    are of each. `symbols` (4, n) is scratch, as wide as the longest run of a class.
    """

    def loop(table, gaps, values, flips, symbols, lows, widths, bits, used):  # type: ignore[no-untyped-def]
        counts = np.ones((_MODELS, SYMBOLS), np.int64)
        done = 0
        bit = 0
        gap_at = 0
        value_at = 0
        for r in range(table.shape[0]):
            row = table[r]
            guess(counts[_GAPS], row[RATIO])
            gap_end = gap_at + row[CODED]
            size, bit = _split_gaps(gaps[gap_at:gap_end], row[GAP_SHIFT], symbols[0], bits, bit)
            write_run(counts[_GAPS], symbols[0, :size], lows[done:], widths[done:])
            done += size
            gap_at = gap_end
            value_end = value_at + row[CHANGED]
            flip = flips[value_at:value_end]
            if row[FLIPS]:
                write_run(counts[_FLIPS], flip, lows[done:], widths[done:])
                done += flip.size
            num_kept, num_turned, num_lengths, bit = _split_values(
                values[value_at:value_end],
                flip,
                row,
                symbols[1],
                symbols[2],
                symbols[3],
                bits,
                bit,
            )
            write_run(counts[_KEPT], symbols[1, :num_kept], lows[done:], widths[done:])
            done += num_kept
            write_run(counts[_TURNED], symbols[2, :num_turned], lows[done:], widths[done:])
            done += num_turned
            write_run(counts[_LENGTHS], symbols[3, :num_lengths], lows[done:], widths[done:])
            done += num_lengths
            value_at = value_end
        used[0] = done
        used[1] = bit

    return compiled(
        loop,
        types.void,
        input_array(types.int64, 2),
        input_array(types.uint32),
        input_array(types.int64),
        input_array(types.uint8),
        output_array(types.uint8, 2),
        output_array(types.uint16),
        output_array(types.uint16),
        output_array(types.uint64),
        output_array(types.int64),
    )


@register_jitable
def _join_gaps(symbols, shift, limit, bits, num_bits, bit, gaps):  # type: ignore[no-untyped-def]
    """The inverse of `_split_gaps` into gaps (g,); returns the next bit, -1 for an endless gap."""
    at = 0
    for i in range(gaps.size):
        quotient = 0
        while at < symbols.size and symbols[at] == MORE:
            quotient += MORE
            at += 1
        if at == symbols.size:
            return -1
        quotient += symbols[at]
        at += 1
        if quotient << shift >= limit:
            return -1
        gaps[i] = (np.uint64(quotient) << np.uint64(shift)) | _take(bits, num_bits, bit, shift)
        bit += shift
    return bit


@register_jitable
def _join_values(flips, kept, turned, lengths, row, bits, num_bits, bit, values):  # type: ignore[no-untyped-def]
    """The inverse of `_split_values` into values (k,); returns the next bit, -1 for a bad one."""
    shift = row[VALUE_SHIFT]
    base = np.uint64(row[BASE])
    most = _HIGHEST >> np.uint64(shift)
    kept_at = 0
    turned_at = 0
    length_at = 0
    for i in range(values.size):
        if flips[i]:
            symbol = turned[turned_at]
            turned_at += 1
        else:
            symbol = kept[kept_at]
            kept_at += 1
        negative = symbol & 1
        quotient = np.uint64(symbol >> 1)
        if quotient == np.uint64(DIRECT):
            length = np.int64(lengths[length_at])
            length_at += 1
            if length == MORE:
                length += np.int64(_take(bits, num_bits, bit, 6))
                bit += 6
                if length > LONGEST:
                    return -1
            lead = np.uint64(1) << np.uint64(length)
            quotient = (lead | _take(bits, num_bits, bit, length)) + np.uint64(DIRECT - 1)
            bit += length
        if quotient > most:
            return -1
        size = (quotient << np.uint64(shift)) | _take(bits, num_bits, bit, shift)
        bit += shift
        if row[DOWN]:
            if size > base:
                return -1
            size = base - size
        else:
            if size > _HIGHEST - base:
                return -1
            size += base
        if size == _HIGHEST and not negative:
            return -1
        if size == np.uint64(0) and (negative or not flips[i]):
            return -1
        values[i] = -np.int64(size) if negative else np.int64(size)
    return bit


@register_jitable
def _count_escapes(symbols):  # type: ignore[no-untyped-def]
    count = 0
    for i in range(symbols.size):
        count += symbols[i] >= 2 * DIRECT
    return count


@cache
def decode() -> Callable[..., Any]:
    """(table, limit, stream, bits, num_bits, symbols, gaps, values, flips) -> how it went.

    The inverse of `encode` and `fold`. Every row of the table has been checked; `gaps` (u32),
    `values` (i64) and `flips` (u8) are as long as it says, and none is written beyond. `limit`:
    elements of the bucket. Whatever `stream` (2 words at least) and `bits` hold, the work is
    bounded by these. `symbols` (4, n) is scratch, as for `encode`.
    """

    def loop(table, limit, stream, bits, num_bits, symbols, gaps, values, flips):  # type: ignore[no-untyped-def]
        counts = np.ones((_MODELS, SYMBOLS), np.int64)
        registers = np.empty(2, np.uint64)
        registers[STATE] = np.uint64(stream[0]) | (np.uint64(stream[1]) << np.uint64(16))
        registers[WORD] = 2
        bit = 0
        gap_at = 0
        value_at = 0
        for r in range(table.shape[0]):
            row = table[r]
            guess(counts[_GAPS], row[RATIO])
            gap_end = gap_at + row[CODED]
            size = read_run(counts[_GAPS], stream, registers, row[CODED], MORE, symbols[0])
            bit = _join_gaps(
                symbols[0, :size], row[GAP_SHIFT], limit, bits, num_bits, bit, gaps[gap_at:gap_end]
            )
            if bit < 0:
                return BAD_GAP
            gap_at = gap_end
            value_end = value_at + row[CHANGED]
            flip = flips[value_at:value_end]
            num_turned = 0
            flip[:] = 0
            if row[FLIPS]:
                read_run(counts[_FLIPS], stream, registers, flip.size, SYMBOLS, flip)
                for i in range(flip.size):
                    if flip[i] > 1:
                        return BAD_VALUE
                    num_turned += flip[i]
            kept = symbols[1, : flip.size - num_turned]
            turned = symbols[2, :num_turned]
            read_run(counts[_KEPT], stream, registers, kept.size, SYMBOLS, kept)
            read_run(counts[_TURNED], stream, registers, turned.size, SYMBOLS, turned)
            lengths = symbols[3, : _count_escapes(kept) + _count_escapes(turned)]
            read_run(counts[_LENGTHS], stream, registers, lengths.size, SYMBOLS, lengths)
            bit = _join_values(
                flip, kept, turned, lengths, row, bits, num_bits, bit, values[value_at:value_end]
            )
            if bit < 0:
                return BAD_VALUE
            value_at = value_end
        if registers[STATE] != LOWEST_STATE or registers[WORD] != np.uint64(stream.size):
            return WRONG_STATES
        spare = num_bits - bit
        if spare < 0 or spare >= 8 or _take(bits, num_bits, bit, spare) != 0:
            return WRONG_BITS
        return OK

    return compiled(
        loop,
        types.int64,
        input_array(types.int64, 2),
        types.int64,
        input_array(types.uint16),
        input_array(types.uint64),
        types.int64,
        output_array(types.uint8, 2),
        output_array(types.uint32),
        output_array(types.int64),
        output_array(types.uint8),
    )
