"""Compiled loops for the wires that others ship, so that none of them is slowed by Python.

Written for this benchmark, as plainly as a fair implementer would: finding the changed elements
skips equal blocks of 64 bytes and asks for memory ahead, positions are checked before they are
written to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types

from stitch.codec.compiling import compiled, input_array, output_array
from stitch.codec.intrinsics import prefetch

_WORDS, _INT32 = types.uint16, types.int32
_ZERO = np.uint64(0)
_AHEAD = 256
"""64-bit words between asking for a row and comparing it."""


@cache
def find_and_gather() -> Callable[..., Any]:
    """(old, new, index, value) -> count: changed positions and their new 16-bit words.

    `old` and `new` are (m, 8) 64-bit words; `index` and `value` have room for one more than all.
    """

    def loop(old, new, index, value):  # type: ignore[no-untyped-def]
        count = 0
        for row in range(old.shape[0]):
            prefetch(old, row * 8 + _AHEAD)
            prefetch(new, row * 8 + _AHEAD)
            seen = _ZERO
            for j in range(8):
                seen |= old[row, j] ^ new[row, j]
            if seen != _ZERO:
                for j in range(8):
                    word = new[row, j]
                    bits = old[row, j] ^ word
                    if bits != _ZERO:
                        position = (row * 8 + j) * 4
                        for lane in range(4):
                            # No branch per lane: write always, advance only if it differs.
                            index[count] = position + lane
                            value[count] = word & np.uint64(0xFFFF)
                            count += bits & np.uint64(0xFFFF) != _ZERO
                            bits >>= np.uint64(16)
                            word >>= np.uint64(16)
        return count

    rows = input_array(types.uint64, 2)
    return compiled(loop, types.int64, rows, rows, output_array(_INT32), output_array(_WORDS))


@cache
def scatter() -> Callable[..., Any]:
    """(index, value, target) -> whether every position was inside; writes those that are."""

    def loop(index, value, target):  # type: ignore[no-untyped-def]
        good = True
        for i in range(index.size):
            position = index[i]
            if 0 <= position < target.size:
                target[position] = value[i]
            else:
                good = False
        return good

    inputs = (input_array(_INT32), input_array(_WORDS))
    return compiled(loop, types.boolean, *inputs, output_array(_WORDS))


@cache
def split_rows() -> Callable[..., Any]:
    """(index, columns, rows, cols) -> (max row delta, max column delta).

    Ascending flat positions as row deltas and, inside a row, column deltas; the first of a row has
    its column itself.
    """

    def loop(index, columns, rows, cols):  # type: ignore[no-untyped-def]
        row = np.int64(0)
        start = np.int64(0)
        last = np.int64(0)
        most_rows = np.int64(0)
        most_cols = np.int64(0)
        for i in range(index.size):
            position = np.int64(index[i])
            step = np.int64(0)
            if position >= start + columns:
                step = (position - start) // columns
                row += step
                start = row * columns
                last = np.int64(0)
            col = position - start
            rows[i] = step
            cols[i] = col - last
            most_rows = max(most_rows, step)
            most_cols = max(most_cols, col - last)
            last = col
        return most_rows, most_cols

    pair = types.UniTuple(types.int64, 2)
    out = output_array(_INT32)
    return compiled(loop, pair, input_array(_INT32), types.int64, out, out)


@cache
def scatter_rows() -> Callable[..., Any]:
    """(rows, cols, columns, value, target) -> whether every position was inside."""

    def loop(rows, cols, columns, value, target):  # type: ignore[no-untyped-def]
        good = True
        start = np.int64(0)
        col = np.int64(0)
        for i in range(rows.size):
            step = np.int64(rows[i])
            if step != 0:
                start += step * columns
                col = np.int64(0)
            col += cols[i]
            position = start + col
            if 0 <= position < target.size:
                target[position] = value[i]
            else:
                good = False
        return good

    inputs = (input_array(_INT32), input_array(_INT32), types.int64, input_array(_WORDS))
    return compiled(loop, types.boolean, *inputs, output_array(_WORDS))
