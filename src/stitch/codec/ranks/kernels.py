"""What the compiled loops of `ranks` do, for ordinary arrays. numba is imported on first use.

The slow form of everything is in :mod:`stitch.codec.ranks.reference`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stitch.codec.ranks.classes import ClassWords
from stitch.codec.ranks.table import (
    CHANGED,
    CODED,
    COLUMNS,
    GAP_SHIFT,
    ID,
    INVERTED,
    MAX_CLASSES,
    VALUE_SHIFT,
    Table,
)
from stitch.codec.words import Positions
from stitch.errors import CorruptPatchError

Values = npt.NDArray[np.int64]
"""(k,) differences of magnitudes, or of integers."""
Flips = npt.NDArray[np.uint8]
"""(k,) 1 where the sign bit flips."""

_NEVER = 0xFFFFFFFF
_MORE, _ESCAPE_BITS, _LARGEST_ESCAPE_SHARE = 15, 70, 10


@dataclass(frozen=True)
class Coded:
    """The changes of a bucket, coded: the table, the raw bits and the stream of states."""

    table: Table
    bits: bytes
    stream: bytes


def warm(word_bytes: int) -> None:
    """Compile what words of this size need."""
    from stitch.codec.ranks import class_loops, coder_loops, plan_loops, position_loops

    for size in {1, word_bytes}:
        position_loops.rank_words(size)
        position_loops.place_words(size)
    for make in (class_loops.encode, class_loops.decode, coder_loops.fold):
        make()
    plan_loops.group()
    plan_loops.plan()


def encode(
    slices: Iterable[ClassWords], positions: Positions, values: Values, flips: Flips
) -> Coded:
    """Code changes at ascending `positions` (k,), k >= 1, of a bucket made of `slices`."""
    from stitch.codec.ranks import class_loops, coder_loops, plan_loops, position_loops

    num_changed = positions.size
    counts = np.zeros((8, MAX_CLASSES), np.uint32)
    ranks = np.empty(num_changed, np.uint32)
    classes = np.empty(num_changed, np.uint8)
    origin = lo = 0
    for part in slices:
        hi = int(np.searchsorted(positions, origin + part.words.size))
        rank = position_loops.rank_words(part.words.itemsize)
        shape = (np.uint64(part.shift), np.uint64(part.mask))
        rank(part.words, *shape, positions[lo:hi], origin, counts, ranks[lo:hi], classes[lo:hi])
        origin, lo = origin + part.words.size, hi
    changed = np.bincount(classes, minlength=MAX_CLASSES).astype(np.int64)
    by_class = [np.empty_like(array) for array in (ranks, values, flips)]
    plan_loops.group()(classes, ranks, values, flips, np.cumsum(changed) - changed, *by_class)
    table = np.zeros((MAX_CLASSES, COLUMNS), np.int64)
    gaps = np.empty(num_changed, np.uint32)
    totals = counts.sum(axis=0, dtype=np.int64)
    table = table[: plan_loops.plan()(totals, changed, *by_class, table, gaps)]

    gap_symbols = table[:, CODED] + (totals[table[:, ID]] >> table[:, GAP_SHIFT]) // _MORE + 1
    num_symbols = int(gap_symbols.sum()) + 3 * num_changed
    num_bits = int((table[:, CODED] * table[:, GAP_SHIFT]).sum())
    num_bits += int((table[:, CHANGED] * table[:, VALUE_SHIFT]).sum())
    num_bits += num_changed // _LARGEST_ESCAPE_SHARE * _ESCAPE_BITS
    lows, widths = np.empty(num_symbols, np.uint16), np.empty(num_symbols, np.uint16)
    bits = np.zeros(num_bits // 64 + 2, np.uint64)
    used = np.zeros(2, np.int64)
    scratch = np.empty((4, max(int(gap_symbols.max()), int(table[:, CHANGED].max()))), np.uint8)
    class_loops.encode()(table, gaps, *by_class[1:], scratch, lows, widths, bits, used)
    out = np.empty(used[0] + 2, np.uint16)
    first = coder_loops.fold()(lows[: used[0]], widths[: used[0]], out)
    return Coded(table, bits.tobytes()[: -(-int(used[1]) // 8)], out[first:].tobytes())


def decode(
    table: Table, bits: memoryview, stream: memoryview, num_elements: int, what: str
) -> tuple[npt.NDArray[np.uint32], Values, Flips]:
    """Gaps, values and flips class by class, from bytes that nobody has looked at.

    `table` has been checked. Raises CorruptPatchError.
    """
    from stitch.codec.ranks import class_loops

    if len(stream) < 4 or len(stream) % 2:
        raise CorruptPatchError(f"{what}: {len(stream)} bytes of states")
    padded = np.zeros(len(bits) // 8 + 2, np.uint64)
    padded.view(np.uint8)[: len(bits)] = np.frombuffer(bits, np.uint8)
    gaps = np.empty(int(table[:, CODED].sum()), np.uint32)
    num_changed = int(table[:, CHANGED].sum())
    values, flips = np.empty(num_changed, np.int64), np.empty(num_changed, np.uint8)
    # A gap inside the bucket takes a symbol, and one more for each _MORE steps of its class.
    gap_symbols = table[:, CODED] + (num_elements >> table[:, GAP_SHIFT]) // _MORE + 1
    longest = max(int(gap_symbols.max()), int(table[:, CHANGED].max()))
    outcome = class_loops.decode()(
        table,
        num_elements,
        np.frombuffer(stream, "<u2"),
        padded,
        8 * len(bits),
        np.empty((4, longest), np.uint8),
        gaps,
        values,
        flips,
    )
    if outcome != class_loops.OK:
        raise CorruptPatchError(f"{what}: {_OUTCOMES[outcome]}")
    return gaps, values, flips


_OUTCOMES = {
    1: "its raw bits are too few or too many",
    2: "its states do not end where they began",
    3: "a gap leads outside the bucket",
    4: "a value is too wide or changes nothing",
}


def place(
    slices: Iterable[ClassWords], table: Table, gaps: npt.NDArray[np.uint32], what: str
) -> tuple[Positions, npt.NDArray[np.int64]]:
    """Ascending positions (k,) of the changes, and the index (k,) of each one's value.

    Raises CorruptPatchError unless every class has exactly the words that the table needs.
    """
    from stitch.codec.ranks import position_loops as loops

    values_end = np.cumsum(table[:, CHANGED])
    gaps_end = np.cumsum(table[:, CODED])
    first = np.full(len(table), _NEVER, np.int64)
    has_gaps = table[:, CODED] > 0
    first[has_gaps] = gaps[(gaps_end - table[:, CODED])[has_gaps]]
    inverted = table[:, INVERTED] == 1
    cursors = np.zeros((6, MAX_CLASSES), np.int64)
    rows = np.zeros((len(table), 6), np.int64)
    rows[:, loops.NEXT_GAP], rows[:, loops.GAPS_END] = gaps_end - table[:, CODED], gaps_end
    rows[:, loops.NEXT_VALUE], rows[:, loops.VALUES_END] = (
        values_end - table[:, CHANGED],
        values_end,
    )
    rows[:, loops.INVERTED], rows[:, loops.RUN] = inverted, first
    cursors[:, table[:, ID]] = rows.T
    waits = np.full(MAX_CLASSES, _NEVER, np.uint32)
    waits[table[:, ID]] = np.where(inverted, 0, first)
    num_changed = int(values_end[-1])
    positions, order = np.empty(num_changed, np.int64), np.empty(num_changed, np.int64)
    origin = found = 0
    for part in slices:
        loop = loops.place_words(part.words.itemsize)
        shape: Any = (np.uint64(part.shift), np.uint64(part.mask))
        found = loop(part.words, *shape, origin, gaps, cursors, waits, found, positions, order)
        if found < 0:
            raise CorruptPatchError(f"{what}: a class has more words than changes")
        origin += part.words.size
    rows = cursors[:, table[:, ID]].T
    all_placed = rows[:, loops.NEXT_VALUE] == rows[:, loops.VALUES_END]
    if not (all_placed & (rows[:, loops.NEXT_GAP] == rows[:, loops.GAPS_END])).all():
        raise CorruptPatchError(f"{what}: a class has too few words for its changes")
    return positions, order
