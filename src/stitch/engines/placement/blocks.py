"""Strided blocks: which elements of a checkpoint tensor lie where in a live storage.

A block with dimensions (n, a, b) says: for all indices i, the element at flat position
`source + sum(i * a)` of the checkpoint tensor is word `live + sum(i * b)` of the live storage.
Nothing here needs torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from stitch.codec.words import Positions
from stitch.errors import UsageError

Dim = tuple[int, int, int]
"""(n, source stride, live stride), n > 1."""

MAX_BROADCAST = 256
"""Live copies of one element that a single copy may make."""


class UnmappableError(UsageError):
    """A copy that no block describes."""


@dataclass(frozen=True)
class SourceSet:
    """The elements of a tensor that a block covers, written in one way only.

    `dims` are (n, stride), strides descending, each larger than the extent of those after it.
    """

    source: int
    dims: tuple[tuple[int, int], ...]

    @property
    def num(self) -> int:
        return math.prod(n for n, _ in self.dims)

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.source + sum((n - 1) * a for n, a in self.dims) + 1

    @property
    def is_run(self) -> bool:
        """Consecutive elements."""
        return self.stop - self.source == self.num

    def of(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A writable view of these elements of a flat array (num_words,)."""
        if not 0 <= self.source <= self.stop <= array.size:
            raise UsageError(f"elements {self.source} to {self.stop} of {array.size}")
        size = array.itemsize
        return np.lib.stride_tricks.as_strided(
            array[self.source :], [n for n, _ in self.dims], [a * size for _, a in self.dims]
        )

    def to_json(self) -> list[Any]:
        return [self.source, [list(dim) for dim in self.dims]]

    @classmethod
    def from_json(cls, value: Any) -> SourceSet:
        source, dims = value
        return cls(int(source), tuple((int(n), int(a)) for n, a in dims))


@dataclass(frozen=True)
class Block:
    """`key` names the live storage. `widen`: its words are F32, the tensor's BF16.

    `dims` are sorted by source stride, descending, and merged where both sides are contiguous.
    """

    key: str
    source: int
    live: int
    dims: tuple[Dim, ...]
    widen: bool = False

    @cached_property
    def num(self) -> int:
        return math.prod(n for n, _, _ in self.dims)

    @cached_property
    def source_stop(self) -> int:
        """One past the last element of the tensor that the block covers."""
        return self.source + sum((n - 1) * a for n, a, _ in self.dims) + 1

    @cached_property
    def live_stop(self) -> int:
        """One past the last live word."""
        return self.live + sum((n - 1) * b for n, _, b in self.dims) + 1

    @cached_property
    def is_run(self) -> bool:
        """Consecutive elements in consecutive live words."""
        return not self.dims or (len(self.dims) == 1 and self.dims[0][1:] == (1, 1))

    @cached_property
    def is_dense(self) -> bool:
        """Consecutive elements, wherever they live."""
        return self.source_stop - self.source == self.num

    @cached_property
    def is_ascending(self) -> bool:
        """Whether later elements live at higher offsets."""
        extent = 1
        for n, _, b in reversed(self.dims):
            if b < extent:
                return False
            extent += (n - 1) * b
        return True

    @cached_property
    def elements(self) -> SourceSet:
        """What is covered, whatever the live layout."""
        merged: list[tuple[int, int]] = []
        for n, a, _ in self.dims:
            if merged and merged[-1][1] == n * a:
                merged[-1] = (merged[-1][0] * n, a)
            else:
                merged.append((n, a))
        return SourceSet(self.source, tuple(merged))

    def locate(
        self, positions: Positions
    ) -> tuple[slice, npt.NDArray[np.bool_] | None, npt.NDArray[np.int64]]:
        """Which of the ascending positions (k,) the block covers, and where they live.

        Returns (span, mask, offsets): the covered ones are `positions[span]`, or those of them
        where `mask` is set; offsets are theirs, in that order.
        """
        lo, hi = 0, positions.size
        if hi and positions[0] < self.source:
            lo = int(np.searchsorted(positions, self.source))
        if hi and positions[-1] >= self.source_stop:
            hi = int(np.searchsorted(positions, self.source_stop))
        span = slice(lo, hi)
        if self.is_run:
            shift = self.live - self.source
            return span, None, positions[span] + shift if shift else positions[span]
        rest = positions[span] - self.source
        offsets = np.full(rest.size, self.live, np.int64)
        inside: npt.NDArray[np.bool_] | None = None
        room = self.source_stop - self.source
        for n, a, b in self.dims:
            if a == 1:
                index, rest = rest, np.zeros_like(rest)
            else:
                index = rest // a
                rest = rest - index * a
            if n * a < room:
                fits = index < n
                inside = fits if inside is None else inside & fits
            offsets += index * b
            room = a
        if room > 1:
            fits = rest == 0
            inside = fits if inside is None else inside & fits
        if inside is None or inside.all():
            return span, None, offsets
        return span, inside, offsets[inside]

    def pieces(self, max_extent: int) -> Iterator[Block]:
        """Cut into blocks whose elements lie within `max_extent` positions, in ascending order."""
        if self.source_stop - self.source <= max_extent or not self.dims:
            yield self
            return
        (n, a, b), rest = self.dims[0], self.dims[1:]
        inner = Block(self.key, self.source, self.live, rest, self.widen)
        extent = inner.source_stop - inner.source
        step = max(1, (max_extent - extent) // a + 1) if max_extent >= extent else 1
        for at in range(0, n, step):
            count = min(step, n - at)
            dims = ((count, a, b), *rest) if count > 1 else rest
            piece = Block(self.key, self.source + at * a, self.live + at * b, dims, self.widen)
            if extent > max_extent:
                yield from piece.pieces(max_extent)
            else:
                yield piece

    def positions(self) -> npt.NDArray[np.int64]:
        """(num,) the positions covered, ascending."""
        return self._grid(self.source, [(n, a) for n, a, _ in self.dims])

    def offsets(self) -> npt.NDArray[np.int64]:
        """(num,) where they live."""
        return self._grid(self.live, [(n, b) for n, _, b in self.dims])

    @staticmethod
    def _grid(start: int, dims: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
        grid = np.array([start], np.int64)
        for n, step in dims:
            grid = (grid[:, None] + np.arange(n, dtype=np.int64) * step).reshape(-1)
        return grid

    def to_json(self) -> list[Any]:
        return [self.key, self.source, self.live, [list(dim) for dim in self.dims], self.widen]

    @classmethod
    def from_json(cls, value: Any) -> Block:
        key, source, live, dims, widen = value
        sizes = tuple((int(n), int(a), int(b)) for n, a, b in dims)
        return cls(str(key), int(source), int(live), sizes, bool(widen))


def blocks_of_copy(
    key: str,
    shape: Sequence[int],
    source: tuple[int, Sequence[int]],
    live: tuple[int, Sequence[int]],
    *,
    widen: bool = False,
) -> list[Block]:
    """The blocks of a copy of `shape`; `source` and `live` are (offset, strides).

    One block, or one per live copy where an element goes to several places. None for an empty
    shape. Raises UnmappableError if elements of the source overlap, or if there are too many
    copies.
    """
    dims = list(zip(shape, source[1], live[1], strict=True))
    if math.prod(shape) == 0:
        return []
    spread = [(n, b) for n, a, b in dims if n > 1 and a == 0]
    if math.prod(n for n, _ in spread) > MAX_BROADCAST:
        raise UnmappableError(f"one element goes to {math.prod(n for n, _ in spread)} places")
    merged = merge_dims((n, a, b) for n, a, b in dims if a != 0)
    starts = [
        sum(steps) for steps in itertools.product(*([i * b for i in range(n)] for n, b in spread))
    ]
    return [Block(key, source[0], live[0] + start, merged, widen) for start in starts]


def merge_dims(dims: Iterable[Dim]) -> tuple[Dim, ...]:
    """Sort dimensions by source stride and merge those that are contiguous on both sides.

    Raises UnmappableError unless each source stride exceeds the extent of those after it.
    """
    wanted = sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: (-dim[1], -dim[2]))
    merged: list[Dim] = []
    for n, a, b in wanted:
        if merged and merged[-1][1:] == (n * a, n * b):
            merged[-1] = (merged[-1][0] * n, a, b)
        else:
            merged.append((n, a, b))
    extent = 1
    for n, a, b in reversed(merged):
        if a < extent or b <= 0:
            raise UnmappableError(f"the elements of a copy overlap or run backwards: {merged}")
        extent += (n - 1) * a
    return tuple(merged)
