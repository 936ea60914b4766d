"""`gaps`: distances between changed positions, and signed ULP steps. See docs/format.md, "gaps".

Both are numbers of one paired stream where that pays, and of a stream each otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stitch.codec import kernels, pairs
from stitch.codec.buckets import Bucket
from stitch.codec.changes import BucketChanges
from stitch.codec.encodings.port import DecodedChanges, OldWords, Payload, Reads, places_in
from stitch.codec.pairs import MOST_WORD_BYTES
from stitch.codec.streams import (
    is_paired,
    paired_body,
    read_numbers,
    write_changes,
    write_numbers,
)
from stitch.codec.ulp import is_ordered_by_sign
from stitch.codec.update import JointUpdate
from stitch.codec.words import SIGNED_DTYPES, WORD_DTYPES, Positions
from stitch.errors import CorruptPatchError
from stitch.tensors.host import HostWeights

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
        positions: Positions
        steps: kernels.Numbers
        if bucket.word_bytes <= MOST_WORD_BYTES and is_paired(payload):
            body = self._body(payload, what)
            positions, steps = pairs.read(body, num_changed, what)
        else:
            positions, steps, rest = self._two_streams(payload, num_changed, bucket, what)
            _check_end(rest, what)
        if positions[-1] >= bucket.num_elements:
            raise _outside(positions[-1], bucket, what)
        decoded, num_bad = old.take_steps(positions, steps)
        if num_bad:
            raise _bad_steps(num_bad, num_changed, what)
        return decoded

    @staticmethod
    def joins(payload: memoryview, bucket: Bucket) -> bool:
        """Whether `decode_together` takes this payload: one such as `encode` writes."""
        narrow = bucket.word_bytes <= MOST_WORD_BYTES
        return narrow and is_ordered_by_sign(bucket.dtype) and is_paired(payload)

    def decode_together(
        self, payloads: Sequence[Payload], weights: HostWeights
    ) -> tuple[JointUpdate, npt.NDArray[np.uint64]]:
        """Decode payloads of buckets of one dtype by one compiled call; all of them `joins`.

        Also returns what the digest lanes of each slice's tensor gain (n, 2).
        """
        from stitch.codec import pair_bodies

        bodies = [
            pairs.Body(self._body(payload.data, payload.what), payload.num_changed, payload.what)
            for payload in payloads
        ]
        data, rows = pairs.opened(bodies)
        buckets = [
            (payload.num_changed, len(payload.bucket.slices), payload.bucket.num_elements)
            for payload in payloads
        ]
        slices = np.concatenate([payload.bucket.table for payload in payloads])
        num_changed = sum(payload.num_changed for payload in payloads)
        dtype, width = payloads[0].bucket.dtype, payloads[0].bucket.word_bytes
        positions, steps = np.empty(num_changed, np.int64), np.empty(num_changed, np.int16)
        olds = np.empty(num_changed, WORD_DTYPES[width])
        news = np.empty_like(olds)
        gains = np.zeros((len(slices), 2), np.uint64)
        ends = np.empty(len(slices), np.int64)
        found = np.zeros(2, np.int64)
        take = pair_bodies.take_changes(width, is_ordered_by_sign(dtype))
        count = take(
            data,
            rows,
            np.array(buckets, np.int64),
            places_in(weights, slices),
            positions,
            steps,
            olds,
            news,
            gains,
            ends,
            found,
        )
        if count < len(payloads):
            verdict, detail = found.tolist()
            _, bucket, num_here, what = payloads[count]
            if verdict == pairs.OUTSIDE:
                raise _outside(detail, bucket, what)
            if verdict == pairs.BAD_STEPS:
                raise _bad_steps(detail, num_here, what)
            raise pairs.refusal(verdict, bodies[count])
        tensors = slices[:, 0]
        joint = JointUpdate(tensors=tensors, ends=ends, positions=positions, new=news, old=olds)
        return joint, gains

    @staticmethod
    def _body(payload: memoryview, what: str) -> memoryview:
        body, rest = paired_body(payload, what)
        _check_end(rest, what)
        return body

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


def _check_end(rest: memoryview, what: str) -> None:
    if len(rest):
        raise CorruptPatchError(f"{what}: {len(rest)} bytes after the changes")


def _outside(position: int, bucket: Bucket, what: str) -> CorruptPatchError:
    return CorruptPatchError(
        f"{what}: position {position} is outside the bucket of {bucket.num_elements}"
    )


def _bad_steps(num_bad: int, num_changed: int, what: str) -> CorruptPatchError:
    return CorruptPatchError(
        f"{what}: a step is zero or too wide for its word ({num_bad} of {num_changed} are)"
    )
