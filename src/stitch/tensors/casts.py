"""Rounding of floating-point arrays to BF16 words, without torch.

BF16 is the upper half of an F32: rounding to nearest, ties to even, is integer arithmetic on the
F32's bits. F16 widens to F32 exactly; F64 is rounded to F32 first and then again, as torch's CPU
cast does it (a different order would give other bits near ties). A NaN stays a NaN: it keeps its
sign and its upper payload bits and becomes quiet, because cutting the lower half alone could leave
an infinity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stitch.errors import UnsupportedDtypeError
from stitch.tensors.reader import Words

BF16_SOURCES = frozenset({"F16", "F32", "F64"})
"""Dtypes that round to BF16."""

_FLOATS: Mapping[str, np.dtype[Any]] = {
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
_BLOCK_ELEMENTS = 1 << 15
"""Elements handled at a time, so that temporaries stay in the cache."""


def round_to_bf16(words: Words, dtype: str, out: Words | None = None) -> Words:
    """BF16 words of F16, F32 or F64 words, one for one; written to `out` if it is given."""
    if dtype not in BF16_SOURCES:
        raise UnsupportedDtypeError(f"{dtype} does not round to BF16; {sorted(BF16_SOURCES)} do")
    if out is None:
        out = np.empty(words.size, np.dtype("<u2"))
    values = words.view(_FLOATS[dtype])
    # Overflow to infinity and quieting a signalling NaN are what a cast does; not worth a warning.
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, words.size, _BLOCK_ELEMENTS):
            block = values[start : start + _BLOCK_ELEMENTS].astype("<f4", copy=False)
            _round_block(block.view("<u4"), out[start : start + _BLOCK_ELEMENTS])
    return out


def _round_block(bits: NDArray[np.uint32], out: NDArray[Any]) -> None:
    """F32 bits -> BF16 words."""
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if is_nan.any():
        rounded[is_nan] = (bits[is_nan] >> np.uint32(16)) | np.uint32(0x40)
    out[...] = rounded
