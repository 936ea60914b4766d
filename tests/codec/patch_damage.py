"""Damage to patches that gets past every checksum, and what decoding may do with it.

Shared by the tests and by tests/fuzz. All randomness comes from a function `choose(n)` that gives a
number in 0..n-1, so that hypothesis, a fuzzer and a plain generator can drive it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import zstandard
from blake3 import blake3
from codec_cases import changed, mixed_schema, random_weights, same_bits

from stitch.codec import (
    Bucket,
    DigestState,
    PatchEncoder,
    decode_parts,
    pairs,
    read_header,
    streams,
)
from stitch.codec.encodings import ENCODINGS, DecodedChanges, OldWords
from stitch.codec.patch import PREAMBLE_BYTES, Entry, PatchHeader, payload_checksum, write_part
from stitch.codec.words import Positions, Words
from stitch.errors import (
    BaseMismatchError,
    CorruptPatchError,
    SchemaMismatchError,
    UnsupportedFormatError,
)
from stitch.tensors import HostWeights
from stitch.types import Schema, TensorSpec

NAMED_ERRORS = (CorruptPatchError, UnsupportedFormatError, BaseMismatchError, SchemaMismatchError)
"""What decoding may raise, whatever it is given."""

Choose = Callable[[int], int]

BUCKET_ELEMENTS = 256
FEW_CHANGES = 64
"""A subject's `gaps` are paired streams from as many changes on, or else binned ones."""


def subject_schema(every_width: bool) -> Schema:
    """A tensor like a model's and an integer one with block scales; or every word size as well."""
    specs = [
        TensorSpec.of("int8.weight", "I8", (24, 40)),
        TensorSpec.of("int8.weight_scale", "BF16", (24, 5)),
    ]
    mixed = mixed_schema()
    return Schema.of([*specs, *(mixed.tensors if every_width else [mixed["bf16.long"]])])


@dataclass(frozen=True)
class Subject:
    """Weights before and after a step, and the patches between them."""

    old: HostWeights
    new: HostWeights
    before: DigestState
    after: DigestState
    parts: dict[str, bytes]
    """Encoding -> the only part."""
    several: dict[str, list[bytes]]
    """Encoding -> several parts."""


@cache
def subject(every_width: bool = True) -> Subject:
    """Uniform bits in most tensors, magnitudes as in a model in some; many buckets."""
    schema = subject_schema(every_width)
    old = random_weights(schema, 1)
    rng = np.random.default_rng(2)
    for name in ("bf16.long", "int8.weight_scale"):
        words = old.words(name)
        words[:] = (
            rng.normal(0, 0.02, words.size).astype(np.float32).view(np.uint32) >> 16
        ).astype(np.uint16)
    new = changed(old, 0.08, 3)
    for index in range(len(schema)):
        words = new.words_at(index)
        moved = rng.random(words.size) < 0.2
        words[moved] += rng.choice(np.array([1, -1]), int(moved.sum())).astype(words.dtype)
    before, after = (DigestState.of(weights, threads=1) for weights in (old, new))

    def parts(encoding: str, max_part_bytes: int | None) -> list[bytes]:
        encoder = PatchEncoder(
            old,
            new,
            before=before,
            encoding=encoding,
            threads=1,
            max_part_bytes=max_part_bytes,
            max_bucket_elements=BUCKET_ELEMENTS,
        )
        paired = mock.patch.multiple(pairs, _FEW=FEW_CHANGES, _DENSE=1)
        binned = mock.patch.object(streams, "_MANY", FEW_CHANGES)
        with paired, binned:
            return list(encoder.parts())

    return Subject(
        old=old,
        new=new,
        before=before,
        after=after,
        parts={name: parts(name, None)[0] for name in ENCODINGS},
        several={name: parts(name, 600) for name in ENCODINGS},
    )


def split(part: bytes) -> tuple[PatchHeader, list[bytes]]:
    """A valid part's header and payloads."""
    header = read_header(part)
    return header, [part[e.offset : e.offset + e.num_bytes] for e in header.buckets]


def joined(header: PatchHeader, entries: Sequence[Entry], payloads: Sequence[bytes]) -> bytes:
    """A part around these payloads, with the lengths and checksums that they have."""
    rows = tuple(
        replace(entry, num_bytes=len(payload), checksum=payload_checksum(payload))
        for entry, payload in zip(entries, payloads, strict=True)
    )
    return write_part(replace(header, buckets=rows), payloads)


def with_text(text: bytes, payloads: bytes) -> bytes:
    """A part with any header text at all, and the right checksum over it."""
    packed = zstandard.compress(text)
    preamble = struct.pack("<8sIII", b"\x89STITCH\n", 1, len(packed), len(text))
    return preamble + blake3(preamble + packed).digest(length=16) + packed + payloads


def text_of(part: bytes) -> tuple[Any, bytes]:
    """A valid part's header as JSON, and the bytes after it."""
    packed = struct.unpack_from("<8sIII", part)[2]
    end = PREAMBLE_BYTES + packed
    return json.loads(zstandard.decompress(part[PREAMBLE_BYTES:end])), part[end:]


INTERESTING = [
    0, 1, 2, 7, 8, 15, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 1 << 24, (1 << 28) - 1, 1 << 28,
    (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63,
    (1 << 64) - 1,
]  # fmt: skip


def _flip_bits(data: bytearray, choose: Choose, other: bytes) -> None:
    for _ in range(1 + choose(4)):
        if data:
            data[choose(len(data))] ^= 1 << choose(8)


def _set_byte(data: bytearray, choose: Choose, other: bytes) -> None:
    if data:
        data[choose(len(data))] = choose(256)


def _set_early_byte(data: bytearray, choose: Choose, other: bytes) -> None:
    """Forms, counts and tables come first."""
    if data:
        data[choose(min(24, len(data)))] = choose(256)


def _set_number(data: bytearray, choose: Choose, other: bytes) -> None:
    width = 1 << choose(4)
    number = INTERESTING[choose(len(INTERESTING))] & ((1 << 8 * width) - 1)
    if len(data) >= width:
        at = choose(len(data) - width + 1)
        data[at : at + width] = number.to_bytes(width, "little")


def _cut_short(data: bytearray, choose: Choose, other: bytes) -> None:
    del data[choose(len(data) + 1) :]


def _remove(data: bytearray, choose: Choose, other: bytes) -> None:
    at = choose(len(data) + 1)
    del data[at : at + 1 + choose(8)]


def _repeat(data: bytearray, choose: Choose, other: bytes) -> None:
    at = choose(len(data) + 1)
    data[at:at] = data[at : at + 1 + choose(64)]


def _insert(data: bytearray, choose: Choose, other: bytes) -> None:
    at = choose(len(data) + 1)
    data[at:at] = bytes(choose(256) for _ in range(choose(6)))


def _splice(data: bytearray, choose: Choose, other: bytes) -> None:
    del data[choose(len(data) + 1) :]
    data += other[choose(len(other) + 1) :]


def _replace(data: bytearray, choose: Choose, other: bytes) -> None:
    data[:] = other


def _noise(data: bytearray, choose: Choose, other: bytes) -> None:
    data[:] = bytes(choose(256) for _ in range(choose(40)))


_INJURIES = (
    _flip_bits, _set_byte, _set_early_byte, _set_number, _cut_short, _remove, _repeat, _insert,
    _splice, _replace, _noise,
)  # fmt: skip


def damaged_payload(payload: bytes, choose: Choose, other: bytes) -> bytes:
    """One or more injuries; `other` is a payload to take bytes from."""
    data = bytearray(payload)
    for _ in range(1 + choose(3)):
        _INJURIES[choose(len(_INJURIES))](data, choose, other)
    return bytes(data)


def damaged_entry(entry: Entry, choose: Choose, schema: Schema) -> Entry:
    """A row of the table that lies, within what a header can say."""
    pieces, kind = entry.bucket.slices, choose(6)
    if kind == 0:
        return replace(entry, encoding=list(ENCODINGS)[choose(len(ENCODINGS))])
    if kind == 1:
        return replace(entry, num_changed=max(1, entry.num_changed + choose(5) - 2))
    if kind == 2:
        return replace(entry, num_changed=1 + choose(entry.bucket.num_elements))
    if kind == 3:
        shift = 8 * (choose(5) - 2)
        moved = [p._replace(start=max(0, p.start + shift), stop=p.stop + shift) for p in pieces]
        return replace(entry, bucket=Bucket(entry.bucket.dtype, tuple(moved)))
    if kind == 4:
        return replace(entry, bucket=Bucket(entry.bucket.dtype, pieces[::-1]))
    tensor = choose(len(schema))
    moved = [piece._replace(tensor=tensor) for piece in pieces]
    return replace(entry, bucket=Bucket(schema.tensors[tensor].dtype, tuple(moved)))


def damaged_part(part: bytes, choose: Choose, schema: Schema) -> bytes:
    """The part with damaged payloads, rows or order; all lengths and checksums are right."""
    header, payloads = split(part)
    entries = list(header.buckets)
    for _ in range(1 + choose(2)):
        if not entries:
            break
        at, other = choose(len(entries)), choose(len(entries))
        kind = choose(8)
        if kind < 4:
            payloads[at] = damaged_payload(payloads[at], choose, payloads[other])
        elif kind == 4:
            payloads[at], payloads[other] = payloads[other], payloads[at]
        elif kind == 5:
            entries[at], entries[other] = entries[other], entries[at]
        elif kind == 6:
            entries[at] = damaged_entry(entries[at], choose, schema)
        elif choose(2):
            entries[at], payloads[at] = entries[other], payloads[other]
        else:
            del entries[at], payloads[at]
    return joined(header, entries, payloads)


def check_decoding(
    parts: Sequence[bytes], subject: Subject, old: HostWeights | None = None
) -> Exception | None:
    """Decode what may be anything: a named error, or exactly the new weights. Returns the error.

    `old`: weights that stand in for the true ones, without the digest state telling.
    """
    weights = subject.old if old is None else old
    copy = HostWeights.load(weights)
    try:
        update, after = decode_parts(parts, weights, subject.before, threads=1)
    except NAMED_ERRORS as error:
        assert same_bits(copy, weights)
        return error
    assert same_bits(copy, weights)
    assert after.version_digest() == subject.after.version_digest()
    update.apply(copy, threads=1)
    assert same_bits(copy, subject.new)
    update.undo(copy, threads=1)
    assert same_bits(copy, subject.old)
    return None


def check_payload(
    encoding: str, payload: bytes, num_changed: int, bucket: Bucket, subject: Subject
) -> Exception | None:
    """Decode one payload: an error that begins with its name, or what the port promises."""
    old = OldWords(bucket=bucket, weights=subject.old)
    whole = np.concatenate(old.whole())
    try:
        found = ENCODINGS[encoding].decode(
            memoryview(payload), num_changed=num_changed, old=old, what="the bucket"
        )
    except (CorruptPatchError, UnsupportedFormatError) as error:
        refused: Exception = error
    else:
        _check_changes(found, whole, num_changed, bucket)
        return None
    assert str(refused).startswith("the bucket"), refused
    return refused


def bucket_positions(found: DecodedChanges, bucket: Bucket) -> Positions:
    """The positions (k,), counted along the bucket."""
    assert found.positions is not None
    positions, lo, offset = found.positions.copy(), 0, 0
    if found.ends is None:
        return positions
    for piece, hi in zip(bucket.slices, found.ends.tolist(), strict=True):
        positions[lo:hi] += offset - piece.start
        lo, offset = hi, offset + piece.num_elements
    return positions


def _check_changes(found: DecodedChanges, whole: Words, num_changed: int, bucket: Bucket) -> None:
    if found.positions is None:
        assert np.array_equal(found.old, whole)
        assert int(np.count_nonzero(found.new != whole)) == num_changed
    else:
        assert found.positions.size == found.new.size == num_changed
        positions = bucket_positions(found, bucket)
        assert (np.diff(positions) > 0).all()
        assert positions[0] >= 0
        assert positions[-1] < whole.size
        assert np.array_equal(found.old, whole[positions])
        assert (found.new != found.old).all()
    assert found.old.dtype == found.new.dtype == whole.dtype
