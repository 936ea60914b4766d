"""Weights in host memory: one contiguous array of words per tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stitch.errors import SchemaMismatchError, UsageError
from stitch.tensors.reader import Progress, WeightReader, Words, spans, spec_for, word_dtype
from stitch.types import Schema

_ALIGNMENT_BYTES = 64
"""Every tensor starts on a cache line, so that no view of its words is ever misaligned."""


class HostWeights:
    """All tensors of a schema in RAM. A WeightReader whose reads are views, not copies."""

    def __init__(self, schema: Schema, words: Sequence[Words]) -> None:
        """Adopt one array per tensor, in schema order: 1-D, contiguous, of the word dtype."""
        if len(words) != len(schema):
            raise SchemaMismatchError(f"{len(schema)} tensors need {len(schema)} arrays")
        for spec, array in zip(schema.tensors, words, strict=True):
            wanted = ((spec.num_words,), word_dtype(spec))
            if (array.shape, array.dtype) != wanted or not array.flags.c_contiguous:
                raise SchemaMismatchError(
                    f"{spec} needs contiguous words {wanted}, got {array.shape} {array.dtype}"
                )
        self._schema = schema
        self._words = list(words)
        self.extents: NDArray[np.int64] = np.array(
            [(array.ctypes.data, array.size) for array in self._words], np.int64
        ).reshape(-1, 2)
        """(tensors, 2): the address of each tensor's first word, and its words. Never changes."""
        self.stamp: object = None
        """What its owner wants to remember of the content; forgotten once others may write."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are made anew from the words: `extents` are of this process's only."""
        return type(self), (self._schema, self._words)

    @classmethod
    def allocate(cls, schema: Schema) -> HostWeights:
        """Zeroed weights whose pages exist already, so that filling them later never faults."""
        offsets = []
        total = 0
        for spec in schema.tensors:
            offsets.append(total)
            total += -(-spec.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        arena = np.empty(total + _ALIGNMENT_BYTES, np.uint8)
        arena.fill(0)
        arena = arena[-arena.ctypes.data % _ALIGNMENT_BYTES :]
        return cls(
            schema,
            [
                arena[offset : offset + spec.num_bytes].view(word_dtype(spec))
                for spec, offset in zip(schema.tensors, offsets, strict=True)
            ],
        )

    @classmethod
    def load(cls, reader: WeightReader, progress: Progress | None = None) -> HostWeights:
        """A copy of everything that `reader` holds."""
        weights = cls.allocate(reader.schema)
        weights.fill(reader, progress)
        return weights

    def fill(self, reader: WeightReader, progress: Progress | None = None) -> None:
        """Overwrite every word with the reader's; both must have the same schema."""
        if reader.schema != self._schema:
            raise SchemaMismatchError("weights can be filled only from a reader of the same schema")
        self.stamp = None
        done = 0
        for spec, words in zip(self._schema.tensors, self._words, strict=True):
            for start, stop in spans(spec):
                words[start:stop] = reader.read(spec.name, start, stop)
                done += (stop - start) * spec.word_bytes
                if progress is not None:
                    progress(done, self._schema.num_bytes)

    @property
    def schema(self) -> Schema:
        return self._schema

    def words(self, name: str) -> Words:
        """The whole tensor, writable."""
        if name not in self._schema:
            raise SchemaMismatchError(f"no tensor is named {name!r}")
        return self.words_at(self._schema.index[name])

    def words_at(self, index: int) -> Words:
        """The whole tensor at a schema index, writable."""
        if not 0 <= index < len(self._words):
            raise UsageError(f"there is no tensor {index}: the schema has {len(self._words)}")
        self.stamp = None
        return self._words[index]

    def read(self, name: str, start: int, stop: int) -> Words:
        """A read-only view of words [start, stop)."""
        spec_for(self._schema, name, start, stop)
        view = self._words[self._schema.index[name]][start:stop]
        view.flags.writeable = False
        return view
