"""`gaps`: distances between changed positions, and signed ULP steps. See docs/format.md, "gaps"."""

from __future__ import annotations

from typing import Any

import numpy as np

from stitch.codec.changes import BucketChanges
from stitch.codec.encodings.port import DecodedChanges, OldWords
from stitch.codec.streams import read_numbers, write_numbers
from stitch.codec.ulp import steps_between, take_steps
from stitch.codec.words import SIGNED_DTYPES
from stitch.errors import CorruptPatchError

GAP_DTYPE = np.dtype("<u4")


def step_dtype(word_bytes: int) -> np.dtype[np.signedinteger[Any]]:
    """Steps of 8-bit words travel as 16-bit numbers, the narrowest that every pcodec takes."""
    return SIGNED_DTYPES[max(2, word_bytes)]


class Gaps:
    """Decoding touches the changed elements only."""

    def encode(self, changes: BucketChanges) -> bytes:
        gaps = np.diff(changes.positions, prepend=-1) - 1
        steps = steps_between(changes.old, changes.new, changes.bucket.dtype)
        wide = steps.astype(step_dtype(changes.bucket.word_bytes), copy=False)
        return write_numbers(gaps.astype(GAP_DTYPE)) + write_numbers(wide)

    def decode(
        self, payload: memoryview, *, num_changed: int, old: OldWords, what: str
    ) -> DecodedChanges:
        bucket = old.bucket
        gaps, rest = read_numbers(payload, num_changed, GAP_DTYPE, f"{what}: gaps")
        wide, rest = read_numbers(
            rest, num_changed, step_dtype(bucket.word_bytes), f"{what}: steps"
        )
        if len(rest):
            raise CorruptPatchError(f"{what}: {len(rest)} bytes after the steps")
        # At most 2^28 gaps below 2^32: the sum cannot overflow, and positions ascend anyway.
        positions = np.cumsum(gaps, dtype=np.int64)
        positions += np.arange(num_changed)
        if positions[-1] >= bucket.num_elements:
            raise CorruptPatchError(
                f"{what}: position {positions[-1]} is outside the bucket of {bucket.num_elements}"
            )
        steps = wide.astype(SIGNED_DTYPES[bucket.word_bytes], copy=False)
        if not steps.all() or (steps.itemsize < wide.itemsize and not np.array_equal(steps, wide)):
            raise CorruptPatchError(f"{what}: a step is zero or too wide for its word")
        before = old.at(positions)
        return DecodedChanges(
            positions=positions, old=before, new=take_steps(before, steps, bucket.dtype)
        )
