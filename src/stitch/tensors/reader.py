"""Storage words and the port through which weights are read, wherever they live."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from stitch.errors import SchemaMismatchError, UsageError
from stitch.types import Schema, TensorSpec

Words = NDArray[np.unsignedinteger[Any]]
"""A tensor's storage words in logical (row-major) order: 1-D, little-endian, unsigned."""

WORD_DTYPES: Mapping[int, np.dtype[np.unsignedinteger[Any]]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}
"""Bytes of a storage word -> its numpy dtype."""

Progress = Callable[[int, int], None]
"""Called as `progress(bytes done, bytes in all)` from the thread that does the work."""

CHUNK_BYTES = 8 << 20
"""Bytes that streaming code handles at a time; bounds its memory."""


class WeightReader(Protocol):
    """Random access to the words of a fixed set of tensors; safe to use from several threads."""

    @property
    def schema(self) -> Schema:
        """Names, dtypes and shapes; never changes."""
        ...

    def read(self, name: str, start: int, stop: int) -> Words:
        """Words [start, stop) of a tensor: a read-only view or a fresh array.

        Raises SchemaMismatchError for an unknown name, UsageError for a span outside the tensor and
        CorruptCheckpointError if the bytes cannot be had in full.
        """
        ...


class DeviceReader(WeightReader, Protocol):
    """A WeightReader whose words can be had where they live."""

    def device_words(self, name: str, start: int, stop: int) -> Any:
        """Words [start, stop) as a flat integer torch tensor (uint8, int16, int32 or int64)."""
        ...


def is_on_device(reader: WeightReader) -> TypeGuard[DeviceReader]:
    """Whether the words can be had where they live."""
    return hasattr(reader, "device_words")


class Subset:
    """A WeightReader of some of another one's tensors; SchemaMismatchError for unknown ones."""

    def __init__(self, reader: WeightReader, names: Iterable[str]) -> None:
        wanted = set(names)
        if unknown := sorted(wanted - set(reader.schema.index)):
            raise SchemaMismatchError(f"no tensors are named {unknown[:5]}")
        self._reader = reader
        self._schema = Schema.of(spec for spec in reader.schema.tensors if spec.name in wanted)

    @property
    def schema(self) -> Schema:
        return self._schema

    def read(self, name: str, start: int, stop: int) -> Words:
        return self._reader.read(name, start, stop)


def word_dtype(spec: TensorSpec) -> np.dtype[np.unsignedinteger[Any]]:
    """The numpy dtype of a tensor's storage words."""
    return WORD_DTYPES[spec.word_bytes]


def spec_for(schema: Schema, name: str, start: int, stop: int) -> TensorSpec:
    """The spec of `name`, after checking that the span [start, stop) lies inside it."""
    if name not in schema:
        raise SchemaMismatchError(f"no tensor is named {name!r}")
    spec = schema[name]
    if not 0 <= start <= stop <= spec.num_words:
        raise UsageError(f"tensor {name!r} has {spec.num_words} words; asked for [{start}, {stop})")
    return spec


def spans(spec: TensorSpec, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, int]]:
    """Cut a tensor into consecutive word spans (start, stop) of at most `chunk_bytes` bytes."""
    step = max(1, chunk_bytes // spec.word_bytes)
    for start in range(0, spec.num_words, step):
        yield start, min(start + step, spec.num_words)


def batches_of_names(schema: Schema, limit_bytes: int = 64 << 20) -> Iterator[list[str]]:
    """All names, in lists of tensors of about `limit_bytes`, at least one."""
    names: list[str] = []
    room = limit_bytes
    for spec in schema.tensors:
        if names and spec.num_bytes > room:
            yield names
            names, room = [], limit_bytes
        names.append(spec.name)
        room -= spec.num_bytes
    if names:
        yield names


def read_all(reader: WeightReader, name: str) -> Words:
    """Every word of one tensor."""
    return reader.read(name, 0, reader.schema[name].num_words)
