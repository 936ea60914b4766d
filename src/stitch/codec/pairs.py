"""Paired streams: a gap and the step after it as one token, coded by rANS, and raw bits.

Less work than two binned streams, at nearly the same size. See docs/format.md.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stitch.codec.bins import STATES, TOKENS, TOTAL
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
SPARE_BYTES = 32
"""Bytes after the end that a reader may look at before it finds out that it is there."""
_BYTES_EACH = 6
"""Of raw bits: at most 27 for a gap and 16 for a step."""

(
    OK,
    IMPOSSIBLE,
    BAD_WIDTHS,
    BAD_PARTS,
    OTHER_COUNT,
    WIDE_STEP,
    OUTSIDE,
    BAD_STEPS,
) = range(8)
"""What is found in a body, and, by the last two, of the changes that it tells of."""


def warm(word_bytes: int, ordered: bool) -> None:
    """Compile the loops, or load them from numba's cache."""
    from stitch.codec import bin_loops, pair_bodies, pair_loops

    if word_bytes <= MOST_WORD_BYTES:
        pair_bodies.read_body()
    if ordered and word_bytes <= MOST_WORD_BYTES:
        bin_loops.push(2)
        pair_loops.union_of_steps(word_bytes)
        pair_loops.tokenise(word_bytes)
        pair_loops.write_table()
        pair_bodies.take_changes(word_bytes, ordered)


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
    from stitch.codec import pair_bodies

    data, rows = opened([Body(body, count, what)])
    positions, steps = np.empty(count, np.int64), np.empty(count, np.int16)
    verdict = pair_bodies.read_body()(data, rows[0], positions, steps)
    if verdict != OK:
        raise refusal(verdict, Body(body, count, what))
    return positions, steps


class Body(NamedTuple):
    """The body of a stream that should hold so many changes; `what` names it in errors."""

    data: memoryview
    num_changed: int
    what: str


def opened(bodies: Sequence[Body]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Bodies with SPARE_BYTES of zeros after each, and what loops need to know of them.

    That is a row for each: where it begins, after its head, and ends, and the fields of its head.
    Raises CorruptPatchError if one is too short: before a caller makes room for its changes.
    """
    data = np.empty(sum(len(body.data) + SPARE_BYTES for body in bodies), np.uint8)
    rows, begin = [], 0
    for body in bodies:
        size = len(body.data)
        if size < _HEAD.size:
            raise CorruptPatchError(f"{body.what}: {size} bytes are too few for a paired stream")
        if body.num_changed > 8 * size:
            raise refusal(OTHER_COUNT, body)
        end = begin + size
        data[begin:end] = np.frombuffer(body.data, np.uint8)
        data[end : end + SPARE_BYTES] = 0
        rows.append((begin + _HEAD.size, end, *_HEAD.unpack_from(body.data)))
        begin = end + SPARE_BYTES
    return data, np.array(rows, np.int64)


def refusal(verdict: int, body: Body) -> CorruptPatchError:
    """What is wrong with a body that has been opened."""
    shift, fine, last_class, last, *_ = _HEAD.unpack_from(body.data)
    problems = {
        IMPOSSIBLE: f"{last + 1} pairs of {last_class + 1} classes, of {fine} bits, shifted by "
        f"{shift}, cannot be",
        BAD_WIDTHS: f"widths of {last + 1} pairs do not sum to {TOTAL}",
        BAD_PARTS: "the parts of a paired stream do not fit its length",
        OTHER_COUNT: f"the paired stream does not hold {body.num_changed} changes",
        WIDE_STEP: "a step of a paired stream has more than 16 bits",
    }
    return CorruptPatchError(f"{body.what}: {problems[verdict]}")
