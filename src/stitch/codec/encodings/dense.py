"""`dense`: the zigzag ULP steps of every element, as byte planes. See docs/format.md, "dense"."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import zstandard

from stitch.codec.changes import BucketChanges
from stitch.codec.encodings.port import DecodedChanges, OldWords
from stitch.codec.streams import decompress_exactly
from stitch.codec.ulp import Steps, steps_between, take_steps
from stitch.codec.words import SIGNED_DTYPES, WORD_DTYPES, Words
from stitch.errors import CorruptPatchError

_BLOCK = 1 << 16
"""Elements worked on at a time, so that the temporary arrays stay in the cache."""

Planes = npt.NDArray[np.uint8]
"""(word_bytes, num_elements): plane b holds byte b of every zigzag step, lowest byte first."""


class Dense:
    """Decoding touches every element of the bucket."""

    def encode(self, changes: BucketChanges) -> bytes:
        bucket = changes.bucket
        planes = np.empty((bucket.word_bytes, bucket.num_elements), np.uint8)
        offset = 0
        for old, new in zip(changes.old_slices, changes.new_slices, strict=True):
            for at in range(0, old.size, _BLOCK):
                steps = steps_between(old[at : at + _BLOCK], new[at : at + _BLOCK], bucket.dtype)
                _put(planes, offset + at, _zigzag(steps))
            offset += old.size
        return zstandard.ZstdCompressor(level=1, write_content_size=True).compress(
            planes.reshape(-1).data
        )

    def decode(
        self, payload: memoryview, *, num_changed: int, old: OldWords, what: str
    ) -> DecodedChanges:
        bucket = old.bucket
        raw = decompress_exactly(bytes(payload), bucket.num_bytes, what)
        planes = np.frombuffer(raw, np.uint8).reshape(bucket.word_bytes, bucket.num_elements)
        before = np.concatenate(old.whole())
        after = np.empty_like(before)
        found = 0
        for at in range(0, before.size, _BLOCK):
            zigzag = _take(planes, at, min(at + _BLOCK, before.size))
            found += int(np.count_nonzero(zigzag))
            after[at : at + _BLOCK] = take_steps(
                before[at : at + _BLOCK], _unzigzag(zigzag), bucket.dtype
            )
        if found != num_changed:
            raise CorruptPatchError(
                f"{what}: {found} elements change, the table says {num_changed}"
            )
        return DecodedChanges(positions=None, old=before, new=after)


def _zigzag(steps: Steps) -> Words:
    """Signed steps -> unsigned, small magnitudes first: 0, -1, 1, -2, 2, ..."""
    unsigned = WORD_DTYPES[steps.itemsize]
    spread = (steps >> (8 * steps.itemsize - 1)).view(unsigned)
    doubled = np.left_shift(steps.view(unsigned), unsigned.type(1))
    return np.bitwise_xor(doubled, spread, out=doubled)


def _unzigzag(zigzag: Words) -> Steps:
    one = zigzag.dtype.type(1)
    spread = np.negative(zigzag & one, dtype=zigzag.dtype)
    halved = np.right_shift(zigzag, one)
    np.bitwise_xor(halved, spread, out=halved)
    return halved.view(SIGNED_DTYPES[zigzag.itemsize])


def _put(planes: Planes, start: int, words: Words) -> None:
    width = planes.shape[0]
    planes[:, start : start + words.size] = words.view(np.uint8).reshape(-1, width).T


def _take(planes: Planes, start: int, stop: int) -> Words:
    rows = np.ascontiguousarray(planes[:, start:stop].T)
    return rows.reshape(-1).view(WORD_DTYPES[planes.shape[0]])
