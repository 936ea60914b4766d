"""Buckets: the units that are encoded alone. See docs/format.md, "Buckets"."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stitch.errors import CorruptPatchError
from stitch.types import DTYPE_BITS, Schema

ALIGNMENT = 8
"""Slices are cut on multiples of this many elements, so a cut never splits an 8-byte word."""

DEFAULT_BUCKET_ELEMENTS = 1 << 23
MAX_BUCKET_ELEMENTS = 1 << 28


class Slice(NamedTuple):
    """Elements `start` (inclusive) to `stop` (exclusive) of the flat tensor `tensor`.

    `tensor` is an index into the schema; an element is a storage word.
    """

    tensor: int
    start: int
    stop: int

    @property
    def num_elements(self) -> int:
        return self.stop - self.start


_START, _STOP = operator.itemgetter(1), operator.itemgetter(2)


@dataclass(frozen=True)
class Bucket:
    """An ordered list of slices of one dtype, treated as one flat array of words."""

    dtype: str
    slices: tuple[Slice, ...]

    @cached_property
    def num_elements(self) -> int:
        count: int = sum(map(_STOP, self.slices)) - sum(map(_START, self.slices))
        return count

    @cached_property
    def table(self) -> npt.NDArray[np.int64]:
        """(slices, 3): the tensor, start and stop of each slice."""
        return np.array(self.slices, np.int64).reshape(-1, 3)

    @cached_property
    def word_bytes(self) -> int:
        """Bytes of a storage word: 1, 2, 4 or 8 (as TensorSpec.word_bytes)."""
        return max(1, DTYPE_BITS.get(self.dtype, 8) // 8)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.word_bytes

    def __str__(self) -> str:
        first = self.slices[0]
        more = f" and {len(self.slices) - 1} more" if len(self.slices) > 1 else ""
        return f"{self.dtype} tensor {first.tensor} [{first.start}:{first.stop}]{more}"


def plan_buckets(schema: Schema, max_elements: int = DEFAULT_BUCKET_ELEMENTS) -> list[Bucket]:
    """Cut a schema into buckets of at most `max_elements` elements.

    Large tensors are cut into several buckets, on multiples of ALIGNMENT elements; small ones of
    one dtype share a bucket. Every element is in exactly one bucket; empty tensors are in none.
    The result is ordered by the first slice of each bucket.
    """
    if not ALIGNMENT <= max_elements <= MAX_BUCKET_ELEMENTS:
        raise ValueError(f"max_elements must be in {ALIGNMENT}..{MAX_BUCKET_ELEMENTS}")
    done: list[Bucket] = []
    open_slices: dict[str, list[Slice]] = {}
    room: dict[str, int] = {}
    for tensor, spec in enumerate(schema.tensors):
        start = 0
        while start < spec.num_words:
            left = spec.num_words - start
            take = min(left, room.setdefault(spec.dtype, max_elements))
            if take < left:
                take -= take % ALIGNMENT
            if take:
                piece = Slice(tensor, start, start + take)
                open_slices.setdefault(spec.dtype, []).append(piece)
                start += take
                room[spec.dtype] -= take
            if start < spec.num_words:
                done.append(Bucket(spec.dtype, tuple(open_slices.pop(spec.dtype))))
                room[spec.dtype] = max_elements
    done += [Bucket(dtype, tuple(slices)) for dtype, slices in open_slices.items()]
    return sorted(done, key=lambda bucket: bucket.slices[0])


def groups_of(buckets: Sequence[Bucket], size: int) -> list[list[Bucket]]:
    """The same buckets in order, in runs of up to `size` of one dtype that fit one bucket."""
    groups: list[list[Bucket]] = []
    room = 0
    for bucket in buckets:
        fits = bucket.num_elements <= room and bucket.dtype == groups[-1][0].dtype
        if fits and len(groups[-1]) < size:
            groups[-1].append(bucket)
        else:
            groups.append([bucket])
            room = MAX_BUCKET_ELEMENTS
        room -= bucket.num_elements
    return groups


def cut_bucket(bucket: Bucket, max_elements: int) -> list[Bucket]:
    """The same slices in order, cut on multiples of ALIGNMENT, as buckets of about `max_elements`.

    A bucket may have up to ALIGNMENT elements more.
    """
    max_elements = max(ALIGNMENT, max_elements - max_elements % ALIGNMENT)
    done: list[Bucket] = []
    slices: list[Slice] = []
    room = max_elements
    for piece in bucket.slices:
        start = piece.start
        while start < piece.stop:
            take = min(piece.stop - start, room + -room % ALIGNMENT)
            slices.append(Slice(piece.tensor, start, start + take))
            start, room = start + take, room - take
            if room <= 0:
                done.append(Bucket(bucket.dtype, tuple(slices)))
                slices, room = [], max_elements
    return done + ([Bucket(bucket.dtype, tuple(slices))] if slices else [])


def check_bucket(bucket: Bucket, schema: Schema) -> None:
    """Raise CorruptPatchError unless every slice lies inside its tensor and on allowed cuts."""
    if not bucket.slices:
        raise CorruptPatchError(f"a {bucket.dtype} bucket has no slices")
    for piece in bucket.slices:
        if not 0 <= piece.tensor < len(schema):
            raise CorruptPatchError(
                f"bucket {bucket}: there is no tensor {piece.tensor}, the schema has {len(schema)}"
            )
        spec = schema.tensors[piece.tensor]
        if spec.dtype != bucket.dtype:
            raise CorruptPatchError(f"bucket {bucket}: tensor {spec} is not {bucket.dtype}")
        if not 0 <= piece.start < piece.stop <= spec.num_words:
            raise CorruptPatchError(
                f"bucket {bucket}: slice [{piece.start}:{piece.stop}] is not inside tensor {spec} "
                f"of {spec.num_words} elements"
            )
        at_end = piece.stop == spec.num_words
        if piece.start % ALIGNMENT or (piece.stop % ALIGNMENT and not at_end):
            raise CorruptPatchError(
                f"bucket {bucket}: slice [{piece.start}:{piece.stop}] of tensor {spec} is not cut "
                f"on multiples of {ALIGNMENT} elements"
            )
    if bucket.num_elements > MAX_BUCKET_ELEMENTS:
        raise CorruptPatchError(
            f"bucket {bucket}: {bucket.num_elements} elements, {MAX_BUCKET_ELEMENTS} are allowed"
        )


def check_disjoint(buckets: Iterable[Bucket], schema: Schema) -> None:
    """Raise CorruptPatchError if two slices, of any buckets, share an element."""
    pieces = sorted(piece for bucket in buckets for piece in bucket.slices)
    for before, after in itertools.pairwise(pieces):
        if before.tensor == after.tensor and after.start < before.stop:
            raise CorruptPatchError(
                f"slices [{before.start}:{before.stop}] and [{after.start}:{after.stop}] of tensor "
                f"{schema.tensors[before.tensor]} overlap"
            )
