"""The port that every encoding implements, and the old words that decoding may ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from stitch.codec import kernels
from stitch.codec.buckets import ALIGNMENT, Bucket
from stitch.codec.changes import BucketChanges, SliceBounds, bounds_by_slice, read_slice
from stitch.codec.words import WORD_DTYPES, Lanes, Positions, Words

if TYPE_CHECKING:
    from stitch.tensors.reader import WeightReader


Reads = Literal["changed", "bucket"]


@dataclass(frozen=True, kw_only=True)
class DecodedChanges:
    """positions: (k,) ascending positions in the bucket, or None: every word of the bucket.

    old, new: (k,) words, or (num_elements,) without positions.
    gains: for each slice, what its tensor's digest lanes gain; None: not known yet.
    bounds: what `bounds_by_slice` says of the positions; None: not asked yet.
    The arrays belong to whoever gets them.
    """

    positions: Positions | None
    old: Words
    new: Words
    gains: tuple[Lanes, ...] | None = None
    bounds: list[SliceBounds] | None = None


@dataclass(frozen=True, kw_only=True)
class OldWords:
    """The words of one bucket before its changes."""

    bucket: Bucket
    weights: WeightReader

    def whole(self) -> list[Words]:
        """All words, slice by slice."""
        schema = self.weights.schema
        return [read_slice(self.weights, schema, piece) for piece in self.bucket.slices]

    def at(self, positions: Positions) -> Words:
        """The words (k,) at ascending positions (k,) in the bucket; reads only around them."""
        schema = self.weights.schema
        parts: list[Words] = [np.empty(0, WORD_DTYPES[self.bucket.word_bytes])]
        rows = bounds_by_slice(self.bucket, positions)
        for piece, (lo, hi, offset) in zip(self.bucket.slices, rows, strict=True):
            if hi > lo:
                local = positions[lo:hi] - (offset - piece.start)
                begin, end = int(local[0]), int(local[-1]) + 1
                name = schema.tensors[piece.tensor].name
                parts.append(self.weights.read(name, begin, end)[local - begin])
        return np.concatenate(parts)

    def take_steps(
        self, positions: Positions, steps: kernels.Numbers
    ) -> tuple[DecodedChanges, int]:
        """The changes that take `steps` (k,) at ascending `positions` (k,) inside the bucket.

        `steps` are of at least 16 bits. Also returns how many are 0 or too wide for a word. Reads
        only around the positions.
        """
        bucket, schema = self.bucket, self.weights.schema
        width = bucket.word_bytes
        olds = np.empty(positions.size, WORD_DTYPES[width])
        news = np.empty_like(olds)
        slices = []
        rows = bounds_by_slice(bucket, positions)
        for piece, (lo, hi, offset) in zip(bucket.slices, rows, strict=True):
            if hi == lo:
                slices.append(kernels.StepSlice(olds, 0, 0, lo, hi))
                continue
            spec = schema.tensors[piece.tensor]
            to_tensor = piece.start - offset
            begin = (positions.item(lo) + to_tensor) // ALIGNMENT * ALIGNMENT
            end = min(spec.num_words, positions.item(hi - 1) + to_tensor + ALIGNMENT)
            end -= end % ALIGNMENT if end < spec.num_words else 0
            old = self.weights.read(spec.name, begin, end)
            first, shift = begin * width // 8, begin - to_tensor
            slices.append(kernels.StepSlice(old, first, shift, lo, hi))
        gains, num_bad = kernels.take_steps(slices, bucket.dtype, positions, steps, olds, news)
        decoded = DecodedChanges(
            positions=positions, old=olds, new=news, gains=tuple(gains), bounds=rows
        )
        return decoded, num_bad


class Encoding(Protocol):
    """How the changes of one bucket become payload bytes, and back."""

    @property
    def reads(self) -> Reads:
        """What decoding reads of the old words: those that change, or the bucket's."""
        ...

    @property
    def lists_changes(self) -> bool:
        """Whether memory grows with the number of changes rather than with the bucket."""
        ...

    def encode(self, changes: BucketChanges) -> bytes:
        """The payload of at least one change."""
        ...

    def decode(
        self, payload: memoryview, *, num_changed: int, old: OldWords, what: str
    ) -> DecodedChanges:
        """The changes in `payload`, of which there must be exactly `num_changed`.

        `num_changed` is in 1..num_elements of the bucket; its slices are inside the tensors. All
        else is untrusted: raises CorruptPatchError (starting with `what`) unless positions ascend
        inside the bucket, every listed word changes, and no byte is left over.
        """
        ...
