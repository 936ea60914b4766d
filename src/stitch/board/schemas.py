"""A run's schema as it is stored: compressed, and strictly checked when read."""

from __future__ import annotations

import zstandard

from stitch.board import keys
from stitch.board.stores.creation import MAX_RECORD_BYTES
from stitch.board.stores.store import ObjectStore
from stitch.errors import CorruptRecordError, SchemaMismatchError
from stitch.strict_json import load_json
from stitch.types import DTYPE_BITS, Schema, TensorSpec

MAX_SCHEMA_BYTES = 256 * 2**20
"""Decompressed: 100 bytes a tensor make room for 2.6 million tensors."""

_MAX_NAME = 1000
_MAX_DIMS = 64
_MAX_COUNT = 2**60


def pack_schema(schema: Schema) -> bytes:
    return zstandard.ZstdCompressor(level=9).compress(schema.to_json_bytes())


def read_schema(store: ObjectStore, run: str, digest: str) -> Schema:
    """The schema with this digest. CorruptRecordError if it is missing or not what it says."""
    key = keys.schema(run, digest)
    data = store.get(key, max_bytes=MAX_RECORD_BYTES)
    if data is None:
        raise CorruptRecordError(f"{key} is named by the run's record, but it is missing")
    schema = parse_schema(_unpack(data, key), key)
    if schema.digest != digest:
        raise CorruptRecordError(f"{key}: the schema's digest is {schema.digest}")
    return schema


def _unpack(data: bytes, key: str) -> bytes:
    # Read through a stream: a frame may declare any size, and only a stream ignores that.
    try:
        reader = zstandard.ZstdDecompressor().stream_reader(data)
        text = reader.read(MAX_SCHEMA_BYTES + 1)
    except zstandard.ZstdError as error:
        raise CorruptRecordError(f"{key}: not zstd data ({error})") from None
    if len(text) > MAX_SCHEMA_BYTES:
        raise CorruptRecordError(f"{key}: unpacks to more than {MAX_SCHEMA_BYTES} bytes")
    return text


def parse_schema(data: bytes, key: str) -> Schema:
    """A schema from its canonical JSON."""
    rows = load_json(data, key)
    if not isinstance(rows, list):
        raise CorruptRecordError(f"{key}: holds a {type(rows).__name__}, wanted a list of tensors")
    try:
        return Schema(tuple(_spec(row, f"{key}: tensor {i}") for i, row in enumerate(rows)))
    except SchemaMismatchError as error:
        raise CorruptRecordError(f"{key}: {error}") from None


def _spec(row: object, where: str) -> TensorSpec:
    match row:
        case [str(name), str(dtype), list(shape), int(num_bytes)]:
            pass
        case _:
            raise CorruptRecordError(f"{where} is {row!r:.200}, wanted name, dtype, shape, size")
    if not 0 < len(name) <= _MAX_NAME or not 0 < len(dtype) <= _MAX_NAME:
        raise CorruptRecordError(f"{where} has a name or dtype of unusable length")
    if len(shape) > _MAX_DIMS:  # before multiplying: the product of very many takes for ever
        raise CorruptRecordError(f"{where} has {len(shape)} dimensions, at most {_MAX_DIMS}")
    count = 1
    for dim in shape:
        if isinstance(dim, bool) or not isinstance(dim, int) or not 0 <= dim <= _MAX_COUNT:
            raise CorruptRecordError(f"{where} has shape {shape!r:.200}")
        count *= dim
    if count > _MAX_COUNT:
        raise CorruptRecordError(f"{where} has shape {shape!r:.200}, which is too large")
    if isinstance(num_bytes, bool) or not 0 <= num_bytes <= _MAX_COUNT:
        raise CorruptRecordError(f"{where} has {num_bytes} bytes")
    bits = DTYPE_BITS.get(dtype)
    if bits is not None and count * bits != 8 * num_bytes:
        raise CorruptRecordError(f"{where} ({dtype} {shape}) has {num_bytes} bytes")
    return TensorSpec(name, dtype, tuple(shape), num_bytes)
