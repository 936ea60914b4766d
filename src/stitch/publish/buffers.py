"""The host buffers that snapshots are taken into."""

from __future__ import annotations

from stitch.tensors import HostWeights
from stitch.types import Schema


class BufferPool:
    """Free snapshot buffers. Not thread-safe: the publisher's lock guards it.

    One buffer always exists beside the baseline. More are allocated only while publishing overlaps
    with publishing, and are given back as soon as it no longer does.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._free = [HostWeights.allocate(schema)]

    def take(self) -> HostWeights | None:
        """A free buffer, or None."""
        return self._free.pop() if self._free else None

    def allocate(self) -> HostWeights:
        """One buffer more, its pages touched. Raises MemoryError."""
        return HostWeights.allocate(self._schema)

    def give(self, buffer: HostWeights) -> None:
        """Take back a buffer whose content is no longer needed."""
        self._free.append(buffer)

    def trim(self) -> None:
        """Drop all free buffers but one."""
        del self._free[1:]
