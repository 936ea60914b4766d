"""`dense`: the zigzag ULP steps of every element, as tokens or byte planes.

See docs/format.md, "dense". Small steps, the rule in BF16, take two bits before compression, and
four neighbours become one byte: zstd's cheapest level then comes within a few percent of their
entropy, and has a quarter to an eighth of the bytes of the planes to look at. Where most steps are
wide, as in FP32, tokens would only add to the planes, and are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stitch.codec.buckets import Bucket
from stitch.codec.changes import BucketChanges
from stitch.codec.encodings.port import DecodedChanges, OldWords, Reads
from stitch.codec.streams import read_numbers, write_bytes
from stitch.codec.ulp import is_ordered_by_sign, steps_between
from stitch.codec.words import WORD_DTYPES, Words
from stitch.errors import CorruptPatchError, UnsupportedFormatError

PLANES, TOKENS = 0, 1
"""The forms of a payload."""
ESCAPE = 3
"""The token that says: the step is this or more, and among the escaped ones."""
_PER_BYTE = 4
_MANY_ESCAPES = 0.82
"""Share of elements with wide steps above which tokens cost more than they save."""
_SAMPLE = 4096

_BYTE = np.dtype(np.uint8)
_NUM_ESCAPES = np.array([sum(b >> s & 3 == ESCAPE for s in (0, 2, 4, 6)) for b in range(256)])
_NUM_CHANGED = np.array([sum(b >> s & 3 != 0 for s in (0, 2, 4, 6)) for b in range(256)])
"""(256,) by a byte of tokens."""

Bytes = npt.NDArray[np.uint8]


class Dense:
    """Decoding touches every element of the bucket."""

    reads: Reads = "bucket"
    lists_changes = False

    def encode(self, changes: BucketChanges) -> bytes:
        bucket, old, new = changes.bucket, changes.old_slices, changes.new_slices
        if escaped_share(old, new, bucket.dtype) > _MANY_ESCAPES:
            return bytes([PLANES]) + _write_planes(_planes_of(bucket, old, new))
        tokens, planes = _tokens_of(bucket, old, new, changes.num_changed)
        return bytes([TOKENS]) + write_bytes(tokens) + _write_planes(planes)

    def decode(
        self, payload: memoryview, *, num_changed: int, old: OldWords, what: str
    ) -> DecodedChanges:
        if not len(payload):
            raise CorruptPatchError(f"{what}: the payload is empty")
        form, rest = payload[0], payload[1:]
        before = np.empty(old.bucket.num_elements, WORD_DTYPES[old.bucket.word_bytes])
        after = np.empty_like(before)
        if form == TOKENS:
            found = _join_tokens(rest, old, before, after, what)
        elif form == PLANES:
            found = _join_planes(rest, old, before, after, what)
        else:
            raise UnsupportedFormatError(f"{what}: unknown form {form} of dense")
        if found != num_changed:
            raise CorruptPatchError(
                f"{what}: {found} elements change, the table says {num_changed}"
            )
        return DecodedChanges(positions=None, old=before, new=after)


def escaped_share(old: Sequence[Words], new: Sequence[Words], dtype: str) -> float:
    """About the share of elements whose steps do not fit a token, from some of all slices."""
    every = slice(None, None, -(-sum(words.size for words in old) // _SAMPLE))
    olds, news = (np.concatenate([words[every] for words in slices]) for slices in (old, new))
    steps = steps_between(olds, news, dtype)
    return float(np.mean((steps < -1) | (steps > 1)))


def _tokens_of(
    bucket: Bucket, old: Sequence[Words], new: Sequence[Words], num_changed: int
) -> tuple[Bytes, Bytes]:
    """Tokens (ceil(n / 4),) of all elements, and byte planes (width, m) of the escaped ones."""
    from stitch.codec import dense_loops

    tokens = np.zeros(-(-bucket.num_elements // _PER_BYTE), np.uint8)
    planes = np.empty((bucket.word_bytes, num_changed), np.uint8)
    split = dense_loops.split_tokens(bucket.word_bytes, is_ordered_by_sign(bucket.dtype))
    offset = count = 0
    for olds, news in zip(old, new, strict=True):
        count = split(olds, news, offset, tokens, planes, count)
        offset += olds.size
    return tokens, planes[:, :count]


def _planes_of(bucket: Bucket, old: Sequence[Words], new: Sequence[Words]) -> Bytes:
    """Byte planes (width, n) of all elements."""
    from stitch.codec import dense_loops

    planes = np.empty((bucket.word_bytes, bucket.num_elements), np.uint8)
    split = dense_loops.split_planes(bucket.word_bytes, is_ordered_by_sign(bucket.dtype))
    offset = 0
    for olds, news in zip(old, new, strict=True):
        split(olds, news, offset, planes)
        offset += olds.size
    return planes


def _write_planes(planes: Bytes) -> bytes:
    return b"".join(write_bytes(np.ascontiguousarray(plane)) for plane in planes)


def _read_planes(data: memoryview, width: int, count: int, what: str) -> Bytes:
    """Byte planes (width, count), which end the payload."""
    planes = np.empty((width, count), np.uint8)
    for number, row in enumerate(planes):
        row[:], data = read_numbers(data, count, _BYTE, f"{what}: plane {number}")
    if len(data):
        raise CorruptPatchError(f"{what}: {len(data)} bytes after the planes")
    return planes


def _join_tokens(data: memoryview, old: OldWords, before: Words, after: Words, what: str) -> int:
    """Fill `before` and `after` (n,); returns how many words differ."""
    from stitch.codec import dense_loops

    bucket = old.bucket
    num_bytes = -(-bucket.num_elements // _PER_BYTE)
    tokens, rest = read_numbers(data, num_bytes, _BYTE, f"{what}: tokens")
    if tokens[-1] >> 2 * (bucket.num_elements - _PER_BYTE * (num_bytes - 1)) & 0xFF:
        raise CorruptPatchError(f"{what}: there are tokens after the last element")
    counts = np.bincount(tokens, minlength=256)
    planes = _read_planes(rest, bucket.word_bytes, int(counts @ _NUM_ESCAPES), what)
    join = dense_loops.join_tokens(bucket.word_bytes, is_ordered_by_sign(bucket.dtype))
    offset = cursor = 0
    for words in old.whole():
        end = offset + words.size
        before[offset:end] = words
        cursor = join(words, tokens, offset, planes, cursor, after[offset:end])
        if cursor < 0:
            raise CorruptPatchError(f"{what}: a step is too wide for its word")
        offset = end
    return int(counts @ _NUM_CHANGED)


def _join_planes(data: memoryview, old: OldWords, before: Words, after: Words, what: str) -> int:
    """Fill `before` and `after` (n,); returns how many words differ."""
    from stitch.codec import dense_loops

    bucket = old.bucket
    planes = _read_planes(data, bucket.word_bytes, bucket.num_elements, what)
    join = dense_loops.join_planes(bucket.word_bytes, is_ordered_by_sign(bucket.dtype))
    offset = found = 0
    for words in old.whole():
        end = offset + words.size
        before[offset:end] = words
        found += int(join(words, planes, offset, after[offset:end]))
        offset = end
    return found
