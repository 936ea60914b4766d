"""The safetensors header: strict parsing of hostile bytes, and reproducible writing.

A file is an 8-byte little-endian header length, that many bytes of JSON starting with `{`, and the
data. The JSON maps tensor names to dtype, shape and `data_offsets` (begin, end) into the data, and
`__metadata__` to a string-to-string map. The ranges MUST cover the data without holes or overlaps,
so two names can never share one range. Source: the "Format" section of the safetensors README, 0.8.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stitch.errors import CorruptCheckpointError, SchemaMismatchError
from stitch.tensors.strict_json import METADATA, members
from stitch.types import DTYPE_BITS, TensorSpec

LENGTH_BYTES = 8
"""Bytes of the header length in front of the header."""

MAX_HEADER_BYTES = 100_000_000
"""The format's own cap."""

_FIELDS = {"dtype", "shape", "data_offsets"}
_MAX_DIM = 2**63 - 1
_DTYPE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")
_DATA_ALIGNMENT_BYTES = 8


@dataclass(frozen=True)
class Extent:
    """One tensor and the offset of its first byte behind the header."""

    spec: TensorSpec
    begin: int


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a file holds: `extents` in file order and the free-form metadata."""

    extents: tuple[Extent, ...]
    metadata: Mapping[str, str]


def parse_header(text: bytes | memoryview, num_data_bytes: int, file: str) -> Header:
    """Check everything that a header says against the `num_data_bytes` that follow it.

    `file` names the source in errors. Raises CorruptCheckpointError.
    """
    try:
        return _parse(text, num_data_bytes)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{file}: {error}") from None
    except RecursionError:
        raise CorruptCheckpointError(f"{file}: the header nests too deeply") from None
    except UnicodeDecodeError as error:
        raise CorruptCheckpointError(f"{file}: the header is not valid UTF-8: {error}") from None


def build_header(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Length and header of a file holding `specs` back to back, in this order.

    Equal input gives equal bytes: metadata is sorted, and spaces pad the data to 8 bytes.
    """
    entries: dict[str, object] = {}
    if metadata:
        entries[METADATA] = dict(sorted(_check_metadata(metadata).items()))
    begin = 0
    for spec in specs:
        _check_name(spec.name)
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [begin, begin + spec.num_bytes],
        }
        begin += spec.num_bytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _DATA_ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise SchemaMismatchError(f"a header of {len(text)} bytes exceeds {MAX_HEADER_BYTES}")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def file_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Wide words first, then by name, so that no tensor starts on a misaligned byte."""
    return sorted(specs, key=lambda spec: (-spec.word_bytes, spec.name))


def _parse(text: bytes | memoryview, num_data_bytes: int) -> Header:
    metadata: Mapping[str, str] | None = None
    extents: dict[str, Extent] = {}
    for name, entry in members(str(text, "utf-8")):
        if name in extents or (name == METADATA and metadata is not None):
            raise CorruptCheckpointError(f"the JSON repeats the key {name!r:.200}")
        if name == METADATA:
            metadata = _check_metadata(entry)
        else:
            extents[name] = _parse_entry(name, entry, num_data_bytes)
    ordered = sorted(extents.values(), key=lambda extent: (extent.begin, extent.spec.num_bytes))
    _check_cover(ordered, num_data_bytes)
    return Header(extents=tuple(ordered), metadata=metadata or {})


def _check_metadata(metadata: object) -> Mapping[str, str]:
    if not isinstance(metadata, Mapping) or not all(isinstance(v, str) for v in metadata.values()):
        raise CorruptCheckpointError(f"{METADATA} must map strings to strings")
    for text in (*metadata, *metadata.values()):
        _check_unicode(text)
    return metadata


def _check_name(name: str) -> None:
    if not name or name == METADATA or "\0" in name:
        raise CorruptCheckpointError(f"a tensor cannot be named {name!r:.200}")
    _check_unicode(name)


def _check_unicode(text: str) -> None:
    """JSON escapes can spell half of a surrogate pair, which no file could hold again."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CorruptCheckpointError(f"{text!r:.200} is not valid Unicode") from None


def _parse_entry(name: str, entry: object, num_data_bytes: int) -> Extent:
    _check_name(name)
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise CorruptCheckpointError(f"tensor {name!r:.200} needs exactly {sorted(_FIELDS)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not _DTYPE_NAME.fullmatch(dtype):
        raise CorruptCheckpointError(f"tensor {name!r:.200} has a malformed dtype {dtype!r:.80}")
    if not isinstance(shape, list) or not all(_is_dim(dim) for dim in shape):
        raise CorruptCheckpointError(f"tensor {name!r:.200} has a malformed shape {shape!r:.80}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_dim, offsets)):
        raise CorruptCheckpointError(f"tensor {name!r:.200} has malformed offsets {offsets!r:.80}")
    begin, end = offsets
    if not begin <= end <= num_data_bytes:
        raise CorruptCheckpointError(
            f"tensor {name!r:.200} claims bytes [{begin}, {end}) of {num_data_bytes} data bytes: "
            "the offsets are wrong or the file is truncated"
        )
    spec = TensorSpec(name, dtype, tuple(shape), end - begin)
    _check_size(spec)
    return Extent(spec, begin)


def _is_dim(value: object) -> bool:
    return type(value) is int and value <= _MAX_DIM


def _check_size(spec: TensorSpec) -> None:
    """The byte range must be what dtype and shape need; unknown dtypes say nothing about it."""
    if spec.dtype not in DTYPE_BITS:
        return
    num_bits = math.prod(spec.shape) * DTYPE_BITS[spec.dtype]
    # Two F4 values share a byte along the last dimension; no library can address an odd row.
    row_bits = math.prod(spec.shape[-1:]) * DTYPE_BITS[spec.dtype]
    if num_bits % 8 or (spec.dtype == "F4" and row_bits % 8):
        raise CorruptCheckpointError(f"tensor {spec!s:.300} does not fill whole bytes")
    if num_bits != 8 * spec.num_bytes:
        raise CorruptCheckpointError(
            f"tensor {spec!s:.300} needs {num_bits // 8} bytes, its offsets give {spec.num_bytes}"
        )


def _check_cover(extents: Sequence[Extent], num_data_bytes: int) -> None:
    """The sorted extents must follow each other without holes and end where the data ends."""
    end = 0
    before: Extent | None = None
    for extent in extents:
        if extent.begin != end:
            raise CorruptCheckpointError(_describe_misfit(before, extent, end))
        end += extent.spec.num_bytes
        before = extent
    if end != num_data_bytes:
        raise CorruptCheckpointError(
            f"the tensors cover {end} of {num_data_bytes} data bytes: holes are not allowed"
        )


def _describe_misfit(before: Extent | None, extent: Extent, end: int) -> str:
    name = extent.spec.name
    if before is None or extent.begin > end:
        return f"a hole of {extent.begin - end} bytes precedes tensor {name!r:.200}"
    if (before.begin, before.spec.num_bytes) == (extent.begin, extent.spec.num_bytes):
        return (
            f"tensors {before.spec.name!r:.200} and {name!r:.200} share one byte range: the format "
            "forbids it; store tied weights once"
        )
    return f"tensors {before.spec.name!r:.200} and {name!r:.200} overlap"
