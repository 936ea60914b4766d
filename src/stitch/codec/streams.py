"""Streams inside a payload: a tag, a length, then raw, pcodec, zstd, binned or paired bytes.

The reader always knows how many numbers of which width it wants, so nothing is allocated from what
a stream says about itself. See docs/format.md, "Streams".
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, standalone

from stitch.codec import bins, pairs
from stitch.codec.changes import BucketChanges
from stitch.errors import CorruptPatchError, UnsupportedFormatError

RAW, PCODEC, ZSTD, BINS, PAIRS = 0, 1, 2, 3, 4
_HEAD = struct.Struct("<BI")
_MANY = 8192
"""From this many numbers on, binned is as small as pcodec, and made in a third of the time."""
_SHORT_BYTES = 4096
"""Up to this size zstd is tried as well; it can beat pcodec on short streams only."""

Numbers = npt.NDArray[np.integer[Any]]


def _pcodec_config() -> ChunkConfig:
    # Gaps and steps are noise with a skewed histogram: searching for structure only costs time.
    return ChunkConfig(
        compression_level=7, mode_spec=ModeSpec.classic(), delta_spec=DeltaSpec.no_op()
    )


def write_numbers(numbers: Numbers) -> bytes:
    """One stream holding `numbers` (n,), in the smallest of the forms worth trying."""
    if numbers.size >= _MANY:
        packed = bins.write(numbers)
        if len(packed) < numbers.nbytes:
            return _HEAD.pack(BINS, len(packed)) + packed
    raw = numbers.tobytes()
    forms = [(len(raw), RAW, raw)]
    if 0 < numbers.size < _MANY:
        packed = bytes(standalone.simple_compress(np.ascontiguousarray(numbers), _pcodec_config()))
        forms.append((len(packed), PCODEC, packed))
        if len(raw) <= _SHORT_BYTES:
            squeezed = zstandard.ZstdCompressor(level=3, write_content_size=True).compress(raw)
            forms.append((len(squeezed), ZSTD, squeezed))
    _, tag, body = min(forms, key=lambda form: form[:2])
    return _HEAD.pack(tag, len(body)) + body


def write_bytes(values: npt.NDArray[np.uint8]) -> bytes:
    """One stream holding contiguous bytes (n,): through zstd's cheapest level, or raw."""
    packed = zstandard.ZstdCompressor(level=1, write_content_size=True).compress(values.data)
    if len(packed) < values.size:
        return _HEAD.pack(ZSTD, len(packed)) + packed
    return _HEAD.pack(RAW, values.size) + values.tobytes()


def read_numbers(
    data: memoryview, count: int, dtype: np.dtype[Any], what: str
) -> tuple[Numbers, memoryview]:
    """The next stream of exactly `count` numbers, and the bytes after it.

    The caller has bounded `count`. Raises CorruptPatchError naming `what`.
    """
    tag, body, rest = _next(data, what)
    length = len(body)
    if tag == RAW:
        if length != count * dtype.itemsize:
            raise CorruptPatchError(
                f"{what}: {length} raw bytes, expected {count} numbers of {dtype.itemsize} bytes"
            )
        return np.frombuffer(body, dtype), rest
    if tag == PCODEC:
        return _read_pcodec(bytes(body), count, dtype, what), rest
    if tag == BINS:
        return bins.read(body, count, dtype, what), rest
    if tag == ZSTD:
        raw = decompress_exactly(bytes(body), count * dtype.itemsize, what)
        return np.frombuffer(raw, dtype), rest
    raise UnsupportedFormatError(f"{what}: unknown stream form {tag}")


def _next(data: memoryview, what: str) -> tuple[int, memoryview, memoryview]:
    """(form, body) of the next stream, and the bytes after it."""
    if len(data) < _HEAD.size:
        raise CorruptPatchError(f"{what}: {len(data)} bytes left, a stream needs {_HEAD.size}")
    tag, length = _HEAD.unpack_from(data)
    end = _HEAD.size + length
    body = data[_HEAD.size : end]
    if len(body) != length:
        raise CorruptPatchError(f"{what}: stream of {length} bytes, only {len(body)} are left")
    return tag, body, data[end:]


def write_changes(changes: BucketChanges) -> bytes | None:
    """One paired stream holding all changes of a bucket, or None, see `pairs.write`."""
    body = pairs.write(changes)
    return None if body is None else _HEAD.pack(PAIRS, len(body)) + body


def is_paired(data: memoryview) -> bool:
    """Whether the next stream says that it is one of changes."""
    return len(data) > 0 and data[0] == PAIRS


def paired_body(data: memoryview, what: str) -> tuple[memoryview, memoryview]:
    """The body of the next stream, which is a paired one, and the bytes after the stream.

    Raises CorruptPatchError naming `what`.
    """
    _, body, rest = _next(data, what)
    return body, rest


def _read_pcodec(body: bytes, count: int, dtype: np.dtype[Any], what: str) -> Numbers:
    numbers = np.empty(count, dtype)
    progress = _guarded(lambda: standalone.simple_decompress_into(body, numbers), what)
    if progress.n_processed != count or not progress.finished:
        raise CorruptPatchError(
            f"{what}: the pcodec stream holds {'' if progress.finished else 'more than '}"
            f"{progress.n_processed} numbers, expected {count}"
        )
    return numbers


_of_thread = threading.local()


def _decompressor() -> zstandard.ZstdDecompressor:
    """This thread's: making one takes longer than unpacking a header."""
    try:
        made: zstandard.ZstdDecompressor = _of_thread.decompressor
    except AttributeError:
        made = _of_thread.decompressor = zstandard.ZstdDecompressor()
    return made


def decompress_exactly(body: bytes, num_bytes: int, what: str) -> bytes:
    """Decompress one zstd frame that must hold exactly `num_bytes`, without allocating more."""

    def work() -> bytes:
        stated = zstandard.get_frame_parameters(body).content_size
        if stated != num_bytes:
            raise CorruptPatchError(f"{what}: zstd frame of {stated} bytes, expected {num_bytes}")
        return _decompressor().decompress(body, max_output_size=num_bytes, allow_extra_data=False)

    raw: bytes = _guarded(work, what)
    if len(raw) != num_bytes:
        raise CorruptPatchError(f"{what}: {len(raw)} bytes after zstd, expected {num_bytes}")
    return raw


def _guarded(work: Callable[[], Any], what: str) -> Any:
    """Run a decompressor; whatever it raises on bad bytes becomes CorruptPatchError."""
    try:
        return work()
    except (CorruptPatchError, MemoryError):
        raise
    except (zstandard.ZstdError, RuntimeError, TypeError, ValueError) as error:
        raise CorruptPatchError(f"{what}: {error}") from error
    except BaseException as error:
        # A panic inside a Rust extension arrives as a BaseException that nothing exports.
        if type(error).__name__ != "PanicException":
            raise
        raise CorruptPatchError(f"{what}: the decompressor gave up: {error}") from None
