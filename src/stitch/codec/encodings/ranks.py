"""`ranks`: distances inside magnitude classes, and steps of magnitudes. See docs/format.md."""

from __future__ import annotations

import struct

import numpy as np

from stitch.codec.changes import BucketChanges
from stitch.codec.encodings.port import DecodedChanges, OldWords, Reads
from stitch.codec.ranks import kernels
from stitch.codec.ranks.classes import class_words
from stitch.codec.ranks.kernels import Flips, Values
from stitch.codec.ranks.scales import read_scales, scales_of, write_scales
from stitch.codec.ranks.table import read_table, write_table
from stitch.codec.ulp import is_ordered_by_sign
from stitch.codec.words import SIGNED_DTYPES, Words
from stitch.errors import CorruptPatchError

BY_EXPONENT, BY_SCALE = 0, 1
"""How the classes are found."""
_HEAD = struct.Struct("<BB")
_LENGTH = struct.Struct("<I")


class Ranks:
    """Decoding reads every old word of the bucket, once."""

    reads: Reads = "bucket"
    lists_changes = True

    def encode(self, changes: BucketChanges) -> bytes:
        bucket = changes.bucket
        values, flips = values_between(changes.old, changes.new, bucket.dtype)
        weights = changes.old_weights
        scales = [scales_of(piece.tensor, weights.schema) for piece in bucket.slices]
        by_scale = any(scales)
        slices = class_words(bucket, changes.old_slices, scales, weights)
        coded = kernels.encode(slices, changes.positions, values, flips)
        return b"".join(
            [
                _HEAD.pack(BY_SCALE if by_scale else BY_EXPONENT, len(coded.table) - 1),
                write_scales(scales) if by_scale else b"",
                write_table(coded.table),
                _LENGTH.pack(len(coded.bits)),
                coded.bits,
                coded.stream,
            ]
        )

    def decode(
        self, payload: memoryview, *, num_changed: int, old: OldWords, what: str
    ) -> DecodedChanges:
        bucket = old.bucket
        if len(payload) < _HEAD.size:
            raise CorruptPatchError(f"{what}: {len(payload)} bytes are too few")
        kind, last_class = _HEAD.unpack_from(payload)
        rest, scales = payload[_HEAD.size :], None
        if kind == BY_SCALE:
            scales, rest = read_scales(rest, bucket, old.weights.schema, what)
        elif kind != BY_EXPONENT:
            raise CorruptPatchError(f"{what}: unknown kind of classes {kind}")
        table, rest = read_table(
            rest,
            last_class + 1,
            num_changed=num_changed,
            num_elements=bucket.num_elements,
            what=what,
        )
        if len(rest) < _LENGTH.size:
            raise CorruptPatchError(f"{what}: cut short after its class table")
        (num_bytes,) = _LENGTH.unpack_from(rest)
        rest = rest[_LENGTH.size :]
        if num_bytes > len(rest):
            raise CorruptPatchError(f"{what}: {num_bytes} bytes of raw bits, {len(rest)} are left")
        gaps, values, flips = kernels.decode(
            table, rest[:num_bytes], rest[num_bytes:], bucket.num_elements, what
        )
        held = old.whole()
        positions, before, after = kernels.place(
            zip(held, class_words(bucket, held, scales, old.weights), strict=True),
            table,
            gaps,
            values,
            flips,
            ordered=is_ordered_by_sign(bucket.dtype),
            what=what,
        )
        return DecodedChanges(positions=positions, old=before, new=after)


def values_between(old: Words, new: Words, dtype: str) -> tuple[Values, Flips]:
    """From `old` to `new` (k,): differences of magnitudes, and which sign bits flip.

    Integers: their differences, wrapped to the words' width; nothing flips.
    """
    if not is_ordered_by_sign(dtype):
        steps = (new - old).view(SIGNED_DTYPES[old.itemsize])
        return steps.astype(np.int64, copy=False), np.zeros(old.size, np.uint8)
    top = old.dtype.type(8 * old.itemsize - 1)
    size = old.dtype.type((1 << int(top)) - 1)
    values = (new & size).astype(np.int64) - (old & size).astype(np.int64)
    return values, ((old ^ new) >> top).astype(np.uint8)
