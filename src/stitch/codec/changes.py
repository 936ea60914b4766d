"""What differs between two readers in one bucket, and how it is handed to encodings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stitch.codec import kernels
from stitch.codec.buckets import Bucket, Slice
from stitch.codec.words import WORD_DTYPES, Positions, Words
from stitch.errors import CorruptCheckpointError
from stitch.types import Schema

if TYPE_CHECKING:
    from stitch.tensors.reader import WeightReader


def read_slice(reader: WeightReader, schema: Schema, piece: Slice) -> Words:
    """The words of a slice, contiguous, length and dtype checked."""
    spec = schema.tensors[piece.tensor]
    words = np.ascontiguousarray(reader.read(spec.name, piece.start, piece.stop))
    if words.size != piece.num_elements or words.dtype != WORD_DTYPES[spec.word_bytes]:
        raise CorruptCheckpointError(
            f"tensor {spec}: reading [{piece.start}:{piece.stop}] gave {words.size} {words.dtype} "
            f"words, expected {piece.num_elements} {WORD_DTYPES[spec.word_bytes]}"
        )
    return words


@dataclass(frozen=True, kw_only=True)
class BucketChanges:
    """The changes of one bucket: positions in the bucket, and the words there.

    positions: (k,) ascending; old, new: (k,). old_slices, new_slices: all words, slice by slice.
    """

    bucket: Bucket
    positions: Positions
    old: Words
    new: Words
    old_slices: tuple[Words, ...]
    new_slices: tuple[Words, ...]

    @property
    def num_changed(self) -> int:
        return int(self.positions.size)

    @property
    def density(self) -> float:
        return self.num_changed / self.bucket.num_elements


def find_changes(bucket: Bucket, old: WeightReader, new: WeightReader) -> BucketChanges:
    """Compare the bits of one bucket."""
    dtype = WORD_DTYPES[bucket.word_bytes]
    found: list[Positions] = [np.empty(0, np.int64)]
    olds: list[Words] = [np.empty(0, dtype)]
    news: list[Words] = [np.empty(0, dtype)]
    old_slices, new_slices = [], []
    offset = 0
    for piece in bucket.slices:
        old_words = read_slice(old, old.schema, piece)
        new_words = read_slice(new, old.schema, piece)
        positions = kernels.find_changed(old_words, new_words)
        found.append(positions + offset)
        olds.append(old_words[positions])
        news.append(new_words[positions])
        old_slices.append(old_words)
        new_slices.append(new_words)
        offset += piece.num_elements
    return BucketChanges(
        bucket=bucket,
        positions=np.concatenate(found),
        old=np.concatenate(olds),
        new=np.concatenate(news),
        old_slices=tuple(old_slices),
        new_slices=tuple(new_slices),
    )


def bounds_by_slice(bucket: Bucket, positions: Positions) -> list[tuple[int, int, int]]:
    """For each slice (lo, hi, offset): `positions[lo:hi]` are in it, after `offset` elements."""
    ends = np.cumsum([piece.num_elements for piece in bucket.slices])
    his = np.searchsorted(positions, ends)
    rows = []
    lo = 0
    for piece, end, hi in zip(bucket.slices, ends.tolist(), his.tolist(), strict=True):
        rows.append((lo, hi, end - piece.num_elements))
        lo = hi
    return rows
