"""The magnitude class of every element: what makes some far more likely to change than others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stitch.codec.words import Words

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


@dataclass(frozen=True)
class ClassWords:
    """What the classes of a slice follow from: `words >> shift & mask`; clipped for F64."""

    words: Words
    shift: int
    mask: int


def by_exponent(dtype: str, slices: Sequence[Words]) -> Iterator[ClassWords]:
    """Classes from the exponent fields of old words, slice by slice."""
    shift, mask = EXPONENTS.get(dtype, (0, 0))
    for words in slices:
        yield ClassWords(words, shift, mask)
