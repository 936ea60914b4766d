"""Digest terms of parts of tensors, and how they add up. See docs/format.md, "Digest". No torch.

A term belongs to a 64-bit word of the checkpoint tensor. Whoever holds a word whole gives its term;
of words that are held in part, the bytes are given, to be put together with those of others.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from stitch.codec.constants import GOLDEN, MIX_1, MIX_2, MIX_3
from stitch.codec.words import Lanes

EDGE = np.dtype([("index", "<u8"), ("value", "<u8"), ("mask", "u1")])
"""Bytes of one 64-bit word: its index in the tensor, the bytes in place, and which they are."""

Edges = npt.NDArray[np.void]


@dataclass(eq=False)
class Terms:
    """What one block adds to its tensor's lanes (2,), and its parts of words (k,) EDGE."""

    lanes: Lanes = field(default_factory=lambda: np.zeros(2, np.uint64))
    edges: Edges = field(default_factory=lambda: np.empty(0, EDGE))

    def to_json(self) -> list[str]:
        edges = base64.b64encode(self.edges.tobytes()).decode() if self.edges.size else ""
        return [self.lanes.astype(">u8").tobytes().hex(), edges]

    @classmethod
    def from_json(cls, value: Any) -> Terms:
        """Raises ValueError for anything that `to_json` does not write."""
        lanes, edges = value
        parts = np.frombuffer(base64.b64decode(edges, validate=True), EDGE)
        sums = np.frombuffer(bytes.fromhex(lanes), ">u8")
        if sums.size != 2:
            raise ValueError(f"lanes of {sums.size} numbers")
        return cls(sums.astype(np.uint64), parts)

    def same(self, other: Terms) -> bool:
        """Whether both give the same terms and the same bytes."""
        return bool((self.lanes == other.lanes).all()) and np.array_equal(self.edges, other.edges)


def settle_edges(edges: Edges, num_bytes: int) -> Terms:
    """Put parts of words together; whole words become terms, the others stay parts.

    `num_bytes`: the tensor's size; the last word may be short. Raises ValueError if two parts give
    the same byte.
    """
    if not edges.size:
        return Terms()
    edges = edges[np.argsort(edges["index"], kind="stable")]
    index = edges["index"]
    starts = np.flatnonzero(np.concatenate(([True], index[1:] != index[:-1])))
    masks = np.bitwise_or.reduceat(edges["mask"], starts)
    if int(np.add.reduceat(edges["mask"].astype(np.int64), starts).sum()) != int(masks.sum()):
        raise ValueError("parts of a 64-bit word overlap")
    values = np.bitwise_or.reduceat(edges["value"], starts)
    wanted = np.full(starts.size, 0xFF, np.uint8)
    if num_bytes % 8:
        wanted[index[starts] == num_bytes // 8] = (1 << num_bytes % 8) - 1
    whole = masks == wanted
    left = np.empty(int((~whole).sum()), EDGE)
    left["index"], left["value"] = index[starts][~whole], values[~whole]
    left["mask"] = masks[~whole]
    return Terms(mixed(index[starts][whole], values[whole]), left)


def join(terms: Iterable[Terms], num_bytes: int) -> Terms:
    """The sum of terms of disjoint elements of one tensor of `num_bytes`."""
    lanes = np.zeros(2, np.uint64)
    parts: list[Edges] = []
    for term in terms:
        lanes += term.lanes
        if term.edges.size:
            parts.append(term.edges)
    if not parts:
        return Terms(lanes)
    settled = settle_edges(np.concatenate(parts), num_bytes)
    return Terms(lanes + settled.lanes, settled.edges)


def mixed(index: npt.NDArray[np.uint64], words: npt.NDArray[np.uint64]) -> Lanes:
    """Lanes (2,) of 64-bit words (k,) with their indices (k,)."""
    h = (index.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    h = (h ^ words) * np.uint64(MIX_1)
    h = (h ^ (h >> np.uint64(32))) * np.uint64(MIX_2)
    h ^= h >> np.uint64(29)
    g = h * np.uint64(MIX_3)
    g ^= g >> np.uint64(32)
    return np.array([h.sum(dtype=np.uint64), g.sum(dtype=np.uint64)], np.uint64)
