"""The compiled loop that gives every element the class of its block's scale.

Import it only through :mod:`stitch.codec.ranks.classes`. See docs/format.md, "ranks".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from numba import types

from stitch.codec.compiling import compiled, input_array, output_array


@cache
def spread_blocks() -> Callable[..., Any]:
    """(blocks, (per row, row words, rows, words), (row, column, skipped), classes).

    Fills `classes` (n,), from a column of a row on, with the value of each element's block of
    `rows` by `words` in rows of `row words`. `blocks` hold whole rows of `per row` values, from the
    one with that row on; only if all is one row may the `skipped` first values be missing.
    """

    def loop(blocks, shape, place, classes):  # type: ignore[no-untyped-def]
        per_row, row_words, rows, words = shape
        row, column, skipped = place
        base = -skipped
        at = 0
        while at < classes.size:
            stop = min(classes.size, at + row_words - column)
            block = base + column // words
            left = words - column % words
            while at < stop:
                run = min(left, stop - at)
                classes[at : at + run] = blocks[block]
                at += run
                block += 1
                left = words
            column = 0
            row += 1
            if row == rows:
                row = 0
                base += per_row

    return compiled(
        loop,
        types.void,
        input_array(types.uint8),
        types.UniTuple(types.int64, 4),
        types.UniTuple(types.int64, 3),
        output_array(types.uint8),
    )
