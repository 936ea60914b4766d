"""What the compiled loops do, for ordinary arrays. numba is imported when the first one is needed.

The numpy reference of every function is in :mod:`stitch.codec.reference`.
"""

from __future__ import annotations

import numpy as np

from stitch.codec.words import Lanes, Positions, Words, split64


def warm() -> None:
    """Compile every loop, or load it from numba's cache, so that later calls do not wait."""
    from stitch.codec import loops

    loops.find_changed()
    loops.sum_words()
    for word_bytes in (1, 2, 4, 8):
        loops.sum_change(word_bytes)


def find_changed(old: Words, new: Words) -> Positions:
    """Ascending positions (k,) at which the bits of two word arrays (n,) differ."""
    from stitch.codec import loops

    if old.size != new.size or old.dtype != new.dtype:
        raise ValueError(f"cannot compare {old.size} {old.dtype} with {new.size} {new.dtype} words")
    if old.size >= 1 << 32:
        raise ValueError("find_changed takes fewer than 2^32 words at a time")
    find = loops.find_changed()
    lane_bits = 8 * old.itemsize
    (old_whole, old_tail), (new_whole, new_tail) = split64(old), split64(new)
    # Untouched pages of this buffer cost nothing, so it may be as long as the worst case.
    found = np.empty(old.size + 8, np.uint32)
    count = find(old_whole, new_whole, lane_bits, found)
    positions = found[:count].astype(np.int64)
    if not old_tail.size:
        return positions
    count = find(old_tail, new_tail, lane_bits, found)
    in_tail = found[:count].astype(np.int64) + old_whole.size * (8 // old.itemsize)
    return np.concatenate([positions, in_tail])


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
