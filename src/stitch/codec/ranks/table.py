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
    for row in table.tolist():
        ratio = (row[RATIO] - LOWEST_RATIO) // RATIO_STEP
        out.append(row[ID])
        out.append(row[GAP_SHIFT] | ratio << 5)
        out.append(row[VALUE_SHIFT] << 2 | row[FLIPS] << 1 | row[INVERTED])
        for number in row[LANE_CHANGED] + (row[LANE_CODED] if row[INVERTED] else []):
            _append_varint(out, number)
        _append_varint(out, row[BASE] << 1 | row[DOWN])
    return bytes(out)


def _append_varint(out: bytearray, number: int) -> None:
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)


def read_table(
    data: memoryview, num_classes: int, *, num_changed: int, num_elements: int, what: str
) -> tuple[Table, memoryview]:
    """The table and the bytes after it.

    Raises CorruptPatchError unless it is in order, lists `num_changed` changes and codes no more
    gaps than the bucket has elements.
    """
    if not 1 <= num_classes <= MAX_CLASSES:
        raise CorruptPatchError(f"{what}: {num_classes} classes, expected 1 to {MAX_CLASSES}")
    table = np.zeros((num_classes, COLUMNS), np.int64)
    source = _Source(data, what)
    previous = -1
    for row in table:
        row[ID], gap, value = source.byte(), source.byte(), source.byte()
        row[GAP_SHIFT], row[RATIO] = gap & 31, LOWEST_RATIO + (gap >> 5) * RATIO_STEP
        row[VALUE_SHIFT], row[FLIPS], row[INVERTED] = value >> 2, value >> 1 & 1, value & 1
        row[LANE_CHANGED] = [source.varint(num_changed) for _ in range(LANES)]
        row[LANE_CODED] = row[LANE_CHANGED]
        if row[INVERTED]:
            row[LANE_CODED] = [source.varint(num_elements) for _ in range(LANES)]
        row[CHANGED], row[CODED] = row[LANE_CHANGED].sum(), row[LANE_CODED].sum()
        base = source.varint(2 * MAX_BASE + 1)
        row[BASE], row[DOWN] = base >> 1, base & 1
        if row[ID] <= previous or row[CHANGED] == 0:
            raise CorruptPatchError(f"{what}: class {row[ID]} is out of order or has no changes")
        if row[GAP_SHIFT] > MAX_GAP_SHIFT or row[VALUE_SHIFT] > MAX_VALUE_SHIFT:
            raise CorruptPatchError(f"{what}: class {row[ID]} keeps too many low bits")
        previous = int(row[ID])
    if int(table[:, CHANGED].sum()) != num_changed:
        raise CorruptPatchError(
            f"{what}: its classes have {table[:, CHANGED].sum()} changes, the table of buckets "
            f"says {num_changed}"
        )
    coded = int(table[:, CODED].sum())
    if coded > num_elements:
        raise CorruptPatchError(f"{what}: {coded} gaps in a bucket of {num_elements} elements")
    return table, source.rest()


class _Source:
    """Bytes taken from the front."""

    def __init__(self, data: memoryview, what: str) -> None:
        self._data, self._what, self._at = data, what, 0

    def byte(self) -> int:
        if self._at == len(self._data):
            raise CorruptPatchError(f"{self._what}: the class table is cut short")
        self._at += 1
        return self._data[self._at - 1]

    def varint(self, maximum: int) -> int:
        """An unsigned LEB128 integer without superfluous bytes, at most `maximum`."""
        number = shift = 0
        while True:
            byte = self.byte()
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
            if shift > 63:
                raise CorruptPatchError(f"{self._what}: a number has too many bytes")
        if number > maximum or (byte == 0 and shift > 7):
            raise CorruptPatchError(f"{self._what}: number {number} is above {maximum} or padded")
        return number

    def rest(self) -> memoryview:
        return self._data[self._at :]
