"""The class table of `ranks`: one row of integers for each class with changes, and its bytes.

See docs/format.md, "ranks".
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stitch.errors import CorruptPatchError

Table = npt.NDArray[np.int64]
"""(classes, COLUMNS), ascending by ID."""

LANES = 4
"""Position p of a bucket is in lane p % LANES; each lane's elements are counted apart."""

ID, CHANGED, CODED, INVERTED, FLIPS, DOWN, GAP_SHIFT, RATIO, VALUE_SHIFT, BASE = range(10)
"""Columns: the class; its changed elements; its coded gaps; whether those lead to unchanged
elements; whether signs flip; whether magnitudes count down from the base; low bits of a gap; first
guess of the gaps' distribution (65536ths); low bits of a magnitude; the base of magnitudes."""
LANE_CHANGED = slice(10, 10 + LANES)
LANE_CODED = slice(10 + LANES, 10 + 2 * LANES)
"""Columns: what CHANGED and CODED are the sums of, lane by lane."""
COLUMNS = 10 + 2 * LANES

MAX_CLASSES = 256
MAX_GAP_SHIFT = 27
MAX_VALUE_SHIFT = 62
LOWEST_RATIO, RATIO_STEP, RATIOS = 32768, 2560, 8
"""The guess travels as one of RATIOS steps."""
MAX_BASE = (1 << 62) - 1

MORE = 15
"""The symbol of a gap that says: so much, and more."""
ESCAPES = 10
"""A writer escapes at most one magnitude in so many, class by class."""


def write_table(table: Table) -> bytes:
    """The table's bytes, without their number."""
    out = bytearray()
    append = out.append
    for row in table.tolist():
        append(row[ID])
        append(row[GAP_SHIFT] | (row[RATIO] - LOWEST_RATIO) // RATIO_STEP << 5)
        append(row[VALUE_SHIFT] << 2 | row[FLIPS] << 1 | row[INVERTED])
        coded = row[LANE_CODED] if row[INVERTED] else []
        for number in (*row[LANE_CHANGED], *coded, row[BASE] << 1 | row[DOWN]):
            while number >= 0x80:
                append(number & 0x7F | 0x80)
                number >>= 7
            append(number)
    return bytes(out)


def read_table(
    data: memoryview, num_classes: int, *, num_changed: int, num_elements: int, what: str
) -> tuple[Table, memoryview]:
    """The table and the bytes after it.

    Raises CorruptPatchError unless it is in order, lists `num_changed` changes and codes no more
    gaps than the bucket has elements.
    """
    if not 1 <= num_classes <= MAX_CLASSES:
        raise CorruptPatchError(f"{what}: {num_classes} classes, expected 1 to {MAX_CLASSES}")
    rows = []
    at, previous, changes, gaps = 0, -1, 0, 0
    try:
        for _ in range(num_classes):
            number, gap, value = data[at], data[at + 1], data[at + 2]
            at += 3
            inverted = value & 1
            changed, at = _varints(data, at, LANES, num_changed, what)
            coded = changed
            if inverted:
                coded, at = _varints(data, at, LANES, num_elements, what)
            (base,), at = _varints(data, at, 1, 2 * MAX_BASE + 1, what)
            num_here, num_coded = sum(changed), sum(coded)
            if number <= previous or not num_here:
                raise CorruptPatchError(f"{what}: class {number} is out of order or has no changes")
            if gap & 31 > MAX_GAP_SHIFT or value >> 2 > MAX_VALUE_SHIFT:
                raise CorruptPatchError(f"{what}: class {number} keeps too many low bits")
            flips, down, ratio = value >> 1 & 1, base & 1, LOWEST_RATIO + (gap >> 5) * RATIO_STEP
            row = [number, num_here, num_coded, inverted, flips, down, gap & 31, ratio]
            rows.append([*row, value >> 2, base >> 1, *changed, *coded])
            previous, changes, gaps = number, changes + num_here, gaps + num_coded
    except IndexError:
        raise CorruptPatchError(f"{what}: the class table is cut short") from None
    if changes != num_changed:
        raise CorruptPatchError(
            f"{what}: its classes have {changes} changes, the table of buckets says {num_changed}"
        )
    if gaps > num_elements:
        raise CorruptPatchError(f"{what}: {gaps} gaps in a bucket of {num_elements} elements")
    return np.array(rows, np.int64), data[at:]


def _varints(
    data: memoryview, at: int, count: int, maximum: int, what: str
) -> tuple[list[int], int]:
    """Unsigned LEB128 integers without superfluous bytes, at most `maximum`, and their end.

    Raises IndexError if the data is cut short.
    """
    numbers = []
    for _ in range(count):
        byte = data[at]
        at += 1
        number, shift = byte & 0x7F, 7
        while byte >= 0x80:
            if shift > 63:
                raise CorruptPatchError(f"{what}: a number has too many bytes")
            byte = data[at]
            at += 1
            number |= (byte & 0x7F) << shift
            shift += 7
        if number > maximum or (byte == 0 and shift > 7):
            raise CorruptPatchError(f"{what}: number {number} is above {maximum} or padded")
        numbers.append(number)
    return numbers, at
