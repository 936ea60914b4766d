"""A reader of weights as they will be after an update set, for writing them by streaming."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from stitch.codec.update import TensorUpdate, UpdateSet
from stitch.codec.words import Words
from stitch.tensors.reader import WeightReader
from stitch.types import Schema


class PatchedReader:
    """`reader` with `update` laid over it. A WeightReader; holds no copy of the weights."""

    def __init__(self, reader: WeightReader, update: UpdateSet) -> None:
        self._reader = reader
        self._updates: dict[int, list[TensorUpdate]] = defaultdict(list)
        for part in update.updates:
            self._updates[part.tensor].append(part)

    @property
    def schema(self) -> Schema:
        return self._reader.schema

    def read(self, name: str, start: int, stop: int) -> Words:
        """Words [start, stop) after the update: a fresh array, or the reader's own if untouched."""
        words = self._reader.read(name, start, stop)
        touching = [
            part
            for part in self._updates.get(self.schema.index[name], [])
            if part.first < stop and part.last >= start
        ]
        if not touching:
            return words
        patched = np.array(words)
        for part in touching:
            if part.positions is None:
                lo, hi = max(start, part.start), min(stop, part.stop)
                patched[lo - start : hi - start] = part.new[lo - part.start : hi - part.start]
            else:
                lo, hi = np.searchsorted(part.positions, (start, stop))
                patched[part.positions[lo:hi] - start] = part.new[lo:hi]
        return patched
