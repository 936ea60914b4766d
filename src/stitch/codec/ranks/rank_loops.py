"""The compiled loop of `ranks` from positions to ranks inside classes.

Import it only through :mod:`stitch.codec.ranks.kernels`. See docs/format.md, "ranks".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable

from stitch.codec.compiling import UINT, compiled, input_array, output_array
from stitch.codec.ranks.table import LANES
from stitch.codec.ranks.tile_loops import (
    MANY_RANKED,
    ROOM,
    TILE,
    WIDTH,
    aim,
    below,
    bits_outside,
    count_inside,
    fill,
    fill_keys,
    how_many,
    judge,
    key_at,
    lane_bits,
    lowest,
    no_window,
    without_lowest,
)
from stitch.codec.vectors import GROUP, equal_bits

_ONE = np.uint32(1)


@register_jitable
def _count(keys, counts):  # type: ignore[no-untyped-def]
    for key in keys:
        counts[key] += _ONE


@register_jitable
def _rank(tile, stop, phase):  # type: ignore[no-untyped-def]
    """How many elements before `stop` have the key of the one there."""
    mine = lane_bits(phase, stop + phase)
    kind = tile[stop]
    count = np.int64(0)
    whole = stop - stop % GROUP
    for at in range(0, whole, GROUP):
        count += how_many(equal_bits(tile, at, kind) & mine)
    return count + how_many(below(equal_bits(tile, whole, kind) & mine, stop - whole))


@cache
def rank_words(word_bytes: int) -> Callable[..., Any]:
    """(words, shift, mask, positions, origin, counts, ranks, keys).

    `positions` (k,) ascend and lie in [origin, origin + n). For each, its key and how many words
    of the key came before it go to `keys` and `ranks` (k,). `counts` (NUM_KEYS,) hold the words of
    each key seen so far.
    """
    fill_tile = fill(word_bytes)

    def loop(words, shift, mask, positions, origin, counts, ranks, keys):  # type: ignore[no-untyped-def]
        tile = np.zeros(ROOM, np.uint8)
        tile_keys = np.empty(TILE, np.uint16)
        window = no_window()
        at = 0
        for start in range(0, words.size, TILE):
            size = min(TILE, words.size - start)
            fill_tile(words[start : start + size], shift, mask, tile)
            first = origin + start
            phase = first & (LANES - 1)
            end = at
            while end < positions.size and positions[end] - first < size:
                end += 1
            many = end - at >= MANY_RANKED
            if size == TILE and not many:
                aim(tile, window)
            if many or window[WIDTH] == 0:
                fill_keys(tile, size, phase, tile_keys)
                done = 0
                while at < end:
                    stop = positions[at] - first
                    _count(tile_keys[done:stop], counts)
                    key = tile_keys[stop]
                    ranks[at] = counts[key]
                    keys[at] = key
                    at += 1
                    done = stop
                _count(tile_keys[done:size], counts)
                continue
            while at < end:
                stop = positions[at] - first
                key = key_at(tile, stop, phase)
                ranks[at] = np.uint32(np.int64(counts[key]) + _rank(tile, stop, phase))
                keys[at] = np.uint16(key)
                at += 1
            count_inside(tile, size, phase, window, counts)
            num_outside = 0
            for group in range(0, size, GROUP):
                bits = bits_outside(tile, group, size, window)
                while bits != 0:
                    counts[key_at(tile, group + lowest(bits), phase)] += _ONE
                    num_outside += 1
                    bits = without_lowest(bits)
            judge(num_outside, window)

    return compiled(
        loop,
        types.void,
        input_array(UINT[word_bytes]),
        types.uint64,
        types.uint64,
        input_array(types.int64),
        types.int64,
        output_array(types.uint32),
        output_array(types.uint32),
        output_array(types.uint16),
    )
