"""Placement: every checkpoint tensor's blocks on one rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stitch.codec.words import Positions
from stitch.engines.placement.blocks import Block, SourceSet

_BATCH = 32
"""With more blocks than this, a tensor's are found by bisection."""


class Placement:
    """Name -> blocks, sorted by their first element. Names without blocks are not listed."""

    def __init__(self, blocks: Mapping[str, Iterable[Block]]) -> None:
        self._blocks = {
            name: tuple(sorted(set(mine), key=lambda b: (b.source, -b.num, b.key, b.live)))
            for name, mine in blocks.items()
        }
        self._blocks = {name: mine for name, mine in self._blocks.items() if mine}
        self._bounds: dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}

    def __getitem__(self, name: str) -> tuple[Block, ...]:
        return self._blocks.get(name, ())

    def __contains__(self, name: object) -> bool:
        return name in self._blocks

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self._blocks.values()))

    def keys(self, name: str) -> frozenset[str]:
        """The live storages that hold elements of a tensor."""
        return frozenset(block.key for block in self[name])

    def resolve(
        self, name: str, positions: Positions
    ) -> Iterator[tuple[Block, slice, npt.NDArray[np.bool_] | None, npt.NDArray[np.int64]]]:
        """Where the ascending positions (k,) of a tensor live on this rank.

        Yields (block, span, mask, live offsets) for each block that holds some, as Block.locate
        has them. An element may live in several places; those on other ranks are left out.
        """
        if not positions.size:
            return
        for block in self.between(name, int(positions[0]), int(positions[-1]) + 1):
            span, mask, offsets = block.locate(positions)
            if offsets.size:
                yield block, span, mask, offsets

    def between(self, name: str, start: int, stop: int) -> Sequence[Block]:
        """The blocks whose extent meets elements [start, stop)."""
        blocks = self[name]
        if len(blocks) <= _BATCH:
            return [b for b in blocks if b.source < stop and start < b.source_stop]
        if name not in self._bounds:
            starts = np.array([block.source for block in blocks], np.int64)
            stops = np.array([block.source_stop for block in blocks], np.int64)
            self._bounds[name] = starts, np.maximum.accumulate(stops)
        starts, reach = self._bounds[name]
        first = int(np.searchsorted(reach, start, "right"))
        last = int(np.searchsorted(starts, stop, "left"))
        return [b for b in blocks[first:last] if start < b.source_stop]

    def with_blocks(self, more: Mapping[str, Iterable[Block]]) -> Placement:
        """A placement in which the names of `more` have those blocks instead."""
        return Placement({**self._blocks, **more})

    def without(self, names: Iterable[str]) -> Placement:
        dropped = set(names)
        return Placement({n: b for n, b in self._blocks.items() if n not in dropped})

    def elements(self, name: str) -> list[SourceSet]:
        """What each block covers, in the order of the blocks."""
        return [block.elements for block in self[name]]

    def ties(self) -> list[frozenset[str]]:
        """Groups of names that share live words."""
        by_key: dict[str, list[tuple[Block, str]]] = {}
        for name, blocks in self._blocks.items():
            for block in blocks:
                by_key.setdefault(block.key, []).append((block, name))
        pairs = [pair for group in by_key.values() for pair in _sharing(group)]
        groups: list[set[str]] = []
        for one, other in pairs:
            met = [group for group in groups if one in group or other in group]
            groups = [group for group in groups if group not in met]
            groups.append({one, other}.union(*met))
        return [frozenset(group) for group in groups]

    def to_json(self) -> dict[str, Any]:
        return {name: [b.to_json() for b in blocks] for name, blocks in self._blocks.items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Placement:
        return cls({name: map(Block.from_json, blocks) for name, blocks in value.items()})


def _sharing(group: list[tuple[Block, str]]) -> list[tuple[str, str]]:
    """Pairs of names whose blocks of one storage share words."""
    group.sort(key=lambda entry: entry[0].live)
    clusters: list[list[tuple[Block, str]]] = []
    reach = -1
    for block, name in group:
        if block.live >= reach:
            clusters.append([])
        clusters[-1].append((block, name))
        reach = max(reach, block.live_stop)
    return [pair for cluster in clusters for pair in _cluster_pairs(cluster)]


def _cluster_pairs(cluster: list[tuple[Block, str]]) -> list[tuple[str, str]]:
    """The same, where extents meet: interleaved blocks share no word, tied ones do."""
    names = sorted({name for _, name in cluster})
    if len(names) < 2:
        return []
    first = min(block.live for block, _ in cluster)
    size = max(block.live_stop for block, _ in cluster) - first
    if size == sum(block.num for block, _ in cluster) and _cover_all(cluster, first, size):
        return []
    owner = np.full(size, -1, np.int32)
    pairs: set[tuple[str, str]] = set()
    for block, name in cluster:
        at = SourceSet(block.live - first, tuple((n, b) for n, _, b in block.dims)).of(owner)
        for other in np.unique(at):
            if other >= 0 and names[other] != name:
                pairs.add((names[other], name))
        at[...] = names.index(name)
    return sorted(pairs)


def _cover_all(cluster: list[tuple[Block, str]], first: int, size: int) -> bool:
    """Whether blocks that have as many words as their common extent fill it, so none is shared."""
    filled = np.zeros(size, bool)
    for block, _ in cluster:
        SourceSet(block.live - first, tuple((n, b) for n, _, b in block.dims)).of(filled)[...] = (
            True
        )
    return bool(filled.all())
