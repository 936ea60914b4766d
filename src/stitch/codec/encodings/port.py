"""The port that every encoding implements, and the old words that decoding may ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from stitch.codec.buckets import Bucket
from stitch.codec.changes import BucketChanges, bounds_by_slice, read_slice
from stitch.codec.words import WORD_DTYPES, Positions, Words

if TYPE_CHECKING:
    from stitch.tensors.reader import WeightReader


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


@dataclass(frozen=True, kw_only=True)
class DecodedChanges:
    """positions: (k,) ascending positions in the bucket, or None: every word of the bucket.

    old, new: (k,) words, or (num_elements,) without positions.
    """

    positions: Positions | None
    old: Words
    new: Words


class Encoding(Protocol):
    """How the changes of one bucket become payload bytes, and back."""

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
