"""Block scales of quantised tensors: which tensor holds them, and which block an element is in."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stitch.codec.buckets import MAX_BUCKET_ELEMENTS, Bucket
from stitch.errors import CorruptPatchError
from stitch.types import FLOAT_DTYPES, Schema, TensorSpec

_FIELDS = struct.Struct("<III")
_LARGEST = 0xFFFFFFFF

SUFFIXES = (
    ("", "_scale"),
    ("", "_scale_inv"),
    ("", "_scales"),
    ("_packed", "_scale"),
    ("_blocks", "_scales"),
    (".qweight", ".scales"),
    (".weight", ".scales"),
)
"""Endings of a tensor's name and of its scales' name, as quantised checkpoints use them."""


@dataclass(frozen=True)
class BlockScales:
    """Blocks of `rows` rows and `words` words, with a scale each in tensor `tensor`."""

    tensor: int
    rows: int
    words: int

    @staticmethod
    def row_words(spec: TensorSpec) -> int:
        """Words in a row of a tensor: all dimensions but the last one count rows."""
        num_rows = math.prod(spec.shape[:-1])
        return spec.num_words // num_rows if num_rows else 0

    def fit(self, spec: TensorSpec, scales: TensorSpec) -> bool:
        """Whether `scales` has one element for each block of `spec`."""
        num_rows, row_words = math.prod(spec.shape[:-1]), self.row_words(spec)
        if row_words * num_rows != spec.num_words or not 0 < row_words <= MAX_BUCKET_ELEMENTS:
            return False
        num_blocks = -(-num_rows // self.rows) * -(-row_words // self.words)
        return num_blocks == scales.num_words


def scales_of(tensor: int, schema: Schema) -> BlockScales | None:
    """The scales of an integer tensor, found by the names and shapes that checkpoints use."""
    spec = schema.tensors[tensor]
    if spec.dtype in FLOAT_DTYPES or not spec.num_words:
        return None
    num_rows, row_words = math.prod(spec.shape[:-1]), BlockScales.row_words(spec)
    for name in _names(spec.name):
        if name not in schema:
            continue
        index = schema.index[name]
        scales = schema.tensors[index]
        scale_rows, scale_columns = math.prod(scales.shape[:-1]), BlockScales.row_words(scales)
        if scales.num_words == num_rows:
            found = BlockScales(index, 1, row_words)
        elif scale_rows and num_rows % scale_rows == 0 and row_words % max(scale_columns, 1) == 0:
            found = BlockScales(index, num_rows // scale_rows, row_words // max(scale_columns, 1))
        else:
            continue
        if max(found.rows, found.words) <= _LARGEST and found.fit(spec, scales):
            return found
    return None


def _names(name: str) -> Iterator[str]:
    for ending, of_scales in SUFFIXES:
        if name.endswith(ending):
            yield name.removesuffix(ending) + of_scales


def write_scales(scales: Sequence[BlockScales | None]) -> bytes:
    """One entry for each slice of a bucket."""
    entries = (
        b"\0" if blocks is None else b"\1" + _FIELDS.pack(blocks.tensor, blocks.rows, blocks.words)
        for blocks in scales
    )
    return b"".join(entries)


def read_scales(
    data: memoryview, bucket: Bucket, schema: Schema, what: str
) -> tuple[list[BlockScales | None], memoryview]:
    """The entries for a bucket's slices, and the bytes after them. Raises CorruptPatchError."""
    scales: list[BlockScales | None] = []
    for piece in bucket.slices:
        if len(data) < 1 or data[0] > 1 or len(data) < 1 + data[0] * _FIELDS.size:
            raise CorruptPatchError(f"{what}: the scales of its slices are cut short or unknown")
        if data[0] == 0:
            scales.append(None)
            data = data[1:]
            continue
        blocks = BlockScales(*_FIELDS.unpack_from(data, 1))
        data = data[1 + _FIELDS.size :]
        inside = blocks.tensor < len(schema) and blocks.rows and blocks.words
        spec = schema.tensors[piece.tensor]
        if not inside or not blocks.fit(spec, schema.tensors[blocks.tensor]):
            raise CorruptPatchError(f"{what}: {blocks} does not fit tensor {spec}")
        scales.append(blocks)
    return scales, data
