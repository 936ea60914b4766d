"""What differs between two readers in one bucket, and how it is handed to encodings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stitch.codec import kernels
from stitch.codec.buckets import Bucket, Slice
from stitch.codec.words import WORD_DTYPES, Lanes, Positions, Words
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


def _read_slices(reader: WeightReader, bucket: Bucket) -> tuple[Words, ...]:
    return tuple(read_slice(reader, reader.schema, piece) for piece in bucket.slices)


_CHUNK_BYTES = 1 << 20
"""Compared, gathered and digested at a time, so that only the comparison waits for memory."""


@dataclass(frozen=True, kw_only=True)
class BucketChanges:
    """The changes of one bucket: positions in the bucket, and the words there.

    positions: (k,) ascending; old, new: (k,).
    gains: for each slice, what its tensor's digest lanes gain by the changes.
    old_weights, new_weights: where all words can be read.
    """

    bucket: Bucket
    positions: Positions
    old: Words
    new: Words
    gains: tuple[Lanes, ...]
    old_weights: WeightReader
    new_weights: WeightReader
    held_old: tuple[Words, ...] | None = None
    held_new: tuple[Words, ...] | None = None

    @property
    def old_slices(self) -> tuple[Words, ...]:
        """All old words, slice by slice; read again unless they are held."""
        if self.held_old is not None:
            return self.held_old
        return _read_slices(self.old_weights, self.bucket)

    @property
    def new_slices(self) -> tuple[Words, ...]:
        """All new words, slice by slice; read again unless they are held."""
        if self.held_new is not None:
            return self.held_new
        return _read_slices(self.new_weights, self.bucket)

    @property
    def num_changed(self) -> int:
        return int(self.positions.size)

    @property
    def density(self) -> float:
        return self.num_changed / self.bucket.num_elements


def find_changes(bucket: Bucket, old: WeightReader, new: WeightReader) -> BucketChanges:
    """Compare the bits of one bucket, and digest what changed."""
    dtype = WORD_DTYPES[bucket.word_bytes]
    chunk = _CHUNK_BYTES // bucket.word_bytes
    found: list[Positions] = [np.empty(0, np.int64)]
    olds: list[Words] = [np.empty(0, dtype)]
    news: list[Words] = [np.empty(0, dtype)]
    old_slices, new_slices, gains = [], [], []
    scratch = np.empty(chunk + 1, np.uint32)
    offset = 0
    for piece in bucket.slices:
        old_words = read_slice(old, old.schema, piece)
        new_words = read_slice(new, old.schema, piece)
        gain = np.zeros(2, np.uint64)
        for at in range(0, piece.num_elements, chunk):
            old_chunk, new_chunk = old_words[at : at + chunk], new_words[at : at + chunk]
            positions = kernels.find_changed(old_chunk, new_chunk, scratch)
            if not positions.size:
                continue
            changed = new_chunk[positions]
            first = (piece.start + at) * bucket.word_bytes // 8
            gain += kernels.sum_change(old_chunk, first, positions, changed)
            found.append(positions + (offset + at))
            olds.append(old_chunk[positions])
            news.append(changed)
        old_slices.append(old_words)
        new_slices.append(new_words)
        gains.append(gain)
        offset += piece.num_elements
    return BucketChanges(
        bucket=bucket,
        positions=np.concatenate(found),
        old=np.concatenate(olds),
        new=np.concatenate(news),
        gains=tuple(gains),
        old_weights=old,
        new_weights=new,
        held_old=tuple(old_slices),
        held_new=tuple(new_slices),
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
