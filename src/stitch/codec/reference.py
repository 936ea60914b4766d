"""The codec once more, slow and obvious: what the kernels and encoders are tested against.

Written from docs/format.md, in Python integers and plain numpy. It shares only the two compressors'
calls with the product.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from blake3 import blake3
from pcodec import standalone

from stitch.codec.reference_bins import read_binned
from stitch.codec.reference_pairs import read_paired
from stitch.codec.words import Words
from stitch.types import DTYPE_BITS, FLOAT_DTYPES, Schema, TensorSpec

Integers = npt.NDArray[np.object_]
"""Arrays of Python integers: nothing overflows."""

MASK = (1 << 64) - 1


def order(words: Words, dtype: str) -> Integers:
    """A number for each word (n,): the word itself, or its rank among the values of a float."""
    numbers = words.astype(object)
    if dtype not in FLOAT_DTYPES:
        return numbers
    half = 1 << (8 * words.itemsize - 1)
    return np.array([n if n < half else half - 1 - n for n in numbers], dtype=object)


def steps(old: Words, new: Words, dtype: str) -> Integers:
    """Signed steps (n,), wrapped to the words' width."""
    half = 1 << (8 * old.itemsize - 1)
    difference = order(new, dtype) - order(old, dtype)
    return np.array([(d + half) % (2 * half) - half for d in difference], dtype=object)


def take_steps(old: Words, step: Integers, dtype: str) -> Words:
    """The words (n,) that lie `step` from `old`."""
    half = 1 << (8 * old.itemsize - 1)
    moved = order(old, dtype) + step
    if dtype in FLOAT_DTYPES:
        wrapped = [(n + half) % (2 * half) - half for n in moved]
        numbers = [n if n >= 0 else half - 1 - n for n in wrapped]
    else:
        numbers = [n % (2 * half) for n in moved]
    return np.array(numbers, dtype=old.dtype)


def zigzag(step: Integers) -> Integers:
    """0, -1, 1, -2, 2, ... -> 0, 1, 2, 3, 4, ..."""
    return np.array([2 * s if s >= 0 else -2 * s - 1 for s in step], dtype=object)


def unzigzag(number: Integers) -> Integers:
    return np.array([n // 2 if n % 2 == 0 else -(n + 1) // 2 for n in number], dtype=object)


def gaps_and_steps(old: Words, new: Words, dtype: str) -> tuple[list[int], list[int]]:
    """The two streams of `gaps` for one bucket."""
    positions = [i for i in range(old.size) if old[i] != new[i]]
    gaps = [p - q - 1 for p, q in zip(positions, [-1, *positions], strict=False)]
    return gaps, list(steps(old[positions], new[positions], dtype))


def take_gaps(old: Words, gaps: Sequence[int], step: Sequence[int], dtype: str) -> Words:
    """The new words (n,) of a bucket."""
    new = old.copy()
    position = -1
    for gap, one in zip(gaps, step, strict=True):
        position += int(gap) + 1
        place = slice(position, position + 1)
        new[place] = take_steps(old[place], np.array([int(one)], dtype=object), dtype)
    return new


def tokens_and_planes(old: Words, new: Words, dtype: str) -> tuple[bytes, list[bytes]]:
    """The content of `dense` in form 1: the tokens, and the planes of what they cannot hold."""
    numbers = zigzag(steps(old, new, dtype))
    tokens = [min(n, 3) for n in numbers] + [0] * (-old.size % 4)
    fours = zip(*(tokens[at::4] for at in range(4)), strict=True)
    packed = bytes(a | b << 2 | c << 4 | d << 6 for a, b, c, d in fours)
    return packed, planes([n - 3 for n in numbers if n >= 3], old.itemsize)


def planes(numbers: Sequence[int], width: int) -> list[bytes]:
    """Byte planes of numbers of `width` bytes, lowest first."""
    return [bytes((n >> (8 * plane)) & 0xFF for n in numbers) for plane in range(width)]


def take_dense(old: Words, payload: bytes, dtype: str) -> Words:
    """The new words (n,) of a bucket."""
    n, width = old.size, old.itemsize
    form, rest = payload[0], payload[1:]
    assert form in (0, 1)
    if form == 1:
        packed, rest = read_stream(rest, -(-n // 4), "<u1")
        tokens = [int(four) >> shift & 3 for four in packed for shift in (0, 2, 4, 6)]
        assert not any(tokens[n:])
    else:
        tokens = [3] * n
    num_wide, least = sum(token == 3 for token in tokens), 3 * form
    wide = [least] * num_wide
    for plane in range(width):
        numbers, rest = read_stream(rest, num_wide, "<u1")
        wide = [w + (int(b) << 8 * plane) for w, b in zip(wide, numbers, strict=True)]
    assert rest == b""
    assert all(w < 1 << 8 * width for w in wide)
    following = iter(wide)
    zigzags = [next(following) if token == 3 else token for token in tokens[:n]]
    return take_steps(old, unzigzag(np.array(zigzags, dtype=object)), dtype)


def lanes(data: bytes) -> tuple[int, int]:
    """The digest lanes of one tensor's bytes."""
    data += b"\0" * (-len(data) % 8)
    a = b = 0
    for i, (word,) in enumerate(struct.iter_unpack("<Q", data)):
        key = (i + 1) * 0x9E3779B97F4A7C15 & MASK
        h = (word ^ key) * 0xD6E8FEB86659FD93 & MASK
        h ^= h >> 32
        h = h * 0xA0761D6478BD642F & MASK
        h ^= h >> 29
        a = (a + h) & MASK
        g = h * 0xE7037ED1A0B428DB & MASK
        b = (b + (g ^ (g >> 32))) & MASK
    return a, b


def version_digest(specs: Sequence[TensorSpec], tensor_bytes: Sequence[bytes]) -> str:
    """The digest of a version, from the bytes of its tensors in schema order."""
    message = b""
    for spec, data in zip(specs, tensor_bytes, strict=True):
        for text in (spec.name.encode(), spec.dtype.encode()):
            message += struct.pack("<I", len(text)) + text
        message += struct.pack(f"<I{len(spec.shape)}Q", len(spec.shape), *spec.shape)
        message += struct.pack("<QQQ", spec.num_bytes, *lanes(data))
    return hashlib.blake2b(message, digest_size=16).hexdigest()


def read_stream(data: bytes, count: int, code: str) -> tuple[npt.NDArray[Any], bytes]:
    """`count` numbers of numpy type `code` from the front of `data`, and the rest."""
    tag, length = struct.unpack_from("<BI", data)
    body, rest = data[5 : 5 + length], data[5 + length :]
    if tag == 0:
        return np.frombuffer(body, code), rest
    if tag == 2:
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(body), code), rest
    if tag == 3:
        return np.array(read_binned(body, count, np.dtype(code)), code), rest
    numbers = standalone.simple_decompress(body)
    assert tag == 1
    assert numbers.dtype == np.dtype(code)
    assert numbers.size == count
    return numbers, rest


def apply_part(
    data: bytes,
    schema: Schema,
    tensors: Mapping[int, Words],
    before: Mapping[int, Words] | None = None,
) -> None:
    """Apply one patch part to `tensors` (schema index -> all its words) in place.

    `before`: all tensors before the first part; a copy is taken here if this is the first one.
    """
    before = {index: words.copy() for index, words in tensors.items()} if before is None else before
    magic, version, packed, text = struct.unpack_from("<8sIII", data)
    assert magic == b"\x89STITCH\n"
    assert version == 1
    assert data[20:36] == blake3(data[:20] + data[36 : 36 + packed]).digest(length=16)
    header_json = zstandard.ZstdDecompressor().decompress(data[36 : 36 + packed])
    assert len(header_json) == text
    header = json.loads(header_json)
    assert header["schema_digest"] == schema.digest
    offset = 36 + packed
    for dtype, flat, encoding, num_changed, length, checksum in header["buckets"]:
        payload = data[offset : offset + length]
        offset += length
        assert checksum == blake3(payload).hexdigest(length=16)
        slices = list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))
        old = np.concatenate([tensors[t][start:stop] for t, start, stop in slices])
        if encoding == "gaps":
            width = max(2, DTYPE_BITS.get(dtype, 8) // 8)
            if payload[0] == 4:
                assert len(payload) == 5 + int.from_bytes(payload[1:5], "little")
                gap, step = read_paired(payload[5:], num_changed)
            else:
                first, rest = read_stream(payload, num_changed, "<u4")
                second, rest = read_stream(rest, num_changed, f"<i{width}")
                assert rest == b""
                gap, step = first.tolist(), second.tolist()
            new = take_gaps(old, gap, step, dtype)
        elif encoding == "ranks":
            from stitch.codec.reference_ranks import take_ranks

            new = take_ranks(payload, schema, dtype, slices, before, num_changed)
        else:
            assert encoding == "dense"
            new = take_dense(old, payload, dtype)
        assert int(np.count_nonzero(old != new)) == num_changed
        at = 0
        for t, start, stop in slices:
            tensors[t][start:stop] = new[at : at + stop - start]
            at += stop - start
    assert offset == len(data)
