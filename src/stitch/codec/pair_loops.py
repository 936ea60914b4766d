"""The compiled loops of paired streams: a gap and a step as one token, and raw bits.

Import it only through :mod:`stitch.codec.pairs`. See docs/format.md, "Paired streams", for what
they write, and :mod:`stitch.codec.compiling` for how they are compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable

from stitch.codec.bin_loops import pop
from stitch.codec.bins import STATES, TOKENS, TOTAL
from stitch.codec.compiling import NUMPY_INT, NUMPY_UINT, UINT, compiled, input_array, output_array
from stitch.codec.intrinsics import leading_zeros, load_at, put_at
from stitch.codec.order_loops import order
from stitch.codec.pairs import LOG2_STEP_CLASSES

_ZERO, _ONE, _THREE, _SEVEN, _63 = (np.uint64(n) for n in (0, 1, 3, 7, 63))
_LOG2_CLASSES = np.uint64(LOG2_STEP_CLASSES)
_SIZE, _TOTAL_SHIFT = np.uint64(0xFF), np.uint64(8)

OK, SHORT = 0, 1
"""What `read` returns: all is well, or words or bits were too few."""


@cache
def union_of_steps(word_bytes: int) -> Callable[..., Any]:
    """(old, new) -> the bits that are set in any step from old to new words (k,)."""
    word, signed = NUMPY_UINT[word_bytes], NUMPY_INT[word_bytes]
    number, _ = order(word_bytes, True)

    def loop(old, new):  # type: ignore[no-untyped-def]
        union = np.int64(0)
        for k in range(old.size):
            union |= np.int64(signed(word(number(new[k]) - number(old[k]))))
        return union

    words = input_array(UINT[word_bytes])
    return compiled(loop, types.int64, words, words)


@cache
def tokenise(word_bytes: int) -> Callable[..., Any]:
    """(positions, old, new, fine, shift, cells, counts, address) -> bits.

    Of ascending `positions` (k,) and the words there, sign and magnitude, whose steps are multiples
    of 2^shift: the cell of each change goes to cells (k,), how often each occurs is added to counts
    (CELLS,), and the bits left over go to `address`, where 8 bytes more may be overwritten.
    """
    word, signed = NUMPY_UINT[word_bytes], NUMPY_INT[word_bytes]
    number, _ = order(word_bytes, True)

    def loop(positions, old, new, fine, shift, cells, counts, address):  # type: ignore[no-untyped-def]
        small = _ONE << fine
        before = np.int64(-1)
        to = address
        used = _ZERO
        held = _ZERO
        for k in range(positions.size):
            gap = np.uint64(positions[k] - before - 1)
            before = positions[k]
            # Below `small` the exponent is `fine` too, and the token is the gap.
            size = _63 - leading_zeros(gap | small) - fine
            token = (size << fine) + (gap >> size)
            step = np.int64(signed(word(number(new[k]) - number(old[k])))) >> shift
            twice = np.uint64(abs(step) << 1) | np.uint64(step < 0)
            bits = _63 - leading_zeros(twice)
            cell = (token << _LOG2_CLASSES) + bits - _ONE
            cells[k] = np.uint16(cell)
            counts[cell] += np.uint32(1)
            low = gap & ((_ONE << size) - _ONE)
            low |= (twice & ((_ONE << bits) - _ONE)) << size
            # At most 7 bits held, 27 of a gap and 16 of a step.
            held |= low << used
            put_at(to, held)
            used += size + bits
            full = used >> _THREE
            to += full
            held >>= full << _THREE
            used &= _SEVEN
        return ((to - address) << _THREE) + used

    words = input_array(UINT[word_bytes])
    return compiled(
        loop,
        types.uint64,
        input_array(types.int64),
        words,
        words,
        types.uint64,
        types.int64,
        output_array(types.uint16),
        output_array(types.uint32),
        types.uint64,
    )


@cache
def write_table() -> Callable[..., Any]:
    """(used, widths, classes, table) -> (cells listed, bytes): widths (n,) as they travel.

    `used` (n,) are the cells they belong to, ascending; of each gap token, `classes` are listed.
    """

    def loop(used, widths, classes, table):  # type: ignore[no-untyped-def]
        at = 0
        listed = np.int64(0)
        for k in range(used.size):
            cell = np.int64(used[k])
            index = (cell >> LOG2_STEP_CLASSES) * classes
            index += cell & ((1 << LOG2_STEP_CLASSES) - 1)
            while listed < index:
                run = min(index - listed, 256)
                table[at] = np.uint8(0)
                table[at + 1] = np.uint8(run - 1)
                at += 2
                listed += run
            width = np.int64(widths[k])
            if width >= 128:
                table[at] = np.uint8(width & 127 | 128)
                at += 1
                width >>= 7
            table[at] = np.uint8(width)
            at += 1
            listed += 1
        return listed, at

    return compiled(
        loop,
        types.UniTuple(types.int64, 2),
        input_array(types.int64),
        input_array(types.uint32),
        types.int64,
        output_array(types.uint8),
    )


@register_jitable
def fill_slots(table, listed, classes, fine, slots, least, sizes):  # type: ignore[no-untyped-def]
    """Bytes of the table, and what `read_changes` needs: or -1.

    From the widths of `listed` cells as they travel: slots (TOTAL,), as `bin_loops.read` has them,
    with the numbers of cells that have a width in place of tokens; least (TOKENS,), the least gap
    of each; and sizes (TOKENS,): bits of the gap, and, times 256, of gap and step.
    -1: the widths do not sum to TOTAL, the last is 0 or one in two bytes is, or there are too many.
    """
    at = 0
    start = np.int64(0)
    cells = 0
    index = np.int64(0)
    width = np.int64(0)
    while index < listed:
        if at + 1 >= table.size:
            return -1
        width = np.int64(table[at])
        at += 1
        if width == 0:
            index += 1 + np.int64(table[at])
            at += 1
            continue
        if width >= 128:
            width += (np.int64(table[at]) << 7) - 128
            at += 1
        if width == 0 or start + width > TOTAL or cells == TOKENS:
            return -1
        token = index // classes
        size = max(token >> fine, 1) - 1
        least[cells] = np.uint32((token - (size << fine)) << size)
        sizes[cells] = np.uint16(size + ((size + index % classes + 1) << 8))
        for offset in range(width):
            slots[start + offset] = np.uint32((width - 1) << 20 | offset << 8 | cells)
        start += width
        cells += 1
        index += 1
    return at if start == TOTAL and index == listed and width > 0 else -1


@register_jitable
def _change(cell, least, sizes, shift, address, place, position):  # type: ignore[no-untyped-def]
    """(position, step, bits up to its end) of the change after `position`."""
    both = np.uint64(sizes[cell])
    size = both & _SIZE
    total = both >> _TOTAL_SHIFT
    raw = load_at(address + (place >> _THREE)) >> (place & _SEVEN)
    gap = np.uint64(least[cell]) + (raw & ((_ONE << size) - _ONE))
    twice = ((raw & ((_ONE << total) - _ONE)) >> size) | _ONE << (total - size)
    below = -np.int64(twice & _ONE)
    step = ((np.int64(twice >> _ONE) ^ below) - below) << shift
    return position + np.int64(gap) + 1, step, place + total


@register_jitable
def read_changes(slots, least, sizes, shift, stream, states, positions, steps, ends):  # type: ignore[no-untyped-def]
    """OK or SHORT: the changes to positions (k,) and steps (k,), which are multiples of 2^shift.

    slots, least and sizes as `fill_slots` makes them. stream: words (m + STATES,), the address of
    the raw bits, and their number; 32 bytes more may be read after them. ends (3,) get the words
    and the bits that were read, and not 0 if a step has more than 16 bits; states (STATES,) what is
    left of them.
    """
    words, address, last_bit = stream
    at = _ZERO
    place = _ZERO
    wide = np.int64(0)
    position = np.int64(-1)
    last_word = np.uint64(words.size - STATES)
    whole = positions.size - positions.size % STATES
    x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
    for i in range(0, whole, STATES):
        if at > last_word or place > last_bit:
            return SHORT
        x0, cell0, at = pop(x0, slots, words, at)
        x1, cell1, at = pop(x1, slots, words, at)
        x2, cell2, at = pop(x2, slots, words, at)
        x3, cell3, at = pop(x3, slots, words, at)
        position, step, place = _change(cell0, least, sizes, shift, address, place, position)
        positions[i], steps[i] = position, np.int16(step)
        wide |= step ^ np.int64(np.int16(step))
        position, step, place = _change(cell1, least, sizes, shift, address, place, position)
        positions[i + 1], steps[i + 1] = position, np.int16(step)
        wide |= step ^ np.int64(np.int16(step))
        position, step, place = _change(cell2, least, sizes, shift, address, place, position)
        positions[i + 2], steps[i + 2] = position, np.int16(step)
        wide |= step ^ np.int64(np.int16(step))
        position, step, place = _change(cell3, least, sizes, shift, address, place, position)
        positions[i + 3], steps[i + 3] = position, np.int16(step)
        wide |= step ^ np.int64(np.int16(step))
    states[0], states[1], states[2], states[3] = x0, x1, x2, x3
    if at > last_word or place > last_bit:
        return SHORT
    for i in range(whole, positions.size):
        x, cell, at = pop(states[i - whole], slots, words, at)
        states[i - whole] = x
        position, step, place = _change(cell, least, sizes, shift, address, place, position)
        positions[i], steps[i] = position, np.int16(step)
        wide |= step ^ np.int64(np.int16(step))
    ends[0] = at
    ends[1] = place
    ends[2] = np.uint64(wide)
    return OK
