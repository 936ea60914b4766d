"""The compiled loops of `gaps`, and the one that writes changed words.

Import it only through :mod:`stitch.codec.kernels`. See :mod:`stitch.codec.compiling` for how they
are compiled and for the habits they keep.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types

from stitch.codec.compiling import (
    NUMPY_INT,
    NUMPY_UINT,
    SIGNED,
    UINT,
    compiled,
    input_array,
    output_array,
)
from stitch.codec.intrinsics import put_at
from stitch.codec.order_loops import order


@cache
def to_gaps() -> Callable[..., Any]:
    """(positions, before, out): the gaps (k,) in front of ascending `positions` (k,).

    `before` is the position before the first, or -1.
    """

    def loop(positions, before, out):  # type: ignore[no-untyped-def]
        if positions.size:
            out[0] = np.uint32(positions[0] - before - 1)
        for k in range(1, positions.size):
            out[k] = np.uint32(positions[k] - positions[k - 1] - 1)

    return compiled(
        loop, types.void, input_array(types.int64), types.int64, output_array(types.uint32)
    )


@cache
def to_positions() -> Callable[..., Any]:
    """(gaps, out): the positions (k,) that these gaps lead to, from -1. k gaps sum to < 2^63."""

    def loop(gaps, out):  # type: ignore[no-untyped-def]
        position = np.int64(-1)
        for k in range(gaps.size):
            position += np.int64(gaps[k]) + 1
            out[k] = position

    return compiled(loop, types.void, input_array(types.uint32), output_array(types.int64))


@cache
def to_steps(word_bytes: int, ordered: bool) -> Callable[..., Any]:
    """(old, new, out): the signed steps from old to new (k,), as the numbers of their stream.

    `ordered`: the words are sign and magnitude.
    """
    word, signed, wide = NUMPY_UINT[word_bytes], NUMPY_INT[word_bytes], max(2, word_bytes)
    number, _ = order(word_bytes, ordered)
    wider = NUMPY_INT[wide]

    def loop(old, new, out):  # type: ignore[no-untyped-def]
        for k in range(old.size):
            out[k] = wider(signed(word(number(new[k]) - number(old[k]))))

    words = input_array(UINT[word_bytes])
    return compiled(loop, types.void, words, words, output_array(SIGNED[wide]))


@cache
def scatter(word_bytes: int) -> Callable[..., Any]:
    """(positions, values, target) -> written: put values (k,) at positions (k,) of target (n,).

    Stops before the first position that is not inside the target.
    """

    def loop(positions, values, target):  # type: ignore[no-untyped-def]
        size = np.uint64(target.size)
        for k in range(positions.size):
            if np.uint64(positions[k]) >= size:
                return k
            target[np.uint64(positions[k])] = values[k]
        return positions.size

    words = input_array(UINT[word_bytes])
    return compiled(
        loop,
        types.int64,
        input_array(types.int64),
        words,
        output_array(UINT[word_bytes]),
    )


@cache
def are_inside() -> Callable[..., Any]:
    """(extents, ends, positions) -> whether all are inside, see `kernels`."""

    def loop(extents, ends, positions):  # type: ignore[no-untyped-def]
        lo = np.int64(0)
        for row in range(ends.size):
            hi = ends[row]
            if hi > lo and (positions[lo] < 0 or positions[hi - 1] >= extents[row, 1]):
                return False
            lo = hi
        return True

    numbers = input_array(types.int64)
    return compiled(loop, types.boolean, input_array(types.int64, 2), numbers, numbers)


@cache
def scatter_joint(word_bytes: int) -> Callable[..., Any]:
    """(extents, ends, positions, values, lo, hi) -> where it stopped: at hi, unless one is outside.

    Puts values[lo:hi] (k,) at positions (k,) of tensors at extents (n, 2), whose changes end at
    ends (n,).
    """

    def loop(extents, ends, positions, values, lo, hi):  # type: ignore[no-untyped-def]
        at = lo
        for row in range(ends.size):
            address, size = np.uint64(extents[row, 0]), np.uint64(extents[row, 1])
            stop = min(hi, ends[row])
            for n in range(at, stop):
                k = np.uint64(n)
                position = np.uint64(positions[k])
                if position >= size:
                    return n
                put_at(address + position * np.uint64(word_bytes), values[k])
            at = max(at, stop)
        return at

    return compiled(
        loop,
        types.int64,
        input_array(types.int64, 2),
        input_array(types.int64),
        input_array(types.int64),
        input_array(UINT[word_bytes]),
        types.int64,
        types.int64,
    )
