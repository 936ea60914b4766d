"""Signed ULP steps: how far apart two words are in the order of their values.

Float words (sign and magnitude) are mapped to unsigned integers that grow with the value; integer
and opaque words are taken as they are. A step is the wrapped difference of two mapped words, so
old and step give new back for every pair of bit patterns. See docs/format.md, "Steps".
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from stitch.codec.words import SIGNED_DTYPES, WORD_DTYPES, Words
from stitch.types import FLOAT_DTYPES

Steps = npt.NDArray[np.signedinteger[Any]]


def is_ordered_by_sign(dtype: str) -> bool:
    """Whether words of this dtype are sign and magnitude."""
    return dtype in FLOAT_DTYPES


def to_ordered(words: Words) -> Words:
    """Sign-and-magnitude words -> unsigned integers in the order of the values."""
    sign = words.dtype.type(1 << (8 * words.itemsize - 1))
    return np.where(words & sign, ~words, words | sign)


def from_ordered(ordered: Words) -> Words:
    """The inverse of :func:`to_ordered`."""
    sign = ordered.dtype.type(1 << (8 * ordered.itemsize - 1))
    return np.where(ordered & sign, ordered ^ sign, ~ordered)


def steps_between(old: Words, new: Words, dtype: str) -> Steps:
    """Signed steps from `old` to `new` (n,), in a signed dtype of the words' width."""
    if is_ordered_by_sign(dtype):
        old, new = to_ordered(old), to_ordered(new)
    difference = np.subtract(new, old, dtype=WORD_DTYPES[old.itemsize])
    return difference.view(SIGNED_DTYPES[old.itemsize])


def take_steps(old: Words, steps: Steps, dtype: str) -> Words:
    """The words (n,) that lie `steps` from `old`."""
    moved = steps.view(WORD_DTYPES[old.itemsize])
    if is_ordered_by_sign(dtype):
        return from_ordered(np.add(to_ordered(old), moved, dtype=WORD_DTYPES[old.itemsize]))
    return np.add(old, moved, dtype=WORD_DTYPES[old.itemsize])
