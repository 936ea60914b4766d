"""What the compiled loops do, for ordinary arrays. numba is imported when the first one is needed.

The numpy reference of every function is in :mod:`stitch.codec.reference`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stitch.codec.ulp import is_ordered_by_sign
from stitch.codec.words import Lanes, Positions, Words, split64
from stitch.types import Schema

Planes = npt.NDArray[np.uint8]
"""(word_bytes, num_elements): plane b holds byte b of every zigzag step, lowest byte first."""

_BLOCK_BYTES = 64
"""`find_changed` skips equal blocks of this size."""


def warm(schema: Schema | None = None) -> None:
    """Compile the loops, or load them from numba's cache, so that later calls do not wait.

    With a schema, only those for its words. Compiling all takes some 10 s once per machine.
    """
    from stitch.codec import loops

    loops.sum_words()
    specs = [] if schema is None else schema.tensors
    for word_bytes in (1, 2, 4, 8) if schema is None else {spec.word_bytes for spec in specs}:
        loops.find_changed(word_bytes)
        loops.sum_change(word_bytes)
        for ordered in (False, True):
            loops.split_steps(word_bytes, ordered)
            loops.join_steps(word_bytes, ordered)


def find_changed(
    old: Words, new: Words, scratch: npt.NDArray[np.uint32] | None = None
) -> Positions:
    """Ascending positions (k,) at which the bits of two word arrays (n,) differ.

    `scratch` (n + 1,) saves an allocation on each of many calls.
    """
    from stitch.codec import loops

    if old.size != new.size or old.dtype != new.dtype:
        raise ValueError(f"cannot compare {old.size} {old.dtype} with {new.size} {new.dtype} words")
    if old.size >= 1 << 32:
        raise ValueError("find_changed takes fewer than 2^32 words at a time")
    find = loops.find_changed(old.itemsize)
    per_block = _BLOCK_BYTES // old.itemsize
    blocked = old.size - old.size % per_block
    # One more than the worst case, because the loop writes before it knows whether to keep.
    found = np.empty(blocked + 1, np.uint32) if scratch is None else scratch
    assert found.size > blocked
    count = find(_blocks(old[:blocked]), _blocks(new[:blocked]), found)
    in_rest = np.flatnonzero(old[blocked:] != new[blocked:]) + blocked
    return np.concatenate([found[:count].astype(np.int64), in_rest])


def _blocks(words: Words) -> npt.NDArray[np.uint64]:
    return words.view(np.uint64).reshape(-1, 8)


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


def split_steps(old: Words, new: Words, dtype: str, first: int, planes: Planes) -> None:
    """Write the zigzag ULP steps from `old` to `new` (n,) to columns [first, first + n)."""
    from stitch.codec import loops

    assert old.size == new.size
    assert first + old.size <= planes.shape[1]
    split = loops.split_steps(old.itemsize, is_ordered_by_sign(dtype))
    split(old, new, first, planes)


def join_steps(old: Words, planes: Planes, dtype: str, first: int, out: Words) -> int:
    """Write to `out` (n,) the words that lie the steps of columns [first, first + n) from `old`.

    Returns how many of them moved.
    """
    from stitch.codec import loops

    assert old.size == out.size
    assert first + old.size <= planes.shape[1]
    join = loops.join_steps(old.itemsize, is_ordered_by_sign(dtype))
    return int(join(old, planes, first, out))
