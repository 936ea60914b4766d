"""Which encoding a bucket gets: the smallest that is allowed, from a few samples.

`gaps` spends what the changes would cost if every element were as likely to change as any other;
`ranks` spends less by what the class of an element tells about whether it changes, the mutual
information of the two. It is estimated here, from the classes of some changed elements and of some
elements at large, rather than by encoding twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from stitch.codec.buckets import Slice
from stitch.codec.changes import BucketChanges, bounds_by_slice
from stitch.codec.encodings import ENCODINGS
from stitch.codec.ranks.classes import EXPONENTS, classes_of, classes_of_scales
from stitch.codec.ranks.scales import BlockScales, scales_of
from stitch.codec.words import Positions, Words
from stitch.errors import UsageError
from stitch.tensors.reader import WeightReader

Decode = Literal["any", "changed"]
"""What decoding may read of the old weights: anything, or only the words that change."""

_DENSE = 0.25
"""Share of changed elements above which a bucket goes `dense`.

`dense` is within 4 % of `gaps` there, and takes a third of the time or less. `ranks` can still be a
quarter smaller, but takes several times as long.
"""
_LEAST_SAVED_BITS = 0.4
"""What `ranks` must save per change, some 3 %: it reads the whole bucket, and takes its time."""
_CLASS_BITS = 50
"""What a class costs `ranks` in its table and until its models have learnt."""
_STREAMS_BITS, _SHORT_STREAM_BITS = 400, 2
"""What the streams of `gaps` cost on top of the changes: at most, and at most for each change."""
_CLASSES = 256
_SAMPLE, _NUM_RUNS = 4096, 32
"""Elements that are looked at, and in how many runs those at large lie."""

_MANY = 1 / 16
"""Share of changes above which enough are found among the elements at large; listing them all
might take memory that the encoding then does not need."""

Shares = npt.NDArray[np.float64]


def allowed_encodings(decode: str) -> tuple[str, ...]:
    """Names of the encodings whose decoding reads no more than `decode` allows."""
    if decode not in ("any", "changed"):
        raise UsageError(f"decode {decode!r} is not one of any, changed")
    return tuple(name for name, made in ENCODINGS.items() if decode in ("any", made.reads))


def needed_decode(encodings: Iterable[str]) -> Decode | None:
    """The strictest `decode` that allows all of these; None if this release lacks one of them."""
    names = {name for name in encodings if name != "absent"}
    if not names <= ENCODINGS.keys():
        return None
    return "changed" if names <= set(allowed_encodings("changed")) else "any"


def check_choice(encoding: str, decode: str) -> None:
    """Raise UsageError unless `encoding` is "auto" or the name of one that `decode` allows."""
    names = allowed_encodings(decode)
    if encoding != "auto" and encoding not in ENCODINGS:
        raise UsageError(f"encoding {encoding!r} is not one of auto, {', '.join(ENCODINGS)}")
    if encoding != "auto" and encoding not in names:
        raise UsageError(
            f"encoding {encoding!r} reads whole buckets to decode; decode {decode!r} allows "
            f"{', '.join(names)}"
        )


def choose(changes: BucketChanges, decode: str) -> str:
    """The name of the encoding that is likely the smallest of those that `decode` allows.

    `gaps` holds buckets of any density: where all elements change its distances cost nothing.
    """
    if decode == "changed":
        return "gaps"
    if changes.density > _DENSE:
        return "dense"
    return "ranks" if saved_bits(changes) > _LEAST_SAVED_BITS * changes.num_changed else "gaps"


def saved_bits(changes: BucketChanges) -> float:
    """About how many bits fewer than `gaps` `ranks` takes."""
    bucket, schema = changes.bucket, changes.old_weights.schema
    scales = [scales_of(piece.tensor, schema) for piece in bucket.slices]
    if bucket.dtype not in EXPONENTS and not any(scales):
        return 0.0
    at_large = _runs(bucket.num_elements)
    changed, old = _some_changes(changes, at_large)
    if any(scales):
        in_changed = _classes_by_scale(changes, scales, changed)
        in_all = _classes_by_scale(changes, scales, at_large)
    else:
        in_changed = classes_of(old, bucket.dtype)
        in_all = classes_of(_at(changes, changes.old_slices, at_large), bucket.dtype)
    return _saved_bits(in_changed, in_all, changes.num_changed, bucket.num_elements)


def _saved_bits(in_changed: Words, in_all: Words, num_changed: int, num_elements: int) -> float:
    """From the classes of some changed elements, and of some elements at large."""
    if not in_changed.size:  # all that changed lies outside the sample
        return 0.0
    sampled = np.bincount(in_changed, minlength=_CLASSES)
    changed = sampled * (num_changed / in_changed.size)
    total = np.bincount(in_all, minlength=_CLASSES) * (num_elements / in_all.size)
    total = np.maximum(total, changed)
    per_class = float(total @ _entropy_bits(changed / np.maximum(total, 1)))
    at_once = num_elements * float(_entropy_bits(np.array(num_changed / num_elements)))
    num_classes = int(np.count_nonzero(sampled))
    # Samples look more informative than they are, by this much on average (Miller and Madow).
    luck = num_changed * num_classes * (1 / in_changed.size + 1 / in_all.size) / (2 * math.log(2))
    streams = min(_STREAMS_BITS, _SHORT_STREAM_BITS * num_changed)
    return at_once - per_class - luck + streams - _CLASS_BITS * num_classes


def _entropy_bits(share: Shares) -> Shares:
    """Of an answer that is yes in this share of cases."""
    share = np.clip(share, 1e-12, 1 - 1e-12)
    bits: Shares = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
    return bits


def _runs(num_elements: int) -> Positions:
    """Ascending positions in a bucket, in runs that are spread over it."""
    length = _SAMPLE // _NUM_RUNS
    if num_elements <= 2 * _SAMPLE:
        return np.arange(num_elements)
    starts = np.linspace(0, num_elements - length, _NUM_RUNS, dtype=np.int64)
    return (starts[:, None] + np.arange(length)).reshape(-1)


def _by_slice(changes: BucketChanges, positions: Positions) -> Iterator[tuple[int, Positions]]:
    """(number of a slice, positions inside it) for those that have any."""
    rows = bounds_by_slice(changes.bucket, positions)
    for number, (lo, hi, offset) in enumerate(rows):
        if hi > lo:
            yield number, positions[lo:hi] - offset


def _at(changes: BucketChanges, slices: Sequence[Words], positions: Positions) -> Words:
    """The words of slices at positions in the bucket."""
    return np.concatenate([slices[number][at] for number, at in _by_slice(changes, positions)])


def _some_changes(changes: BucketChanges, at_large: Positions) -> tuple[Positions, Words]:
    """Positions of some changes, and the old words there."""
    if changes.density < _MANY:
        every = slice(None, None, -(-changes.num_changed // _SAMPLE))
        return changes.positions[every], changes.old[every]
    old, new = (_at(changes, words, at_large) for words in (changes.old_slices, changes.new_slices))
    differ = old != new
    return at_large[differ], old[differ]


def _classes_by_scale(
    changes: BucketChanges, scales: list[BlockScales | None], positions: Positions
) -> Words:
    """The classes of block-scaled elements; those of tensors without scales are of class 0."""
    classes = [np.empty(0, np.uint8)]
    for number, at in _by_slice(changes, positions):
        blocks = scales[number]
        if blocks is None:
            classes.append(np.zeros(at.size, np.uint8))
        else:
            piece = changes.bucket.slices[number]
            classes.append(_scale_classes(piece, blocks, changes.old_weights, at))
    return np.concatenate(classes)


def _scale_classes(
    piece: Slice, blocks: BlockScales, weights: WeightReader, at: Positions
) -> Words:
    schema = weights.schema
    spec = schema.tensors[blocks.tensor]
    row_words = blocks.row_words(schema.tensors[piece.tensor])
    row, column = np.divmod(at + piece.start, row_words)
    block = row // blocks.rows * -(-row_words // blocks.words) + column // blocks.words
    first = int(block.min())
    words = weights.read(spec.name, first, int(block.max()) + 1)[block - first]
    return classes_of_scales(words, spec.dtype)
