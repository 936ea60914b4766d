"""What the compiled loops do, for ordinary arrays. numba is imported when the first one is needed.

The numpy reference of every function is in :mod:`stitch.codec.reference`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stitch.codec.ulp import is_ordered_by_sign
from stitch.codec.words import SIGNED_DTYPES, WORD_DTYPES, Lanes, Positions, Words, split64
from stitch.types import Schema

Numbers = npt.NDArray[np.integer[Any]]
"""Of the dtype of their stream: gaps are u32, steps signed and of at least 16 bits."""

ROW_WORDS = 8
"""64-bit words of a row; a scan skips equal rows at once."""
BLOCK_ROWS = 512
"""Rows that a scan searches before it lists what it found there: they stay in the cache."""

Places = npt.NDArray[np.int64]
PLACE = ("start", "num_elements", "address", "num_words")
"""Columns of a slice's row in `places` (n, 4), int64: its first element in its tensor, how many it
has, the address of the tensor's first word (which need not exist), and the words up to the tensor's
end, or to the end of the memory that may be read, on a whole 64-bit word."""


def warm(schema: Schema | None = None) -> None:
    """Compile the loops, or load them from numba's cache, so that later calls do not wait.

    With a schema, only those for its words. Compiling all takes some 20 s once per machine.
    """
    from stitch.codec import bins, dense_loops, gap_loops, loops, pairs
    from stitch.codec.ranks import kernels as rank_kernels

    loops.sum_words()
    gap_loops.to_gaps()
    gap_loops.to_positions()
    gap_loops.are_inside()
    kinds = {(width, ordered) for width in WORD_DTYPES for ordered in (False, True)}
    if schema is not None:
        kinds = {(spec.word_bytes, is_ordered_by_sign(spec.dtype)) for spec in schema.tensors}
    for word_bytes, ordered in sorted(kinds):
        loops.scan(word_bytes)
        loops.sum_change(word_bytes)
        loops.take_steps(word_bytes, ordered)
        loops.take_steps(word_bytes, False, True)
        gap_loops.to_steps(word_bytes, ordered)
        gap_loops.scatter(word_bytes)
        gap_loops.scatter_joint(word_bytes)
        pairs.warm(word_bytes, ordered)
        dense_loops.warm(word_bytes, ordered)
        rank_kernels.warm(word_bytes, ordered)
    widths = {max(2, word_bytes) for word_bytes, _ in kinds}
    bins.warm([np.dtype("<u4"), *(SIGNED_DTYPES[width] for width in sorted(widths))])


@dataclass(eq=False)
class Room:
    """Lists that `scan` adds to; the first `count` of each are in use.

    positions: (n,) int64; old, new: (n,) words.
    """

    positions: Positions
    old: Words
    new: Words
    count: int = 0

    @classmethod
    def of(cls, word_bytes: int, size: int) -> Room:
        """Empty lists of `size`, or of the least size with which every scan gets further."""
        size += BLOCK_ROWS * ROW_WORDS * (8 // word_bytes)
        dtype = WORD_DTYPES[word_bytes]
        return cls(np.empty(size, np.int64), np.empty(size, dtype), np.empty(size, dtype))

    def grow(self) -> None:
        """Four times as much room."""
        for name in ("positions", "old", "new"):
            before = getattr(self, name)
            after = np.empty(4 * before.size, before.dtype)
            after[: self.count] = before[: self.count]
            setattr(self, name, after)

    def listed(self) -> tuple[Positions, Words, Words]:
        """Views of what is in use."""
        used = slice(0, self.count)
        return self.positions[used], self.old[used], self.new[used]


def scan(
    old: Words, new: Words, room: Room, lanes: Lanes, *, first: int = 0, base: int = 0
) -> Iterator[None]:
    """List in `room` where the bits of two word arrays (n,) differ, ascending, and what is there.

    Stops (yields) while the room is used up; the caller makes some, by growing or emptying it.
    `base` is added to positions. What the digest gains by the changes is added to `lanes` (2,);
    `first` is the index of the arrays' first 64-bit word.
    """
    from stitch.codec import loops

    if old.size != new.size or old.dtype != new.dtype:
        raise ValueError(f"cannot compare {old.size} {old.dtype} with {new.size} {new.dtype} words")
    step = loops.scan(old.itemsize)
    whole = old.size - old.size % (ROW_WORDS * (8 // old.itemsize))
    pairs = [(0, _rows(old[:whole]), _rows(new[:whole]))]
    if whole < old.size:
        pairs.append((whole, _last_row(old[whole:]), _last_row(new[whole:])))
    for begin, old_rows, new_rows in pairs:
        row = 0
        num_rows = len(old_rows)
        index = first + begin * old.itemsize // 8
        while row < num_rows:
            row, room.count = step(
                old_rows,
                new_rows,
                row,
                index,
                base + begin,
                room.positions,
                room.old,
                room.new,
                room.count,
                lanes,
            )
            if row < num_rows:
                yield


def _rows(words: Words) -> npt.NDArray[np.uint64]:
    return words.view(np.uint64).reshape(-1, ROW_WORDS)


def _last_row(words: Words) -> npt.NDArray[np.uint64]:
    """One row of words that do not fill it, padded with zeros."""
    row = np.zeros(ROW_WORDS * (8 // words.itemsize), words.dtype)
    row[: words.size] = words
    return _rows(row)


def sum_words(words: Words, first: int = 0) -> Lanes:
    """Digest lanes (2,) of words of one tensor; `first` is the index of their first 64-bit word."""
    from stitch.codec import loops

    lanes = np.zeros(2, np.uint64)
    whole, tail = split64(words)
    add = loops.sum_words()
    add(whole, np.uint64(first), lanes)
    if tail.size:
        add(tail, np.uint64(first + whole.size), lanes)
    return lanes


def sum_change(old: Words, first: int, positions: Positions, new: Words) -> Lanes:
    """What the lanes (2,) gain when `new` (k,) replaces `old[positions]`.

    `old` (n,) starts at the tensor's 64-bit word `first` and ends at the tensor's end or on a
    64-bit word. `positions` (k,) ascend inside `old`.
    """
    from stitch.codec import loops

    lanes = np.zeros(2, np.uint64)
    if not positions.size:
        return lanes
    if positions[0] < 0 or positions[-1] >= old.size or positions.size != new.size:
        raise ValueError("positions are not inside the old words, or not as many as new words")
    whole, tail = split64(old)
    add = loops.sum_change(old.itemsize)
    add(whole, tail, np.uint64(first), positions, new, lanes)
    return lanes


def take_steps(
    places: Places,
    dtype: str,
    positions: Positions,
    steps: Numbers,
    olds: Words,
    news: Words,
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64], int]:
    """Fetch old words, take steps (k,) from them: old and new words go to `olds` and `news` (k,).

    `places` (n, 4), see PLACE, are those of a bucket's slices; whoever calls keeps their memory
    alive. `positions` (k,) ascend inside the bucket; afterwards they count from their tensor's
    start. `steps` have the dtype of their stream. Returns what the lanes gain by each slice (n, 2),
    where each slice's positions end, and the number of steps that are 0 or too wide for a word.
    """
    from stitch.codec import loops

    assert positions.size == steps.size == olds.size == news.size
    gains = np.zeros((len(places), 2), np.uint64)
    ends = np.empty(len(places), np.int64)
    take = loops.take_steps(olds.itemsize, is_ordered_by_sign(dtype))
    bad = int(take(places, positions, steps, olds, news, gains, ends))
    if bad < 0:
        raise ValueError("positions are not inside the slices, or not inside the old words")
    return gains, ends, bad


def sum_changes(
    places: Places, positions: Positions, olds: Words, news: Words
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """As `take_steps`, where the old and new words at `positions` (k,) are known."""
    from stitch.codec import loops

    assert positions.size == olds.size == news.size
    gains = np.zeros((len(places), 2), np.uint64)
    ends = np.empty(len(places), np.int64)
    none = np.empty(0, SIGNED_DTYPES[max(2, news.itemsize)])
    add = loops.take_steps(news.itemsize, False, True)
    if add(places, positions, none, olds, news, gains, ends) < 0:
        raise ValueError("positions are not inside the slices, or not inside the old words")
    return gains, ends


def to_gaps(positions: Positions, before: int, out: Numbers) -> None:
    """Write the gaps (k,) in front of ascending `positions`; `before` precedes them, or is -1."""
    from stitch.codec import gap_loops

    assert positions.size == out.size
    gap_loops.to_gaps()(positions, before, out)


def to_positions(gaps: Numbers) -> Positions:
    """The positions (k,) that k gaps lead to. At most 2^31 gaps."""
    from stitch.codec import gap_loops

    positions = np.empty(gaps.size, np.int64)
    gap_loops.to_positions()(gaps, positions)
    return positions


def to_steps(old: Words, new: Words, dtype: str, out: Numbers) -> None:
    """Write the steps from `old` to `new` (n,) as numbers of their stream, at least 16 bits."""
    from stitch.codec import gap_loops

    assert old.size == new.size == out.size
    gap_loops.to_steps(old.itemsize, is_ordered_by_sign(dtype))(old, new, out)


def scatter(positions: Positions, values: Words, target: Words) -> int:
    """Put `values` (k,) at `positions` (k,) of `target`.

    Returns how many it wrote: it stops before the first position outside the target.
    """
    from stitch.codec import gap_loops

    assert positions.size == values.size
    return int(gap_loops.scatter(target.itemsize)(positions, values, target))


def are_inside(
    extents: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], positions: Positions
) -> bool:
    """Whether positions (k,) that ascend in each slice are inside its tensor.

    The slices' changes end at ascending `ends` (n,). `extents` (n, 2): the address of the first
    word of each one's tensor, and its words.
    """
    from stitch.codec import gap_loops

    assert positions.size == ends[-1]
    return bool(gap_loops.are_inside()(extents, ends, positions))


def scatter_joint(
    extents: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    positions: Positions,
    values: Words,
    lo: int,
    hi: int,
) -> None:
    """Put `values[lo:hi]` (k,) at `positions` of tensors; arguments as for `are_inside`.

    Whoever calls keeps the memory of the tensors alive. ValueError, before anything outside is
    written, if a position is.
    """
    from stitch.codec import gap_loops

    assert positions.size == values.size == ends[-1]
    assert 0 <= lo <= hi <= values.size
    scatter_to = gap_loops.scatter_joint(values.itemsize)
    if scatter_to(extents, ends, positions, values, lo, hi) < hi:
        raise ValueError("a position is not inside its tensor")
