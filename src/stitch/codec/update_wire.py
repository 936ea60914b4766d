"""Update sets as bytes: a container laid out as a safetensors file. See docs/format.md."""

from __future__ import annotations

import itertools
import json
import struct
from typing import Any

import numpy as np

from stitch.codec.header_checks import check_int, check_keys, check_list, parse_json
from stitch.codec.update import TensorUpdate, UpdateSet
from stitch.codec.words import WORD_DTYPES, Words
from stitch.errors import CorruptPatchError, SchemaMismatchError, UnsupportedFormatError
from stitch.types import Schema

FORMAT = "stitch-update-1"
MAX_HEADER_BYTES = 1 << 27
_LENGTH = struct.Struct("<Q")
_MAX = 1 << 62


def _sections(index: int, update: TensorUpdate) -> list[tuple[str, str, Any]]:
    """(name, safetensors dtype, array) of one update."""
    word = f"U{8 * update.new.itemsize}"
    rows: list[tuple[str, str, Any]] = [
        (f"{index}.new", word, update.new),
        (f"{index}.old", word, update.old),
    ]
    if update.positions is not None:
        rows.insert(0, (f"{index}.positions", "I64", update.positions))
    return rows


def to_bytes(update_set: UpdateSet, schema: Schema) -> bytes:
    """See docs/format.md, "Update sets". Wide arrays come first, so that all are aligned."""
    rows = [row for i, update in enumerate(update_set.updates) for row in _sections(i, update)]
    rows.sort(key=lambda row: -row[2].itemsize)
    places = [[update.tensor, update.start] for update in update_set.updates]
    header: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "schema": schema.digest,
            "updates": json.dumps(places, separators=(",", ":")),
        }
    }
    offset = 0
    for name, dtype, array in rows:
        end = offset + array.nbytes
        header[name] = {"dtype": dtype, "shape": [array.size], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    blobs = [np.ascontiguousarray(array).data for _, _, array in rows]
    return b"".join([_LENGTH.pack(len(text)), text, *blobs])


def from_bytes(data: bytes | memoryview, schema: Schema) -> UpdateSet:
    """Read :func:`to_bytes`; every number is checked against the schema before it is used."""
    view = memoryview(data).cast("B")
    header, body = _split(view)
    places = _check_metadata(header.pop("__metadata__", None), schema)
    arrays = _arrays(header, body)
    updates: list[TensorUpdate] = []
    for index, (tensor, start) in enumerate(places):
        updates.append(_update(index, tensor, start, arrays, schema))
    if arrays:
        raise CorruptPatchError(f"update set: unknown arrays {sorted(arrays)[:5]}")
    for before, after in itertools.pairwise(updates):
        if (after.tensor, after.first) <= (before.tensor, before.last):
            raise CorruptPatchError(
                f"update set: updates of tensors {before.tensor} and {after.tensor} are out of "
                "order or overlap"
            )
    return UpdateSet(updates)


def _split(view: memoryview) -> tuple[dict[str, Any], memoryview]:
    if len(view) < _LENGTH.size:
        raise CorruptPatchError(f"update set: {len(view)} bytes, at least {_LENGTH.size} needed")
    (length,) = _LENGTH.unpack_from(view)
    if length > min(MAX_HEADER_BYTES, len(view) - _LENGTH.size):
        raise CorruptPatchError(f"update set: header of {length} bytes in {len(view)}")
    end = _LENGTH.size + length
    header = parse_json(bytes(view[_LENGTH.size : end]), "update set header")
    if not isinstance(header, dict):
        raise CorruptPatchError("update set: the header is not an object")
    return header, view[end:]


def _check_metadata(value: object, schema: Schema) -> list[tuple[int, int]]:
    """(tensor, start) of each update."""
    what = "update set metadata"
    fields = check_keys(value, {"format", "schema", "updates"}, set(), what)
    if fields["format"] != FORMAT:
        raise UnsupportedFormatError(
            f"{what}: format {fields['format']!r:.60}, this release reads {FORMAT!r}"
        )
    if fields["schema"] != schema.digest:
        raise SchemaMismatchError(
            f"the update set is for schema {fields['schema']!r:.60}, these weights have "
            f"{schema.digest}"
        )
    if not isinstance(fields["updates"], str):
        raise CorruptPatchError(f"{what}: updates must be a string")
    places = []
    for row in check_list(parse_json(fields["updates"].encode(), what), f"{what}: updates"):
        pair = check_list(row, f"{what}: updates")
        if len(pair) != 2:
            raise CorruptPatchError(f"{what}: updates must be pairs, got {pair!r:.80}")
        tensor = check_int(pair[0], f"{what}: tensor", len(schema) - 1)
        start = check_int(pair[1], f"{what}: start", schema.tensors[tensor].num_words)
        places.append((tensor, start))
    return places


def _arrays(header: dict[str, Any], body: memoryview) -> dict[str, tuple[str, memoryview]]:
    """Name -> (safetensors dtype, bytes); the arrays fill the body without holes, in order."""
    arrays = {}
    offset = 0
    widths = {"I64": 8, "U64": 8, "U32": 4, "U16": 2, "U8": 1}
    for name, value in header.items():
        what = f"update set array {name!r:.60}"
        fields = check_keys(value, {"dtype", "shape", "data_offsets"}, set(), what)
        shape = check_list(fields["shape"], what)
        span = check_list(fields["data_offsets"], what)
        if len(shape) != 1 or len(span) != 2 or fields["dtype"] not in widths:
            raise CorruptPatchError(f"{what}: unexpected dtype, shape or offsets")
        count = check_int(shape[0], f"{what}: length", _MAX)
        begin, end = (check_int(n, f"{what}: offsets", _MAX) for n in span)
        if begin != offset or end != begin + count * widths[fields["dtype"]] or end > len(body):
            raise CorruptPatchError(
                f"{what}: {count} {fields['dtype']} numbers at [{begin}:{end}] of {len(body)} "
                f"bytes, expected to begin at {offset}"
            )
        arrays[name] = (fields["dtype"], body[begin:end])
        offset = end
    if offset != len(body):
        raise CorruptPatchError(f"update set: {len(body) - offset} bytes after its arrays")
    return arrays


def _update(
    index: int,
    tensor: int,
    start: int,
    arrays: dict[str, tuple[str, memoryview]],
    schema: Schema,
) -> TensorUpdate:
    spec = schema.tensors[tensor]
    what = f"update set, update {index} of tensor {spec}"
    new, old = (_words(arrays, f"{index}.{half}", spec.word_bytes, what) for half in ("new", "old"))
    if not new.size or new.size != old.size:
        raise CorruptPatchError(f"{what}: {new.size} new and {old.size} old words")
    if f"{index}.positions" not in arrays:
        if start + new.size > spec.num_words:
            raise CorruptPatchError(f"{what}: [{start}:{start + new.size}] is outside the tensor")
        return TensorUpdate(tensor=tensor, positions=None, start=start, new=new, old=old)
    dtype, data = arrays.pop(f"{index}.positions")
    if dtype != "I64" or start != 0:
        raise CorruptPatchError(f"{what}: positions are {dtype}, start is {start}")
    positions = np.frombuffer(data, "<i8")
    if positions.size != new.size:
        raise CorruptPatchError(f"{what}: {positions.size} positions for {new.size} words")
    inside = positions[0] >= 0 and positions[-1] < spec.num_words
    if not inside or not (positions[1:] > positions[:-1]).all():
        raise CorruptPatchError(f"{what}: positions do not ascend inside the tensor")
    return TensorUpdate(tensor=tensor, positions=positions, new=new, old=old)


def _words(
    arrays: dict[str, tuple[str, memoryview]], name: str, word_bytes: int, what: str
) -> Words:
    if name not in arrays:
        raise CorruptPatchError(f"{what}: array {name!r} is missing")
    dtype, data = arrays.pop(name)
    if dtype != f"U{8 * word_bytes}":
        raise CorruptPatchError(f"{what}: {name!r} is {dtype}, expected U{8 * word_bytes}")
    return np.frombuffer(data, WORD_DTYPES[word_bytes])
