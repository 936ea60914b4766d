"""`gaps`: distances between changed positions, and signed ULP steps. See docs/format.md, "gaps".

Both are numbers of one paired stream where that pays, and of a stream each otherwise.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stitch.codec import kernels
from stitch.codec.buckets import Bucket
from stitch.codec.changes import BucketChanges
from stitch.codec.encodings.port import DecodedChanges, OldWords, Reads
from stitch.codec.pairs import MOST_WORD_BYTES
from stitch.codec.streams import (
    is_paired,
    read_changes,
    read_numbers,
    write_changes,
    write_numbers,
)
from stitch.codec.words import SIGNED_DTYPES, Positions
from stitch.errors import CorruptPatchError

GAP_DTYPE = np.dtype("<u4")


def step_dtype(word_bytes: int) -> np.dtype[np.signedinteger[Any]]:
    """Steps of 8-bit words travel as 16-bit numbers, the narrowest that every pcodec takes."""
    return SIGNED_DTYPES[max(2, word_bytes)]


class Gaps:
    """Decoding touches the changed elements only."""

    reads: Reads = "changed"
    lists_changes = True

    def encode(self, changes: BucketChanges) -> bytes:
        bucket = changes.bucket
        paired = write_changes(changes)
        if paired is not None:
            return paired
        gaps = np.empty(changes.num_changed, GAP_DTYPE)
        steps = np.empty(changes.num_changed, step_dtype(bucket.word_bytes))
        done, before = 0, -1
        for positions, old, new in changes.blocks():
            if positions.size:
                part = slice(done, done + positions.size)
                kernels.to_gaps(positions, before, gaps[part])
                kernels.to_steps(old, new, bucket.dtype, steps[part])
                done, before = part.stop, int(positions[-1])
        return write_numbers(gaps) + write_numbers(steps)

    def decode(
        self, payload: memoryview, *, num_changed: int, old: OldWords, what: str
    ) -> DecodedChanges:
        bucket = old.bucket
        if bucket.word_bytes <= MOST_WORD_BYTES and is_paired(payload):
            positions, steps, rest = read_changes(payload, num_changed, what)
        else:
            positions, steps, rest = self._two_streams(payload, num_changed, bucket, what)
        if len(rest):
            raise CorruptPatchError(f"{what}: {len(rest)} bytes after the changes")
        if positions[-1] >= bucket.num_elements:
            raise CorruptPatchError(
                f"{what}: position {positions[-1]} is outside the bucket of {bucket.num_elements}"
            )
        decoded, num_bad = old.take_steps(positions, steps)
        if num_bad:
            raise CorruptPatchError(
                f"{what}: a step is zero or too wide for its word ({num_bad} of {num_changed} are)"
            )
        return decoded

    @staticmethod
    def _two_streams(
        payload: memoryview, num_changed: int, bucket: Bucket, what: str
    ) -> tuple[Positions, kernels.Numbers, memoryview]:
        """Positions and steps (k,), and the bytes after them."""
        gaps, rest = read_numbers(payload, num_changed, GAP_DTYPE, f"{what}: gaps")
        steps, rest = read_numbers(
            rest, num_changed, step_dtype(bucket.word_bytes), f"{what}: steps"
        )
        # At most 2^28 gaps below 2^32: the sum cannot overflow, and positions ascend anyway.
        return kernels.to_positions(gaps), steps, rest
