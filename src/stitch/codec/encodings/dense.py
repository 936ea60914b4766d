"""`dense`: the zigzag ULP steps of every element, as byte planes. See docs/format.md, "dense"."""

from __future__ import annotations

import numpy as np
import zstandard

from stitch.codec import kernels
from stitch.codec.changes import BucketChanges
from stitch.codec.encodings.port import DecodedChanges, OldWords
from stitch.codec.streams import decompress_exactly
from stitch.codec.words import WORD_DTYPES
from stitch.errors import CorruptPatchError


class Dense:
    """Decoding touches every element of the bucket."""

    def encode(self, changes: BucketChanges) -> bytes:
        bucket = changes.bucket
        planes = np.empty((bucket.word_bytes, bucket.num_elements), np.uint8)
        offset = 0
        for old, new in zip(changes.old_slices, changes.new_slices, strict=True):
            kernels.split_steps(old, new, bucket.dtype, offset, planes)
            offset += old.size
        compressor = zstandard.ZstdCompressor(level=1, write_content_size=True)
        return compressor.compress(planes.reshape(-1).data)

    def decode(
        self, payload: memoryview, *, num_changed: int, old: OldWords, what: str
    ) -> DecodedChanges:
        bucket = old.bucket
        raw = decompress_exactly(bytes(payload), bucket.num_bytes, what)
        planes = np.frombuffer(raw, np.uint8).reshape(bucket.word_bytes, bucket.num_elements)
        before = np.empty(bucket.num_elements, WORD_DTYPES[bucket.word_bytes])
        after = np.empty_like(before)
        offset = found = 0
        for words in old.whole():
            end = offset + words.size
            before[offset:end] = words
            found += kernels.join_steps(words, planes, bucket.dtype, offset, after[offset:end])
            offset = end
        if found != num_changed:
            raise CorruptPatchError(
                f"{what}: {found} elements change, the table says {num_changed}"
            )
        return DecodedChanges(positions=None, old=before, new=after)
