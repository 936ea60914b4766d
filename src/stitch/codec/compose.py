"""Composition of update sets, in time near-linear in their size."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from stitch.codec.update import TensorUpdate, UpdateSet
from stitch.codec.words import Positions, Words


def compose(sets: Sequence[UpdateSet]) -> UpdateSet:
    """Keep the first old and the last new word of each position; drop what ended unchanged."""
    if len(sets) == 1:
        return sets[0]
    by_tensor: dict[int, list[TensorUpdate]] = defaultdict(list)
    for update_set in sets:
        for update in update_set.updates:
            by_tensor[update.tensor].append(update)
    return UpdateSet(
        [u for tensor in sorted(by_tensor) for u in _merged(tensor, by_tensor[tensor])]
    )


def _merged(tensor: int, updates: list[TensorUpdate]) -> list[TensorUpdate]:
    """Merge updates of one tensor, oldest first."""
    ranges = _union([(u.start, u.stop) for u in updates if u.positions is None])
    merged = [_merged_range(tensor, start, stop, updates) for start, stop in ranges]
    merged += _merged_positions(tensor, ranges, updates)
    kept = [update for update in map(compact, merged) if update is not None]
    return _disentangled(sorted(kept, key=lambda update: update.first), ranges)


def _union(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Overlapping ranges joined; ascending."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def _merged_range(tensor: int, start: int, stop: int, updates: list[TensorUpdate]) -> TensorUpdate:
    """Everything inside [start, stop), each word of which some whole-range update covers."""
    old = np.empty(stop - start, updates[0].new.dtype)
    new = np.empty_like(old)
    inside = [update for update in updates if update.last >= start and update.first < stop]
    for update in inside:
        _overlay(new, start, update, update.new)
    for update in reversed(inside):
        _overlay(old, start, update, update.old)
    return TensorUpdate(tensor=tensor, positions=None, start=start, new=new, old=old)


def _overlay(target: Words, start: int, update: TensorUpdate, values: Words) -> None:
    if update.positions is None:
        target[update.start - start : update.stop - start] = values
    else:
        lo, hi = np.searchsorted(update.positions, (start, start + target.size))
        target[update.positions[lo:hi] - start] = values[lo:hi]


def _merged_positions(
    tensor: int, ranges: list[tuple[int, int]], updates: list[TensorUpdate]
) -> list[TensorUpdate]:
    """What lies outside `ranges`."""
    sparse = [update for update in updates if update.positions is not None]
    if not sparse:
        return []
    positions = np.concatenate([update.flat_positions() for update in sparse])
    old = np.concatenate([update.old for update in sparse])
    new = np.concatenate([update.new for update in sparse])
    if ranges:
        outside = ~_inside(positions, ranges)
        positions, old, new = positions[outside], old[outside], new[outside]
    # The parts are sorted runs, which a stable (merging) sort joins in near-linear time; equal
    # positions stay in the order of the sets.
    order = np.argsort(positions, kind="stable")
    positions = positions[order]
    is_first = np.ones(positions.size, bool)
    is_first[1:] = positions[1:] != positions[:-1]
    is_last = np.ones(positions.size, bool)
    is_last[:-1] = is_first[1:]
    return [
        TensorUpdate(
            tensor=tensor,
            positions=positions[is_first],
            new=new[order[is_last]],
            old=old[order[is_first]],
        )
    ]


def _inside(
    positions: Positions, ranges: list[tuple[int, int]]
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    starts = np.array([start for start, _ in ranges])
    stops = np.array([stop for _, stop in ranges])
    at = np.searchsorted(starts, positions, side="right") - 1
    result: np.ndarray[tuple[int], np.dtype[np.bool_]] = (at >= 0) & (positions < stops[at])
    return result


def compact(update: TensorUpdate) -> TensorUpdate | None:
    """The same update in its smaller form, without unchanged words if positions are explicit.

    None if nothing changed.
    """
    changed = update.new != update.old
    count = int(np.count_nonzero(changed))
    if not count:
        return None
    width = update.new.itemsize
    if update.positions is None and count * (8 + 2 * width) >= update.new.size * 2 * width:
        return update
    if count == update.new.size:
        return update
    places = np.flatnonzero(changed)
    positions = places + update.start if update.positions is None else update.positions[places]
    return TensorUpdate(
        tensor=update.tensor, positions=positions, new=update.new[places], old=update.old[places]
    )


def _disentangled(updates: list[TensorUpdate], ranges: list[tuple[int, int]]) -> list[TensorUpdate]:
    """Cut updates with positions where a range lies in between, so that spans do not interleave."""
    if not ranges or all(a.last < b.first for a, b in itertools.pairwise(updates)):
        return updates
    cuts = [edge for span in ranges for edge in span]
    pieces: list[TensorUpdate] = []
    for update in updates:
        if update.positions is None:
            pieces.append(update)
            continue
        bounds = [0, *np.searchsorted(update.positions, cuts).tolist(), update.positions.size]
        for lo, hi in itertools.pairwise(bounds):
            if hi > lo:
                pieces.append(
                    TensorUpdate(
                        tensor=update.tensor,
                        positions=update.positions[lo:hi],
                        new=update.new[lo:hi],
                        old=update.old[lo:hi],
                    )
                )
    return sorted(pieces, key=lambda update: update.first)
