"""What differs between two readers in one bucket, and how it is handed to encodings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from stitch.codec import kernels
from stitch.codec.buckets import Bucket, Slice
from stitch.codec.words import WORD_DTYPES, Lanes, Positions, Words
from stitch.errors import CorruptCheckpointError
from stitch.tensors.reader import WeightReader, is_on_device
from stitch.types import Schema

Listed = tuple[Positions, Words, Words]
"""Ascending positions (k,), and the old and new words (k,) there."""

_FIRST_ROOM = 64
"""There is room at first for one changed element in this many."""
_LISTED = 8
"""Where more than one element in this many changed, changes are listed only when asked for."""
_BLOCK_ELEMENTS = 1 << 18


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


class BucketChanges:
    """The changes of one bucket: positions in the bucket, and the words there.

    positions: (k,) ascending; old, new: (k,). Where very much changed they are listed when they are
    first asked for; :meth:`blocks` spares their memory.
    gains: for each slice, what its tensor's digest lanes gain by the changes.
    old_weights, new_weights: where all words can be read.
    """

    def __init__(
        self,
        *,
        bucket: Bucket,
        positions: Positions | None = None,
        old: Words | None = None,
        new: Words | None = None,
        num_changed: int | None = None,
        gains: tuple[Lanes, ...],
        old_weights: WeightReader,
        new_weights: WeightReader,
        held_old: tuple[Words, ...] | None = None,
        held_new: tuple[Words, ...] | None = None,
    ) -> None:
        """Give positions, old and new, or else their number."""
        self.bucket, self.gains = bucket, gains
        self.old_weights, self.new_weights = old_weights, new_weights
        self._held_old, self._held_new = held_old, held_new
        self._listed: Listed | None = None
        if positions is not None and old is not None and new is not None:
            self._listed = positions, old, new
            num_changed = int(positions.size)
        assert num_changed is not None
        self.num_changed = num_changed

    @property
    def positions(self) -> Positions:
        return self._all()[0]

    @property
    def old(self) -> Words:
        return self._all()[1]

    @property
    def new(self) -> Words:
        return self._all()[2]

    @property
    def old_slices(self) -> tuple[Words, ...]:
        """All old words, slice by slice; read again unless they are held."""
        if self._held_old is not None:
            return self._held_old
        return _read_slices(self.old_weights, self.bucket)

    @property
    def new_slices(self) -> tuple[Words, ...]:
        """All new words, slice by slice; read again unless they are held."""
        if self._held_new is not None:
            return self._held_new
        return _read_slices(self.new_weights, self.bucket)

    @property
    def density(self) -> float:
        return self.num_changed / self.bucket.num_elements

    def let_go(self) -> None:
        """Hold the list of changes only: all words will be read again if they are asked for."""
        self._all()
        self._held_old = self._held_new = None

    def blocks(self) -> Iterator[Listed]:
        """(positions, old, new) of all changes, some at a time; use each before the next."""
        if self._listed is not None:
            yield self._listed
            return
        room = kernels.Room.of(self.bucket.word_bytes, _BLOCK_ELEMENTS)
        for _ in self._scan(room):
            yield room.listed()
            room.count = 0
        yield room.listed()

    def _all(self) -> Listed:
        if self._listed is None:
            room = kernels.Room.of(self.bucket.word_bytes, self.num_changed)
            for _ in self._scan(room):
                raise CorruptCheckpointError(f"bucket {self.bucket}: the weights changed meanwhile")
            self._listed = room.listed()
        return self._listed

    def _scan(self, room: kernels.Room) -> Iterator[None]:
        gains = [np.zeros(2, np.uint64) for _ in self.gains]
        return _scan(self.bucket, self.old_slices, self.new_slices, room, gains)


def find_changes(bucket: Bucket, old: WeightReader, new: WeightReader) -> BucketChanges:
    """Compare the bits of one bucket, and digest what changed.

    Where both readers have their words on a device, that is done there.
    """
    if is_on_device(old) and is_on_device(new):
        from stitch.codec import torch_changes

        return torch_changes.find_changes(bucket, old, new)
    old_slices, new_slices = _read_slices(old, bucket), _read_slices(new, bucket)
    gains = tuple(np.zeros(2, np.uint64) for _ in bucket.slices)
    room = kernels.Room.of(bucket.word_bytes, bucket.num_elements // _FIRST_ROOM)
    most = bucket.num_elements // _LISTED
    unlisted = 0
    for _ in _scan(bucket, old_slices, new_slices, room, gains):
        if unlisted or room.count > most:
            unlisted += room.count
            room.count = 0
        else:
            room.grow()
    found: tuple[Positions | None, Words | None, Words | None] = None, None, None
    if not unlisted:
        found = room.listed()
    return BucketChanges(
        bucket=bucket,
        positions=found[0],
        old=found[1],
        new=found[2],
        num_changed=unlisted + room.count,
        gains=gains,
        old_weights=old,
        new_weights=new,
        held_old=old_slices,
        held_new=new_slices,
    )


def merged(found: Sequence[BucketChanges]) -> BucketChanges:
    """The listed changes of several buckets of one dtype, as those of one that has all slices."""
    if len(found) == 1:
        return found[0]
    starts = [0, *itertools.accumulate(changes.bucket.num_elements for changes in found)]
    slices = tuple(piece for changes in found for piece in changes.bucket.slices)
    moved = [changes.positions + start for changes, start in zip(found, starts, strict=False)]
    return BucketChanges(
        bucket=Bucket(found[0].bucket.dtype, slices),
        positions=np.concatenate(moved),
        old=np.concatenate([changes.old for changes in found]),
        new=np.concatenate([changes.new for changes in found]),
        gains=tuple(gain for changes in found for gain in changes.gains),
        old_weights=found[0].old_weights,
        new_weights=found[0].new_weights,
    )


def _scan(
    bucket: Bucket,
    old_slices: Sequence[Words],
    new_slices: Sequence[Words],
    room: kernels.Room,
    gains: Sequence[Lanes],
) -> Iterator[None]:
    """As `kernels.scan`, for the slices of a bucket."""
    offset = 0
    for piece, old, new, gain in zip(bucket.slices, old_slices, new_slices, gains, strict=True):
        first = piece.start * bucket.word_bytes // 8
        yield from kernels.scan(old, new, room, gain, first=first, base=offset)
        offset += piece.num_elements


SliceBounds = tuple[int, int, int]
"""(lo, hi, offset) of a slice: `positions[lo:hi]` are in it, after `offset` elements."""


def bounds_by_slice(bucket: Bucket, positions: Positions) -> list[SliceBounds]:
    """The bounds of each slice in ascending positions (k,) of the bucket."""
    ends = list(itertools.accumulate(piece.num_elements for piece in bucket.slices))
    his: list[int] = positions.searchsorted(ends).tolist()
    return list(zip([0, *his[:-1]], his, [0, *ends[:-1]], strict=True))
