"""What the compiled loops of `ranks` do, for ordinary arrays. numba is imported on first use.

The slow form of everything is in :mod:`stitch.codec.reference_ranks`.
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
    ESCAPES,
    FLIPS,
    GAP_SHIFT,
    ID,
    LANE_CHANGED,
    LANES,
    MAX_CLASSES,
    MORE,
    VALUE_SHIFT,
    Table,
)
from stitch.codec.words import Positions, Words
from stitch.errors import CorruptPatchError

Values = npt.NDArray[np.int64]
"""(k,) differences of magnitudes, or of integers."""
Flips = npt.NDArray[np.uint8]
"""(k,) 1 where the sign bit flips."""

_NEVER = 0xFFFFFFFF
_ESCAPE_BITS = 70
"""Raw bits of an escaped magnitude, besides its low ones: at most this many."""


def _by_class(by_key: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Numbers by key as (classes, lanes)."""
    return np.ascontiguousarray(by_key.reshape(LANES, MAX_CLASSES).T, np.int64)


@dataclass(frozen=True)
class Coded:
    """The changes of a bucket, coded: the table, the raw bits and the stream of states."""

    table: Table
    bits: bytes
    stream: bytes


def warm(word_bytes: int, ordered: bool) -> None:
    """Compile what words of this kind need, or load it from numba's cache."""
    from stitch.codec.ranks import (
        class_loops,
        coder_loops,
        place_loops,
        plan_loops,
        rank_loops,
        scale_loops,
    )

    rank_loops.rank_words(word_bytes)
    place_loops.place_words(word_bytes, word_bytes, ordered)
    for make in (
        place_loops.unfold_gaps,
        scale_loops.spread_blocks,
        class_loops.encode,
        class_loops.decode,
        coder_loops.fold,
        plan_loops.group,
        plan_loops.plan,
    ):
        make()


def encode(
    slices: Iterable[ClassWords], positions: Positions, values: Values, flips: Flips
) -> Coded:
    """Code changes at ascending `positions` (k,), k >= 1, of a bucket made of `slices`."""
    from stitch.codec.ranks import class_loops, coder_loops, plan_loops, rank_loops
    from stitch.codec.ranks.tile_loops import NUM_KEYS

    num_changed = positions.size
    counts = np.zeros(NUM_KEYS, np.uint32)
    ranks = np.empty(num_changed, np.uint32)
    keys = np.empty(num_changed, np.uint16)
    origin = lo = 0
    for part in slices:
        hi = int(np.searchsorted(positions, origin + part.words.size))
        rank = rank_loops.rank_words(part.words.itemsize)
        shape = (np.uint64(part.shift), np.uint64(part.mask))
        rank(part.words, *shape, positions[lo:hi], origin, counts, ranks[lo:hi], keys[lo:hi])
        origin, lo = origin + part.words.size, hi
    changed = _by_class(np.bincount(keys, minlength=counts.size))
    starts = (np.cumsum(changed) - changed.ravel()).reshape(changed.shape).T.ravel()
    by_class = [np.empty_like(array) for array in (ranks, values, flips)]
    plan_loops.group()(keys, ranks, values, flips, starts, *by_class)
    del keys, ranks, values, flips
    table = np.zeros((MAX_CLASSES, COLUMNS), np.int64)
    gaps = np.empty(num_changed, np.uint32)
    by_lane = _by_class(counts)
    table = table[: plan_loops.plan()(by_lane, changed, *by_class, table, gaps)]
    totals = by_lane.sum(axis=1)

    gap_symbols = table[:, CODED] + (totals[table[:, ID]] >> table[:, GAP_SHIFT]) // MORE + LANES
    flipping = table[table[:, FLIPS] == 1]
    num_symbols = int(gap_symbols.sum() + flipping[:, CHANGED].sum()) + num_changed
    num_symbols += num_changed // ESCAPES
    num_bits = int((table[:, CODED] * table[:, GAP_SHIFT]).sum())
    num_bits += int((table[:, CHANGED] * table[:, VALUE_SHIFT]).sum())
    num_bits += num_changed // ESCAPES * _ESCAPE_BITS
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
    # A gap inside the bucket takes a symbol, and one more for each MORE steps of its class.
    gap_symbols = table[:, CODED] + (num_elements >> table[:, GAP_SHIFT]) // MORE + 1
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
    slices: Iterable[tuple[Words, ClassWords]],
    table: Table,
    gaps: npt.NDArray[np.uint32],
    values: Values,
    flips: Flips,
    *,
    ordered: bool,
    what: str,
) -> tuple[Positions, Words, Words]:
    """Ascending positions (k,) of the changes, and the old and new words (k,) there.

    `slices`: the bucket's old words, and what their classes follow from. `ordered`: words are sign
    and magnitude. Raises CorruptPatchError unless every class has exactly the words that the table
    needs, and every value leads to a word.
    """
    from stitch.codec.ranks import place_loops as loops
    from stitch.codec.ranks.tile_loops import NUM_KEYS

    num_changed = values.size
    waits = np.empty(num_changed, np.uint32)
    ends = np.empty((len(table), LANES), np.int64)
    if not loops.unfold_gaps()(table, gaps, waits, ends):
        raise CorruptPatchError(f"{what}: a class has more gaps than changes")
    num_values = table[:, LANE_CHANGED]
    stops = np.cumsum(num_values).reshape(num_values.shape)
    at = np.ix_(np.arange(LANES), table[:, ID])
    following, stop = np.zeros((2, LANES, MAX_CLASSES), np.int64)
    following[at], stop[at] = (stops - num_values).T, stops.T
    following, stop = following.ravel(), stop.ravel()
    now = np.full(NUM_KEYS + 1, _NEVER, np.uint32)
    some = following < stop
    now[:-1][some] = waits[following[some]]
    positions = np.empty(num_changed, np.int64)
    old = new = np.empty(0, np.uint8)
    origin = found = 0
    for words, part in slices:
        if not origin:
            old, new = np.empty(num_changed, words.dtype), np.empty(num_changed, words.dtype)
        loop = loops.place_words(words.itemsize, part.words.itemsize, ordered)
        found = loop(
            words,
            part.words,
            np.uint64(part.shift),
            np.uint64(part.mask),
            origin,
            waits,
            now,
            following,
            stop,
            values,
            flips,
            found,
            positions,
            old,
            new,
        )
        if found < 0:
            raise CorruptPatchError(f"{what}: a value leads to a word that does not exist")
        origin += words.size
    if found != num_changed:
        raise CorruptPatchError(f"{what}: a class has too few words for its changes")
    after = _NEVER - now[:-1].astype(np.int64).reshape(LANES, MAX_CLASSES)[at].T
    if ((ends >= 0) & (ends != after)).any():
        raise CorruptPatchError(f"{what}: a class has more or fewer words than its gaps tell")
    return positions, old, new
