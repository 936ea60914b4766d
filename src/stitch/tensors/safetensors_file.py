"""One safetensors file, read with positioned reads through a descriptor that stays open.

Not memory-mapped: a mapped file that is truncated or rewritten kills the process with SIGBUS or
changes under its reader; a read gives an error. A file that is replaced by a rename stays readable.
"""

from __future__ import annotations

import os
import stat
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import numpy as np

from stitch.errors import CorruptCheckpointError, UsageError
from stitch.tensors.header import LENGTH_BYTES, MAX_HEADER_BYTES, parse_header
from stitch.tensors.reader import Words, spec_for, word_dtype
from stitch.types import Schema


class SafetensorsFile:
    """A WeightReader over one file. Close it, or use it as a context manager."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open and check the header. Raises UsageError or CorruptCheckpointError."""
        self.path = Path(path)
        # O_NONBLOCK: opening a pipe must fail the check below instead of waiting for a writer.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self._fd = os.open(self.path, flags)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise UsageError(f"cannot open {str(self.path)!r}: {error}") from error
        self._close = weakref.finalize(self, os.close, self._fd)
        try:
            self._read_header()
        except BaseException:
            self._close()
            raise

    def _read_header(self) -> None:
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{self.path} is not a regular file")
        self._stamp = (status.st_size, status.st_mtime_ns)
        num_bytes = status.st_size
        if num_bytes < LENGTH_BYTES:
            raise CorruptCheckpointError(
                f"{self.path}: {num_bytes} bytes are too few for a safetensors file"
            )
        prefix = self._pread(0, np.empty(LENGTH_BYTES, np.uint8), "the header length")
        length = int.from_bytes(prefix.tobytes(), "little")
        limit = min(MAX_HEADER_BYTES, num_bytes - LENGTH_BYTES)
        if length > limit:
            raise CorruptCheckpointError(
                f"{self.path}: the first 8 bytes give a header of {length} bytes, at most {limit} "
                "are possible: not a safetensors file, or a truncated one"
            )
        text = self._pread(LENGTH_BYTES, np.empty(length, np.uint8), "the header")
        self._data_start = LENGTH_BYTES + length
        header = parse_header(text.data, num_bytes - self._data_start, str(self.path))
        self._metadata = header.metadata
        self._begins = {extent.spec.name: extent.begin for extent in header.extents}
        self._schema = Schema.of(extent.spec for extent in header.extents)

    @property
    def schema(self) -> Schema:
        return self._schema

    @property
    def metadata(self) -> Mapping[str, str]:
        """The file's free-form `__metadata__`."""
        return self._metadata

    def read(self, name: str, start: int, stop: int) -> Words:
        """A fresh array of words [start, stop)."""
        spec = spec_for(self._schema, name, start, stop)
        out = np.empty(stop - start, word_dtype(spec))
        offset = self.offset_of(name) + start * spec.word_bytes
        return self._pread(offset, out, f"tensor {name!r}")

    def offset_of(self, name: str) -> int:
        """The byte of the file at which a tensor's first word is."""
        return self._data_start + self._begins[name]

    def _pread(self, offset: int, out: Words, what: str) -> Words:
        """Fill `out` from the file at `offset`, or raise CorruptCheckpointError naming `what`."""
        if not self._close.alive:
            raise UsageError(f"{self.path} was closed")
        left = out.view(np.uint8).data
        while left:
            count = os.preadv(self._fd, [left], offset)
            if count == 0:
                raise CorruptCheckpointError(
                    f"{self.path}: ends at byte {offset}, inside {what}: it was truncated"
                )
            left = left[count:]
            offset += count
        status = os.fstat(self._fd)
        if (status.st_size, status.st_mtime_ns) != self._stamp:
            raise CorruptCheckpointError(
                f"{self.path}: was changed in place while {what} was being read"
            )
        return out

    def close(self) -> None:
        """Release the descriptor; later reads raise UsageError. Closing twice is harmless."""
        self._close()

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
