"""The compiled loops. Import it only through :mod:`stitch.codec.kernels`.

Every loop is built once per word size at most, with a fixed signature that accepts read-only and
unaligned inputs, so that the shape of the caller's arrays never triggers another compilation.
Integers of different signedness never meet in an expression: numba would make them floats.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
from numba import types

from stitch.codec.constants import GOLDEN, MIX_1, MIX_2, MIX_3

_GOLDEN, _M1, _M2, _M3 = (np.uint64(c) for c in (GOLDEN, MIX_1, MIX_2, MIX_3))
_S1, _S29, _S32 = np.uint64(1), np.uint64(29), np.uint64(32)
_ZERO = np.uint64(0)

_UINT = {1: types.uint8, 2: types.uint16, 4: types.uint32, 8: types.uint64}


def _input(element: Any) -> Any:
    return types.Array(element, 1, "C", readonly=True, aligned=False)


def _output(element: Any) -> Any:
    return types.Array(element, 1, "C", readonly=False, aligned=False)


def _compile(function: Callable[..., Any], result: Any, *arguments: Any) -> Callable[..., Any]:
    compiled: Callable[..., Any] = numba.njit(
        result(*arguments), nogil=True, cache=True, error_model="numpy"
    )(function)
    return compiled


def _find_changed(old, new, lane_bits, out):  # type: ignore[no-untyped-def]
    """Write positions of unequal lanes to `out` (room for every lane); return how many."""
    lanes = 64 // lane_bits
    shift = np.uint64(lane_bits)
    mask = ~_ZERO >> np.uint64(64 - lane_bits)
    count = 0
    size = old.size
    block = 0
    while block + 8 <= size:
        seen = _ZERO
        for i in range(block, block + 8):
            seen |= old[i] ^ new[i]
        if seen != _ZERO:
            for i in range(block, block + 8):
                bits = old[i] ^ new[i]
                if bits != _ZERO:
                    # No branch per lane: write always, advance only when the lane differs.
                    for lane in range(lanes):
                        out[count] = i * lanes + lane
                        count += (bits >> (np.uint64(lane) * shift)) & mask != _ZERO
        block += 8
    for i in range(block, size):
        bits = old[i] ^ new[i]
        for lane in range(lanes):
            out[count] = i * lanes + lane
            count += (bits >> (np.uint64(lane) * shift)) & mask != _ZERO
    return count


def _sum_words(words, first, out):  # type: ignore[no-untyped-def]
    """Add both digest lanes of `words`, whose first has index `first`, to `out` (2,)."""
    a = _ZERO
    b = _ZERO
    for i in range(words.size):
        key = (first + np.uint64(i) + _S1) * _GOLDEN
        h = (words[i] ^ key) * _M1
        h ^= h >> _S32
        h *= _M2
        h ^= h >> _S29
        a += h
        g = h * _M3
        g ^= g >> _S32
        b += g
    out[0] += a
    out[1] += b


def _sum_change(whole, tail, first, positions, new, out):  # type: ignore[no-untyped-def]
    """Add to `out` (2,) what the digest lanes gain when `new` is written at `positions`.

    `whole` and `tail` are the old 64-bit words; the first has index `first` in its tensor.
    `positions` count elements from the first word and ascend.
    """
    lanes = 8 // new.itemsize
    lane_bits = np.uint64(8 * new.itemsize)
    mask = ~_ZERO >> (np.uint64(64) - lane_bits)
    a = _ZERO
    b = _ZERO
    k = 0
    count = positions.size
    while k < count:
        index = positions[k] // lanes
        old_word = whole[index] if index < whole.size else tail[0]
        new_word = old_word
        while k < count and positions[k] // lanes == index:
            at = np.uint64(positions[k] % lanes) * lane_bits
            new_word = (new_word & ~(mask << at)) | (np.uint64(new[k]) << at)
            k += 1
        key = (first + np.uint64(index) + _S1) * _GOLDEN
        h = (new_word ^ key) * _M1
        h ^= h >> _S32
        h *= _M2
        h ^= h >> _S29
        a += h
        g = h * _M3
        g ^= g >> _S32
        b += g
        h = (old_word ^ key) * _M1
        h ^= h >> _S32
        h *= _M2
        h ^= h >> _S29
        a -= h
        g = h * _M3
        g ^= g >> _S32
        b -= g
    out[0] += a
    out[1] += b


def _split_steps(old, new, ordered, out):  # type: ignore[no-untyped-def]
    """Zigzag ULP steps from `old` to `new` into `out`, all unsigned of one width."""
    top = 8 * old.itemsize - 1
    one = old.dtype.type(1)
    sign = old.dtype.type(one << top)
    for i in range(old.size):
        x = old[i]
        y = new[i]
        if ordered:
            x = old.dtype.type(x ^ sign) if x < sign else old.dtype.type(~x)
            y = old.dtype.type(y ^ sign) if y < sign else old.dtype.type(~y)
        step = old.dtype.type(y - x)
        spread = old.dtype.type(0) if step < sign else old.dtype.type(~old.dtype.type(0))
        out[i] = old.dtype.type(step << one) ^ spread


@cache
def find_changed() -> Callable[..., Any]:
    u64 = _input(types.uint64)
    return _compile(_find_changed, types.int64, u64, u64, types.int64, _output(types.uint32))


@cache
def sum_words() -> Callable[..., Any]:
    return _compile(
        _sum_words, types.void, _input(types.uint64), types.uint64, _output(types.uint64)
    )


@cache
def sum_change(word_bytes: int) -> Callable[..., Any]:
    u64 = _input(types.uint64)
    return _compile(
        _sum_change,
        types.void,
        u64,
        u64,
        types.uint64,
        _input(types.int64),
        _input(_UINT[word_bytes]),
        _output(types.uint64),
    )
