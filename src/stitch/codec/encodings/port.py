"""The port that every encoding implements, and the old words that decoding may ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from stitch.codec import kernels
from stitch.codec.buckets import ALIGNMENT, DEFAULT_BUCKET_ELEMENTS, Bucket, Slice
from stitch.codec.changes import BucketChanges, bounds_by_slice, read_slice
from stitch.codec.update import JointUpdate
from stitch.codec.words import WORD_DTYPES, Positions, Words
from stitch.tensors.host import HostWeights
from stitch.tensors.reader import WeightReader

Reads = Literal["changed", "bucket"]


class _Row(NamedTuple):
    """A slice, and the bounds of its positions; see `changes.SliceBounds`."""

    piece: Slice
    lo: int
    hi: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class DecodedChanges:
    """positions: (k,) positions, ascending in the bucket, or None: every word of the bucket.

    old, new: (k,) words, or (num_elements,) without positions.
    gains: (n, 2) for each slice, what its tensor's digest lanes gain; None: not known yet.
    ends: (n,) for each slice, where its positions end; known if gains are. Then positions count
    from the start of their tensor. None: not known yet, and positions count along the bucket.
    The arrays belong to whoever gets them.
    """

    positions: Positions | None
    old: Words
    new: Words
    gains: npt.NDArray[np.uint64] | None = None
    ends: npt.NDArray[np.int64] | None = None


class Payload(NamedTuple):
    """The payload of a bucket, and what the patch says of it. `what` names it in errors."""

    data: memoryview
    bucket: Bucket
    num_changed: int
    what: str


def places_in(weights: HostWeights, slices: npt.NDArray[np.int64]) -> kernels.Places:
    """Where the words of slices (n, 3), see `Bucket.table`, lie in memory (n, 4)."""
    places = np.empty((len(slices), len(kernels.PLACE)), np.int64)
    places[:, 0] = slices[:, 1]
    np.subtract(slices[:, 2], slices[:, 1], out=places[:, 1])
    places[:, 2:] = weights.extents[slices[:, 0]]
    return places


@dataclass(frozen=True, kw_only=True)
class OldWords:
    """The words of one bucket before its changes."""

    bucket: Bucket
    weights: WeightReader

    def whole(self) -> list[Words]:
        """All words, slice by slice."""
        schema = self.weights.schema
        return [read_slice(self.weights, schema, piece) for piece in self.bucket.slices]

    def _places(self) -> kernels.Places | None:
        """Where the slices' words lie in memory (n, 4), or None if that takes reading them."""
        if not isinstance(self.weights, HostWeights):
            return None
        return places_in(self.weights, self.bucket.table)

    def take_steps(
        self, positions: Positions, steps: kernels.Numbers
    ) -> tuple[DecodedChanges, int]:
        """The changes that take `steps` (k,) at ascending `positions` (k,) inside the bucket.

        `steps` are of at least 16 bits. Also returns how many are 0 or too wide for a word. Reads
        only around the positions, which then count from the start of their tensors.
        """
        olds = np.empty(positions.size, WORD_DTYPES[self.bucket.word_bytes])
        news = np.empty_like(olds)
        dtype, places = self.bucket.dtype, self._places()
        if places is not None:
            gains, ends, num_bad = kernels.take_steps(places, dtype, positions, steps, olds, news)
        else:
            num_bad, gains_by_run, ends_by_run = 0, [], []
            for rows in self._runs(positions):
                part = slice(rows[0].lo, rows[-1].hi)
                positions[part] -= rows[0].offset
                held: list[Words] = []
                found = kernels.take_steps(
                    self._read_around(rows, positions, held),
                    dtype,
                    positions[part],
                    steps[part],
                    olds[part],
                    news[part],
                )
                gains_by_run.append(found[0])
                ends_by_run.append(part.start + found[1])
                num_bad += found[2]
            gains, ends = np.concatenate(gains_by_run), np.concatenate(ends_by_run)
        decoded = DecodedChanges(positions=positions, old=olds, new=news, gains=gains, ends=ends)
        return decoded, num_bad

    def with_gains(self, found: DecodedChanges) -> DecodedChanges:
        """Listed changes with their gains and ends, where these cost no reading.

        Their positions, the same array, then count from the start of their tensors.
        """
        if found.gains is not None or found.positions is None:
            return found
        places = self._places()
        if places is None:
            return found
        gains, ends = kernels.sum_changes(places, found.positions, found.old, found.new)
        return replace(found, gains=gains, ends=ends)

    def _runs(self, positions: Positions) -> Iterator[list[_Row]]:
        """The slices in runs whose words may be held at a time, with the bounds of each."""
        bounds = bounds_by_slice(self.bucket, positions)
        run: list[_Row] = []
        room = DEFAULT_BUCKET_ELEMENTS
        for piece, (lo, hi, offset) in zip(self.bucket.slices, bounds, strict=True):
            if run and piece.num_elements > room:
                yield run
                run, room = [], DEFAULT_BUCKET_ELEMENTS
            run.append(_Row(piece, lo, hi, offset))
            room -= piece.num_elements
        yield run

    def _read_around(
        self, rows: Sequence[_Row], positions: Positions, held: list[Words]
    ) -> kernels.Places:
        """Places of the words around the rows' positions; what was read is added to `held`.

        These positions count from the start of the first row, the rows' offsets from the bucket's.
        """
        schema, width = self.weights.schema, self.bucket.word_bytes
        places = np.zeros((len(rows), len(kernels.PLACE)), np.int64)
        for place, (piece, lo, hi, offset) in zip(places, rows, strict=True):
            place[:2] = piece.start, piece.num_elements
            if hi == lo:
                continue
            num_words = schema.tensors[piece.tensor].num_words
            to_tensor = piece.start - offset + rows[0].offset
            begin = (positions.item(lo) + to_tensor) // ALIGNMENT * ALIGNMENT
            end = min(num_words, positions.item(hi - 1) + to_tensor + ALIGNMENT)
            end -= end % ALIGNMENT if end < num_words else 0
            old = read_slice(self.weights, schema, Slice(piece.tensor, begin, end))
            held.append(old)
            place[2:] = old.ctypes.data - begin * width, end
        return places


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


@runtime_checkable
class Joining(Encoding, Protocol):
    """An encoding that decodes payloads of several buckets together, faster than one by one."""

    def joins(self, payload: memoryview, bucket: Bucket) -> bool:
        """Whether `decode_together` takes this payload."""
        ...

    def decode_together(
        self, payloads: Sequence[Payload], weights: HostWeights
    ) -> tuple[JointUpdate, npt.NDArray[np.uint64]]:
        """As `decode`, for payloads of one dtype that `joins` was asked about, each of any bytes.

        Also returns what the digest lanes of each slice's tensor gain (n, 2).
        """
        ...
