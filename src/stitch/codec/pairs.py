"""Paired streams: a gap and the step after it as one token, coded by rANS, and raw bits.

Less work than two binned streams, at nearly the same size. See docs/format.md.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from stitch.codec.bins import LOWEST_STATE, STATES, TOKENS, TOTAL, num_tokens
from stitch.codec.changes import BucketChanges
from stitch.codec.ulp import is_ordered_by_sign
from stitch.codec.words import Positions
from stitch.errors import CorruptPatchError

Steps = npt.NDArray[np.int16]

MOST_WORD_BYTES = 2
"""Steps of wider words have so many sizes that too many kinds of pairs would occur."""
LOG2_STEP_CLASSES = 4
STEP_CLASSES = 1 << LOG2_STEP_CLASSES
"""Sizes of steps of 16 bits: class s - 1 has those with 2^(s-1) <= |step| < 2^s."""
GAP_BITS = 28
MOST_FINE = 2
"""Bits of a gap's token after the leading one are at most this many."""
CELLS = 128 * STEP_CLASSES
"""Room for all pairs of a gap's token and a step's class."""
_TABLE_BYTES = 4 * TOKENS + 2 * CELLS // 256
"""At most: two bytes for each width and for zeros before it, and two for each 256 zeros more."""
MOST_SHIFT = 15
_FEW, _DENSE = 4096, 8
"""Changes, and elements for each change, below which other streams are smaller."""

_HEAD = struct.Struct("<BBBH4II")
_SPARE_BYTES = 32
"""Bytes after the end that a reader may look at before it finds out that it is there."""
_BYTES_EACH = 6
"""Of raw bits: at most 27 for a gap and 16 for a step."""


def warm(word_bytes: int, ordered: bool) -> None:
    """Compile the loops, or load them from numba's cache."""
    from stitch.codec import bin_loops, pair_loops

    if ordered and word_bytes <= MOST_WORD_BYTES:
        bin_loops.push(2)
        pair_loops.union_of_steps(word_bytes)
        pair_loops.tokenise(word_bytes)
        pair_loops.write_table()
        pair_loops.fill_slots()
        pair_loops.read()


def write(changes: BucketChanges) -> bytes | None:
    """The body of a stream holding all changes of a bucket.

    None where gaps and steps had better be streams of their own: where there are few changes, or
    very many; where words are wide, or integers, whose steps may be peculiar; and where too many
    kinds of pairs occur.
    """
    bucket, num_changed = changes.bucket, changes.num_changed
    if num_changed < _FEW or num_changed * _DENSE > bucket.num_elements:
        return None
    if bucket.word_bytes > MOST_WORD_BYTES or not is_ordered_by_sign(bucket.dtype):
        return None
    for fine in (1, 0):
        body = _write(changes, fine)
        if body is not None:
            return body
    return None


def _write(changes: BucketChanges, fine: int) -> bytes | None:
    from stitch.codec import bin_loops, pair_loops

    positions, old, new = changes.positions, changes.old, changes.new
    union = pair_loops.union_of_steps(old.itemsize)(old, new)
    shift = (union & -union).bit_length() - 1
    cells = np.empty(positions.size, np.uint16)
    counts = np.zeros(CELLS, np.uint32)
    bits = np.empty(_BYTES_EACH * positions.size + 8, np.uint8)
    tokenise = pair_loops.tokenise(old.itemsize)
    num_bits = tokenise(positions, old, new, fine, shift, cells, counts, bits.ctypes.data)
    used = np.flatnonzero(counts)
    if used.size > TOKENS:
        return None
    used_counts = np.zeros(TOKENS, np.int64)
    used_counts[: used.size] = counts[used]
    widths, starts = np.empty((2, TOKENS), np.uint32)
    inverses = np.empty(TOKENS)
    table = np.empty(_TABLE_BYTES, np.uint8)
    bin_loops.measure()(used_counts, widths, starts, inverses, table)
    by_cell = np.empty((2, CELLS), np.uint32)
    by_cell[:, used] = widths[: used.size], starts[: used.size]
    inverse_by_cell = np.empty(CELLS)
    inverse_by_cell[used] = inverses[: used.size]
    words = np.empty(positions.size + 1, np.uint16)
    states = np.empty(STATES, np.uint64)
    first = bin_loops.push(2)(cells, *by_cell, inverse_by_cell, words, states)
    classes = int((used & (STEP_CLASSES - 1)).max()) + 1
    listed, table_bytes = pair_loops.write_table()(used, widths, classes, table)
    head = _HEAD.pack(shift, fine, classes - 1, listed - 1, *states.tolist(), words.size - first)
    arrays = table[:table_bytes], words[first:], bits[: -(-num_bits // 8)]
    return b"".join([head, *(array.tobytes() for array in arrays)])


def read(body: memoryview, count: int, what: str) -> tuple[Positions, Steps]:
    """The positions (k,) and steps (k,) of the `count` changes of a body, no more and no less.

    Positions ascend, from 0 or more; whether they are inside the bucket is for the caller to see.
    """
    from stitch.codec import pair_loops

    if len(body) < _HEAD.size:
        raise CorruptPatchError(f"{what}: {len(body)} bytes are too few for a paired stream")
    shift, fine, last_class, last, *states, num_words = _HEAD.unpack_from(body)
    if (
        shift > MOST_SHIFT
        or fine > MOST_FINE
        or last_class >= STEP_CLASSES
        or last >= num_tokens(GAP_BITS, fine) * (last_class + 1)
    ):
        raise CorruptPatchError(
            f"{what}: {last + 1} pairs of {last_class + 1} classes, of {fine} bits, shifted by "
            f"{shift}, cannot be"
        )
    data = np.empty(len(body) + _SPARE_BYTES, np.uint8)
    data[: len(body)] = np.frombuffer(body, np.uint8)
    data[len(body) :] = 0
    slots = np.empty(TOTAL, np.uint32)
    least, sizes = np.empty(TOKENS, np.uint32), np.empty(TOKENS, np.uint16)
    table_bytes = pair_loops.fill_slots()(
        data[_HEAD.size : len(body)], last + 1, last_class + 1, fine, slots, least, sizes
    )
    if table_bytes < 0:
        raise CorruptPatchError(f"{what}: widths of {last + 1} pairs do not sum to {TOTAL}")
    start = _HEAD.size + table_bytes
    bits_start = start + 2 * num_words
    if bits_start > len(body) or min(states) < LOWEST_STATE:
        raise CorruptPatchError(f"{what}: the parts of a paired stream do not fit its length")
    words = data[start : bits_start + 2 * STATES].view(np.uint16)
    num_bits = 8 * (len(body) - bits_start)
    if count > num_bits:  # each change has at least one; so a short body never asks for much memory
        raise CorruptPatchError(f"{what}: the paired stream does not hold {count} changes")
    positions, steps = np.empty(count, np.int64), np.empty(count, np.int16)
    ends = np.zeros(3, np.uint64)
    left = np.array(states, np.uint64)
    verdict = pair_loops.read()(
        slots, least, sizes, shift, words, data.ctypes.data + bits_start, num_bits, left, positions,
        steps, ends,
    )  # fmt: skip
    used_words, used_bits, wide = ends.tolist()
    if (
        verdict != pair_loops.OK
        or used_words != num_words
        or -(-used_bits // 8) != num_bits // 8
        or (used_bits % 8 and int(body[-1]) >> used_bits % 8)
        or left.tolist() != [LOWEST_STATE] * STATES
    ):
        raise CorruptPatchError(f"{what}: the paired stream does not hold {count} changes")
    if wide:
        raise CorruptPatchError(f"{what}: a step of a paired stream has more than 16 bits")
    return positions, steps
