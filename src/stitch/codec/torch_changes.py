"""Finding changes in torch, on the device that holds the words: only what changed leaves it.

Import it only where tensors are at hand: it imports torch. Words are compared eight bytes at a
time: fewer comparisons, and what the digest gains is a sum over just these 64-bit words.
"""

from __future__ import annotations

import numpy as np
import torch

from stitch.codec.buckets import Bucket, Slice
from stitch.codec.changes import BucketChanges, Listed
from stitch.codec.torch_digest import mixed_sum, to_lanes, words64
from stitch.codec.words import WORD_DTYPES, Lanes
from stitch.errors import CorruptCheckpointError
from stitch.tensors.device import host_words
from stitch.tensors.reader import DeviceReader

_CHUNK_BYTES = 16 << 20
"""Compared at a time: 2 MB of scratch, and as much as this if all 64-bit words differ."""

_GATHER_WORDS = 1 << 16
"""Changed 64-bit words handled at a time: some 25 MB of scratch if all their bytes changed."""

_LISTED = 8
"""Where more than one element in this many changed, changes are only counted and digested."""


def find_changes(bucket: Bucket, old: DeviceReader, new: DeviceReader) -> BucketChanges:
    """What `changes.find_changes` gives, found on the device of `old`.

    At most 64 MB of scratch on the device; words of `new` that are on another one come over first.
    Of the words that did not change none leaves the device, unless the encoding asks for the old or
    new words of the whole bucket (as `ranks` and `dense` do), or so much changed that a list of it
    would be larger.
    """
    found = _Found(bucket)
    gains = []
    offset = 0
    for piece in bucket.slices:
        gains.append(_find_in_slice(piece, old, new, bucket.word_bytes, offset, found))
        offset += piece.num_elements
    listed = found.listed()
    return BucketChanges(
        bucket=bucket,
        positions=listed and listed[0],
        old=listed and listed[1],
        new=listed and listed[2],
        num_changed=found.count,
        gains=tuple(gains),
        old_weights=old,
        new_weights=new,
    )


class _Found:
    """Changes on the host, until they are so many that only their number is worth having."""

    def __init__(self, bucket: Bucket) -> None:
        self.count = 0
        self._most = bucket.num_elements // _LISTED
        dtype = WORD_DTYPES[bucket.word_bytes]
        self._parts: list[Listed] = [
            (np.empty(0, np.int64), np.empty(0, dtype), np.empty(0, dtype))
        ]

    def add(self, positions: torch.Tensor, old: torch.Tensor, new: torch.Tensor, at: int) -> None:
        """Add changes whose `positions` (k,) count from position `at` of the bucket."""
        self.count += positions.numel()
        if self.count > self._most:
            self._parts.clear()
            return
        self._parts.append((positions.cpu().numpy() + at, host_words(old), host_words(new)))

    def listed(self) -> Listed | None:
        """All changes, if they are listed."""
        if self.count > self._most:
            return None
        positions, old, new = map(np.concatenate, zip(*self._parts, strict=True))
        return positions, old, new


def _find_in_slice(
    piece: Slice, old: DeviceReader, new: DeviceReader, word_bytes: int, offset: int, found: _Found
) -> Lanes:
    """Add the slice's changes to `found`, its first element at `offset`; return its gain (2,)."""
    total: torch.Tensor | None = None
    for start in range(piece.start, piece.stop, _CHUNK_BYTES // word_bytes):
        stop = min(start + _CHUNK_BYTES // word_bytes, piece.stop)
        old_words = device_words(old, piece.tensor, start, stop)
        new_words = device_words(new, piece.tensor, start, stop).to(old_words.device)
        parts = zip(words64(old_words), words64(new_words), strict=True)
        for (base, old64), (_, new64) in parts:
            for index in differing(old64, new64).split(_GATHER_WORDS):
                if not index.numel():
                    continue
                olds, news = old64[index], new64[index]
                absolute = index + (start * word_bytes // 8 + base)
                gain = mixed_sum(news, absolute) - mixed_sum(olds, absolute)
                total = gain if total is None else total + gain
                positions, olds, news = elements(index, olds, news, old_words.dtype)
                shift = offset + start - piece.start + base * 8 // word_bytes
                found.add(positions, olds, news, shift)
    return np.zeros(2, np.uint64) if total is None else to_lanes(total)


def device_words(reader: DeviceReader, tensor: int, start: int, stop: int) -> torch.Tensor:
    """The words [start, stop) of a tensor by index, their number and width checked."""
    spec = reader.schema.tensors[tensor]
    words = reader.device_words(spec.name, start, stop)
    if words.shape != (stop - start,) or words.element_size() != spec.word_bytes:
        raise CorruptCheckpointError(
            f"tensor {spec}: reading [{start}:{stop}] on the device gave {tuple(words.shape)} "
            f"{words.dtype}, expected {stop - start} words of {spec.word_bytes} bytes"
        )
    return words


def differing(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Ascending indices (k,) at which two integer tensors (n,) differ; n < 2^31."""
    return torch.nonzero(old != new).view(-1)


def elements(
    index: torch.Tensor, old: torch.Tensor, new: torch.Tensor, bits: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The changed elements in changed 64-bit words: (positions, old, new), each (k,).

    index, old, new: (m,) int64, the words and where they are. `bits`: the elements' type.
    `positions` count elements where `index` counts 64-bit words.
    """
    old, new = old.view(bits), new.view(bits)
    if bits == torch.int64:
        return index, old, new
    per = 8 // old.element_size()
    at = differing(old, new)
    # The padding of a tail is zero on both sides, so it never shows.
    row = at // per
    return (index[row] - row).mul_(per).add_(at), old[at], new[at]
