"""The magnitude class of every element: what makes some far more likely to change than others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stitch.codec.buckets import Bucket, Slice
from stitch.codec.words import Words

if TYPE_CHECKING:
    from stitch.codec.ranks.scales import BlockScales
    from stitch.tensors.reader import WeightReader

EXPONENTS: Mapping[str, tuple[int, int]] = {
    "F64": (52, 0x7FF),
    "F32": (23, 0xFF),
    "BF16": (7, 0xFF),
    "F16": (10, 0x1F),
    "F8_E5M2": (2, 0x1F),
    "F8_E5M2FNUZ": (2, 0x1F),
    "F8_E4M3": (3, 0xF),
    "F8_E4M3FNUZ": (3, 0xF),
}
"""dtype -> where its exponent field begins and its mask. Words of other dtypes are of one class."""
F64_LOWEST = 896
"""Exponent fields of F64 up to this one, and those from 255 above it on, share a class each."""
ALL_BITS = 0xFF


@dataclass(frozen=True)
class ClassWords:
    """What classes follow from: `words >> shift & mask`; for F64 less F64_LOWEST, and clipped."""

    words: Words
    shift: int
    mask: int


def class_words(
    bucket: Bucket,
    slices: Sequence[Words],
    scales: Sequence[BlockScales | None] | None,
    weights: WeightReader,
) -> Iterator[ClassWords]:
    """For each slice of the bucket and its old words: classes by exponent, or by block scales."""
    shift, mask = EXPONENTS.get(bucket.dtype, (0, 0))
    for number, (piece, words) in enumerate(zip(bucket.slices, slices, strict=True)):
        blocks = None if scales is None else scales[number]
        if blocks is None:
            yield ClassWords(words, shift, mask)
        else:
            yield ClassWords(_by_scale(piece, blocks, weights), 0, ALL_BITS)


def classes_of(words: Words, dtype: str) -> Words:
    """The classes (n,) u8 of words (n,) by their exponents."""
    shift, mask = EXPONENTS.get(dtype, (0, 0))
    found = (words >> words.dtype.type(shift)) & words.dtype.type(mask)
    if dtype == "F64":
        found = np.clip(found.astype(np.int64) - F64_LOWEST, 0, ALL_BITS)
    return found.astype(np.uint8)


def classes_of_scales(scales: Words, dtype: str) -> Words:
    """The classes (n,) u8 that scales (n,) give to their blocks."""
    return classes_of(scales, dtype) if dtype in EXPONENTS else scales.astype(np.uint8)


def _by_scale(piece: Slice, blocks: BlockScales, weights: WeightReader) -> Words:
    """A class (n,) u8 for each element of a slice: that of its block's old scale."""
    from stitch.codec.ranks import scale_loops

    schema = weights.schema
    spec = schema.tensors[blocks.tensor]
    row_words = blocks.row_words(schema.tensors[piece.tensor])
    per_row = -(-row_words // blocks.words)
    first_row, first_column = divmod(piece.start, row_words)
    last_row, last_column = divmod(piece.stop - 1, row_words)
    if first_row == last_row:
        skipped, wanted = first_column // blocks.words, last_column // blocks.words + 1
    else:
        skipped, wanted = 0, (last_row // blocks.rows + 1 - first_row // blocks.rows) * per_row
    begin = first_row // blocks.rows * per_row
    scales = weights.read(spec.name, begin + skipped, begin + wanted)
    classes = np.empty(piece.num_elements, np.uint8)
    scale_loops.spread_blocks()(
        classes_of_scales(scales, spec.dtype),
        (per_row, row_words, blocks.rows, blocks.words),
        (first_row % blocks.rows, first_column, skipped),
        classes,
    )
    return classes
