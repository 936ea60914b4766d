"""The patch file: preamble, header with the table of buckets, payloads. See docs/format.md."""

from __future__ import annotations

import json
import operator
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import zstandard
from blake3 import blake3

from stitch.codec.buckets import ALIGNMENT, MAX_BUCKET_ELEMENTS, Bucket, Slice
from stitch.codec.header_checks import (
    check_hex,
    check_int,
    check_ints,
    check_keys,
    check_list,
    check_str,
    parse_json,
)
from stitch.codec.streams import decompress_exactly
from stitch.errors import CorruptPatchError, SchemaMismatchError, UnsupportedFormatError
from stitch.types import DTYPE_BITS, PatchStats, Schema, TensorSpec

MAGIC = b"\x89STITCH\n"
FORMAT = 1
CHECKSUM_BYTES = 16
MAX_HEADER_BYTES = 1 << 25
"""Bound of the uncompressed header, checked before anything is decompressed."""

_PREAMBLE = struct.Struct("<8sIII")
PREAMBLE_BYTES = _PREAMBLE.size + CHECKSUM_BYTES
_MAX_COUNT = 1 << 62
_MAX_DIMS = 64
_MAX_ROW_BYTES = 512
"""Twice what a row with one slice takes, less its dtype."""
_KNOWN_SCHEMAS = 8
_known_most: dict[str, int] = {}
"""Schema digest -> most header bytes, for the latest schemas: every patch asks, and it is slow."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of the table: a bucket with changes, and where its payload lies in the file."""

    bucket: Bucket
    encoding: str
    num_changed: int
    offset: int
    num_bytes: int
    checksum: str
    """First 16 bytes of the payload's BLAKE3, in hex."""


@dataclass(frozen=True, kw_only=True)
class PatchHeader:
    """What a part says about itself. Until `decode_parts` has proven it, these are only claims."""

    format: int
    part: int
    last: bool
    """Whether this part is the final one of its patch, so that `part + 1` parts make it up."""
    schema_digest: str
    digest_before: str
    digest_after: str | None
    """Known in the last part only."""
    num_elements: int
    """Elements that were compared for this part, changed or not."""
    num_absent: int
    """Buckets that were compared for this part and had no change."""
    buckets: tuple[Entry, ...]
    schema: Schema | None
    """Embedded by `stitch diff`, so that a lone file can be inspected."""

    @property
    def num_changed(self) -> int:
        return sum(entry.num_changed for entry in self.buckets)

    @property
    def encodings(self) -> Mapping[str, int]:
        """Encoding name -> number of buckets; 'absent' counts unchanged ones."""
        counts = Counter(entry.encoding for entry in self.buckets)
        if self.num_absent:
            counts["absent"] = self.num_absent
        return dict(sorted(counts.items()))

    def stats(self, num_bytes: int) -> PatchStats:
        """Statistics of this part, which takes `num_bytes` in all."""
        return PatchStats(
            num_elements=self.num_elements,
            num_changed=self.num_changed,
            num_bytes=num_bytes,
            encodings=self.encodings,
        )


def payload_checksum(payload: bytes | memoryview) -> str:
    return blake3(payload).hexdigest(length=CHECKSUM_BYTES)


def write_part(header: PatchHeader, payloads: Sequence[bytes]) -> bytes:
    """A whole patch file. `payloads` follow the order of `header.buckets`."""
    fields: dict[str, Any] = {
        "part": header.part,
        "last": header.last,
        "schema_digest": header.schema_digest,
        "digest_before": header.digest_before,
        "digest_after": header.digest_after,
        "num_elements": header.num_elements,
        "num_absent": header.num_absent,
        "buckets": [_row(entry) for entry in header.buckets],
    }
    if header.schema is not None:
        fields["schema"] = [spec.to_json() for spec in header.schema.tensors]
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    if len(text) > MAX_HEADER_BYTES:
        raise SchemaMismatchError(
            f"the header of part {header.part} takes {len(text)} bytes, at most {MAX_HEADER_BYTES} "
            "are allowed: use smaller parts or leave the schema out"
        )
    packed = zstandard.ZstdCompressor(level=9, write_content_size=True).compress(text)
    preamble = _PREAMBLE.pack(MAGIC, FORMAT, len(packed), len(text))
    checksum = blake3(preamble + packed).digest(length=CHECKSUM_BYTES)
    return b"".join([preamble, checksum, packed, *payloads])


def _row(entry: Entry) -> list[object]:
    flat = [n for piece in entry.bucket.slices for n in (piece.tensor, piece.start, piece.stop)]
    return [
        entry.bucket.dtype,
        flat,
        entry.encoding,
        entry.num_changed,
        entry.num_bytes,
        entry.checksum,
    ]


def most_header_bytes(schema: Schema) -> int:
    """More than a header for this schema takes uncompressed, were every slice a bucket."""
    known = _known_most.get(schema.digest)
    if known is not None:
        return known
    described = len(json.dumps([spec.to_json() for spec in schema.tensors]))
    rows = (
        -(-spec.num_words // ALIGNMENT) * (_MAX_ROW_BYTES + len(json.dumps(spec.dtype)))
        for spec in schema.tensors
    )
    if len(_known_most) >= _KNOWN_SCHEMAS:
        _known_most.clear()
    most = min(MAX_HEADER_BYTES, 4096 + 2 * described + sum(rows))
    return _known_most.setdefault(schema.digest, most)


def read_header(data: bytes | memoryview, max_text_bytes: int = MAX_HEADER_BYTES) -> PatchHeader:
    """Parse one part's header and check it, and the file's length, against each other.

    The payloads are not read, and no more than `max_text_bytes` of header unpacked: the objects of
    its JSON can take twenty times as much. Raises CorruptPatchError or UnsupportedFormatError.
    """
    view = memoryview(data)
    text, payload_start = _header_text(view, max_text_bytes)
    header = _parse(parse_json(text, "patch header"), payload_start)
    end = header.buckets[-1].offset + header.buckets[-1].num_bytes if header.buckets else None
    if (end or payload_start) != len(view):
        raise CorruptPatchError(
            f"patch part {header.part} has {len(view)} bytes, its table accounts for "
            f"{end or payload_start}"
        )
    return header


def _header_text(view: memoryview, max_text_bytes: int) -> tuple[bytes, int]:
    """The header's JSON, and the offset of the first payload."""
    if len(view) < PREAMBLE_BYTES or bytes(view[: len(MAGIC)]) != MAGIC:
        raise CorruptPatchError(
            f"not a Stitch patch: {len(view)} bytes starting with {bytes(view[: len(MAGIC)])!r}"
        )
    _, version, packed_bytes, text_bytes = _PREAMBLE.unpack_from(view)
    if version != FORMAT:
        raise UnsupportedFormatError(
            f"the patch has format version {version}, this release reads {FORMAT}"
        )
    packed = bytes(view[PREAMBLE_BYTES : PREAMBLE_BYTES + packed_bytes])
    preamble = bytes(view[: _PREAMBLE.size])
    stated = bytes(view[_PREAMBLE.size : PREAMBLE_BYTES])
    if len(packed) != packed_bytes or text_bytes > max_text_bytes:
        raise CorruptPatchError(
            f"patch header of {packed_bytes} bytes ({text_bytes} uncompressed): the file has "
            f"{len(packed)} bytes of it, and {max_text_bytes} uncompressed are allowed"
        )
    if blake3(preamble + packed).digest(length=CHECKSUM_BYTES) != stated:
        raise CorruptPatchError("patch header: its checksum does not match its bytes")
    text = decompress_exactly(packed, text_bytes, "patch header")
    return text, PREAMBLE_BYTES + packed_bytes


_KEYS = {
    "part",
    "last",
    "schema_digest",
    "digest_before",
    "digest_after",
    "num_elements",
    "num_absent",
    "buckets",
}


def _parse(value: object, payload_start: int) -> PatchHeader:
    fields = check_keys(value, _KEYS, {"schema"}, "patch header")
    part = check_int(fields["part"], "part", 1 << 31)
    what = f"patch part {part}"
    last, after = fields["last"], fields["digest_after"]
    if not isinstance(last, bool) or last != (after is not None):
        raise CorruptPatchError(f"{what}: last is {last!r:.20}, digest_after {after!r:.40}")
    offset = payload_start
    entries = []
    for number, row in enumerate(check_list(fields["buckets"], f"{what}: buckets")):
        entry = _parse_row(row, offset, f"{what}, bucket {number}")
        entries.append(entry)
        offset += entry.num_bytes
    header = PatchHeader(
        format=FORMAT,
        part=part,
        last=last,
        schema_digest=check_hex(fields["schema_digest"], f"{what}: schema_digest"),
        digest_before=check_hex(fields["digest_before"], f"{what}: digest_before"),
        digest_after=None if after is None else check_hex(after, f"{what}: digest_after"),
        num_elements=check_int(fields["num_elements"], f"{what}: num_elements", _MAX_COUNT),
        num_absent=check_int(fields["num_absent"], f"{what}: num_absent", _MAX_COUNT),
        buckets=tuple(entries),
        schema=_parse_schema(fields["schema"], what) if "schema" in fields else None,
    )
    if header.num_elements < sum(entry.bucket.num_elements for entry in entries):
        raise CorruptPatchError(f"{what}: num_elements is less than its buckets hold")
    if header.schema is not None and header.schema.digest != header.schema_digest:
        raise CorruptPatchError(f"{what}: the embedded schema does not have the stated digest")
    return header


_to_slice = partial(tuple.__new__, Slice)
"""As `Slice._make`, which runs Python for each slice."""


def _parse_row(row: object, offset: int, what: str) -> Entry:
    fields = check_list(row, what)
    if len(fields) != 6:
        raise CorruptPatchError(f"{what}: {len(fields)} fields, expected 6")
    dtype, flat, encoding, num_changed, num_bytes, checksum = fields
    flat = check_list(flat, f"{what}: slices")
    if not flat or len(flat) % 3:
        raise CorruptPatchError(f"{what}: {len(flat)} slice numbers, expected triples")
    check_ints(flat, f"{what}: slices", _MAX_COUNT)
    slices = tuple(map(_to_slice, zip(flat[::3], flat[1::3], flat[2::3], strict=True)))
    if any(map(operator.ge, flat[1::3], flat[2::3])):
        raise CorruptPatchError(f"{what}: a slice is empty")
    bucket = Bucket(check_str(dtype, f"{what}: dtype"), slices)
    count = check_int(num_changed, f"{what}: num_changed", MAX_BUCKET_ELEMENTS)
    if not 1 <= count <= bucket.num_elements:
        raise CorruptPatchError(
            f"{what}: {count} changed elements in a bucket of {bucket.num_elements}"
        )
    return Entry(
        bucket=bucket,
        encoding=check_str(encoding, f"{what}: encoding"),
        num_changed=count,
        offset=offset,
        num_bytes=check_int(num_bytes, f"{what}: length", _MAX_COUNT),
        checksum=check_hex(checksum, f"{what}: checksum"),
    )


def _parse_schema(value: object, what: str) -> Schema:
    specs = []
    for row in check_list(value, f"{what}: schema"):
        fields = check_list(row, f"{what}: schema")
        if len(fields) != 4:
            raise CorruptPatchError(f"{what}: a schema row has {len(fields)} fields, expected 4")
        name = check_str(fields[0], f"{what}: tensor name")
        dtype = check_str(fields[1], f"{what}: dtype of {name!r:.80}")
        dims = check_list(fields[2], f"{what}: shape of {name!r:.80}")
        if len(dims) > _MAX_DIMS:  # before multiplying: the product of very many takes for ever
            raise CorruptPatchError(f"{what}: tensor {name!r:.80} has {len(dims)} dimensions")
        shape = tuple(check_int(dim, f"{what}: shape of {name!r:.80}", _MAX_COUNT) for dim in dims)
        size = check_int(fields[3], f"{what}: num_bytes of {name!r:.80}", _MAX_COUNT)
        try:
            consistent = (
                dtype not in DTYPE_BITS or TensorSpec.of(name, dtype, shape).num_bytes == size
            )
        except SchemaMismatchError:
            consistent = False
        if not consistent:
            raise CorruptPatchError(f"{what}: tensor {name!r:.80} has an impossible size {size}")
        specs.append(TensorSpec(name, dtype, shape, size))
    try:
        return Schema(tuple(specs))
    except SchemaMismatchError as error:
        raise CorruptPatchError(f"{what}: {error}") from None
