"""The digest of tensors and versions, a sum. See docs/format.md, "Digest".

Two 64-bit lanes per tensor, each a wrapping sum over the tensor's 8-byte words of a mix of the word
and its index. So lanes of disjoint parts of a tensor (cut on 8-byte words) add up to the tensor's,
and a change of k words costs O(k). It detects faults, swaps and misplacement, not forgery.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from stitch.codec import kernels
from stitch.codec.buckets import ALIGNMENT
from stitch.codec.pool import ordered
from stitch.codec.words import Lanes
from stitch.errors import SchemaMismatchError
from stitch.tensors.reader import Progress, WeightReader, is_on_device
from stitch.types import Schema, TensorSpec

if TYPE_CHECKING:
    from stitch.codec.update import TensorUpdate, UpdateSet

CHUNK_BYTES = 1 << 24
"""Full digests read about this much at a time."""

_KNOWN_SCHEMAS = 8


_Chunk = tuple[int, int, int]
"""(tensor, start, stop) in elements, cut on 8-byte words."""


def _batches(schema: Schema) -> Iterator[list[_Chunk]]:
    """All words of a schema, in lists of about CHUNK_BYTES."""
    batch: list[_Chunk] = []
    room = CHUNK_BYTES
    for tensor, spec in enumerate(schema.tensors):
        step = CHUNK_BYTES // spec.word_bytes
        for start in range(0, spec.num_words, step):
            stop = min(start + step, spec.num_words)
            batch.append((tensor, start, stop))
            room -= (stop - start) * spec.word_bytes
            if room <= 0:
                yield batch
                batch, room = [], CHUNK_BYTES
    if batch:
        yield batch


def first_word(start: int, word_bytes: int) -> int:
    """Index of the 64-bit word at which element `start` (a multiple of 8) begins."""
    assert start % ALIGNMENT == 0, "digested slices are cut on multiples of 8 elements"
    return start * word_bytes // 8


def _length_prefixed(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<I", len(data)) + data


def _identity(spec: TensorSpec) -> bytes:
    dims = struct.pack(f"<I{len(spec.shape)}Q", len(spec.shape), *spec.shape)
    name, dtype = _length_prefixed(spec.name), _length_prefixed(spec.dtype)
    return name + dtype + dims + struct.pack("<Q", spec.num_bytes)


_known_identities: dict[str, list[bytes]] = {}


def _identities(schema: Schema) -> list[bytes]:
    """What a version's digest says of each tensor besides its lanes; kept for the latest schemas.

    Every patch takes some version digests, and most of their time would go into these.
    """
    known = _known_identities.get(schema.digest)
    if known is None:
        known = [_identity(spec) for spec in schema.tensors]
        if len(_known_identities) >= _KNOWN_SCHEMAS:
            _known_identities.clear()
        _known_identities[schema.digest] = known
    return known


@dataclass(frozen=True, eq=False)
class DigestState:
    """The lanes of every tensor of a schema, (num_tensors, 2) uint64.

    Lanes of shards of one version merge by wrapping addition of `lanes`.
    """

    schema: Schema
    lanes: npt.NDArray[np.uint64]

    def __post_init__(self) -> None:
        if self.lanes.shape != (len(self.schema), 2) or self.lanes.dtype != np.uint64:
            raise ValueError(
                f"lanes must be ({len(self.schema)}, 2) uint64, got {self.lanes.shape}"
            )

    @classmethod
    def of(
        cls, reader: WeightReader, progress: Progress | None = None, threads: int | None = None
    ) -> DigestState:
        """Digest everything that `reader` holds, near memory speed."""
        schema = reader.schema
        if is_on_device(reader):
            from stitch.codec import torch_digest

            return cls(schema, torch_digest.sum_reader(reader, progress))
        lanes = np.zeros((len(schema), 2), np.uint64)

        def work(batch: list[_Chunk]) -> list[tuple[int, int, Lanes]]:
            parts = []
            for tensor, start, stop in batch:
                spec = schema.tensors[tensor]
                words = reader.read(spec.name, start, stop)
                lanes = kernels.sum_words(words, first_word(start, spec.word_bytes))
                parts.append((tensor, words.nbytes, lanes))
            return parts

        done = 0
        for parts in ordered(work, _batches(schema), threads):
            for tensor, num_bytes, part in parts:
                lanes[tensor] += part
                done += num_bytes
            if progress:
                progress(done, schema.num_bytes)
        return cls(schema, lanes)

    def copy(self) -> DigestState:
        return DigestState(self.schema, self.lanes.copy())

    def plus(self, gains: npt.NDArray[np.uint64]) -> DigestState:
        """The state after adding `gains` (num_tensors, 2) to the lanes, modulo 2^64."""
        return DigestState(self.schema, self.lanes + gains)

    def tensor_digest(self, tensor: int) -> str:
        """32 hex digits: the two lanes, most significant digit first."""
        first, second = self.lanes[tensor]
        return f"{int(first):016x}{int(second):016x}"

    def version_digest(self) -> str:
        """32 hex digits over every tensor's name, dtype, shape and lanes."""
        identities = _identities(self.schema)
        lanes = self.lanes.astype("<u8").tobytes()
        parts = [lanes[at : at + 16] for at in range(0, len(lanes), 16)]
        message = b"".join(itertools.chain.from_iterable(zip(identities, parts, strict=True)))
        return hashlib.blake2b(message, digest_size=16).hexdigest()

    def updated(self, update: UpdateSet, weights: WeightReader) -> DigestState:
        """The state after `update`, in O(changed). `weights` still hold the old words."""
        if weights.schema.digest != self.schema.digest:
            raise SchemaMismatchError(
                f"weights of schema {weights.schema.digest}, digests of {self.schema.digest}"
            )
        lanes = self.lanes.copy()
        for part in update.updates:
            lanes[part.tensor] += update_gain(part, weights)
        return DigestState(self.schema, lanes)


def update_gain(update: TensorUpdate, weights: WeightReader) -> Lanes:
    """What one tensor's lanes (2,) gain by `update`, from `weights` before it."""
    spec = weights.schema.tensors[update.tensor]
    if not update.new.size:
        return np.zeros(2, np.uint64)
    begin = update.first - update.first % ALIGNMENT
    end = min(spec.num_words, update.last + ALIGNMENT - update.last % ALIGNMENT)
    old = weights.read(spec.name, begin, end)
    first = first_word(begin, spec.word_bytes)
    if update.positions is None and begin == update.start and end == update.stop:
        return kernels.sum_words(update.new, first) - kernels.sum_words(old, first)
    return kernels.sum_change(old, first, update.flat_positions() - begin, update.new)
