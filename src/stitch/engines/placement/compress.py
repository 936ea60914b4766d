"""From "this live word holds that element", word by word, to few strided blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stitch.engines.placement.blocks import Block, UnmappableError, merge_dims

Ints = npt.NDArray[np.int64]

MAX_BLOCKS = 4096
"""Blocks of one tensor in one storage; a layout that needs more is not followed."""
_MAX_LEVELS = 12


@dataclass
class _Entries:
    """Equal-shaped boxes by their first word and element; `shape` numbers rows of `shapes`."""

    live: Ints
    source: Ints
    shape: Ints
    shapes: list[tuple[tuple[int, int, int], ...]]


def compress(key: str, live: Ints, source: Ints, *, widen: bool = False) -> list[Block]:
    """Blocks for live words (k,), ascending, that hold the elements `source` (k,).

    Raises UnmappableError if more than MAX_BLOCKS are needed.
    """
    entries = _Entries(live, source, np.zeros(live.size, np.int64), [()])
    for _ in range(_MAX_LEVELS):
        merged = _merge(entries)
        if merged.live.size == entries.live.size:
            break
        entries = merged
    if entries.live.size > MAX_BLOCKS:
        raise UnmappableError(f"its layout in {key} takes {entries.live.size} blocks")
    return [
        Block(key, int(s), int(at), merge_dims(entries.shapes[shape]), widen)
        for at, s, shape in zip(entries.live, entries.source, entries.shape, strict=True)
    ]


def _merge(entries: _Entries) -> _Entries:
    """Join consecutive boxes of one shape that follow each other at the prevailing step."""
    if entries.live.size < 2:
        return entries
    steps = np.stack((np.diff(entries.live), np.diff(entries.source)), axis=1)
    usable = (entries.shape[1:] == entries.shape[:-1]) & (steps[:, 1] > 0)
    joined = usable & _prevailing(steps, usable)
    if not joined.any():
        return entries
    begins = np.concatenate(([True], ~joined))
    starts = np.flatnonzero(begins)
    lengths = np.diff(np.append(starts, entries.live.size))
    # A run of one box has no step of its own.
    step = np.where(lengths[:, None] > 1, steps[np.minimum(starts, len(steps) - 1)], 0)
    kinds = np.column_stack((lengths, step, entries.shape[starts]))
    unique, inverse = np.unique(kinds, axis=0, return_inverse=True)
    shapes = [
        entries.shapes[shape] if n == 1 else ((int(n), int(ds), int(dl)), *entries.shapes[shape])
        for n, dl, ds, shape in unique.tolist()
    ]
    return _Entries(entries.live[starts], entries.source[starts], inverse.reshape(-1), shapes)


def _prevailing(steps: Ints, usable: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Where the step is the commonest of the usable ones (of equally common: the nearest).

    With inner dimensions of two, every other step is a jump; jumps differ or are longer.
    """
    candidates = steps[usable]
    if not len(candidates):
        return np.zeros(len(steps), bool)
    kinds, counts = np.unique(candidates, axis=0, return_counts=True)
    # The jump between runs of length two is one less frequent than the step inside, or one less.
    common = kinds[counts >= counts.max() - 1]
    best = common[np.lexsort((common[:, 1], common[:, 0]))[0]]
    result: npt.NDArray[np.bool_] = (steps == best).all(axis=1)
    return result
