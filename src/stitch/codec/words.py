"""Arrays of storage words as 64-bit words, and the tail that fills no 64-bit word.

Everything here and in the formats is little-endian.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from stitch.tensors.reader import WORD_DTYPES, Words

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("stitch.codec needs a little-endian machine")

__all__ = ["SIGNED_DTYPES", "WORD_DTYPES", "Lanes", "Positions", "Words", "split64"]

Positions = npt.NDArray[np.int64]
"""(k,) ascending element positions."""

Lanes = npt.NDArray[np.uint64]
"""(2,) the two digest lanes of a tensor, or what they gain, modulo 2^64."""

SIGNED_DTYPES: Mapping[int, np.dtype[np.signedinteger[Any]]] = {
    1: np.dtype("<i1"),
    2: np.dtype("<i2"),
    4: np.dtype("<i4"),
    8: np.dtype("<i8"),
}
"""Bytes of a word -> signed dtype."""


def split64(words: Words) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """A contiguous words array as 64-bit words: a view of the whole ones, and the padded tail.

    Returns (whole, tail): `tail` has no or one word, the last bytes padded with zeros.
    """
    whole = words.size * words.itemsize // 8
    per = 8 // words.itemsize
    view = words[: whole * per].view(np.uint64)
    rest = words[whole * per :]
    if not rest.size:
        return view, np.empty(0, np.uint64)
    tail = np.zeros(per, words.dtype)
    tail[: rest.size] = rest
    return view, tail.view(np.uint64)
