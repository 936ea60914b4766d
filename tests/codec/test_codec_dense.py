"""`dense`: tokens and planes are what the format's page says, and lead back."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from codec_cases import from_words

from stitch.codec import plan_buckets, reference
from stitch.codec.changes import BucketChanges, find_changes
from stitch.codec.encodings import OldWords
from stitch.codec.encodings.dense import PLANES, TOKENS, Dense
from stitch.tensors import HostWeights

Array = np.ndarray[Any, np.dtype[Any]]

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
WIDTHS = {"F8_E4M3": 1, "I8": 1, "BF16": 2, "U16": 2, "F32": 4, "I32": 4, "F64": 8, "I64": 8}


def changes_of(old: Array, new: Array, dtype: str) -> tuple[HostWeights, BucketChanges]:
    readers = [from_words({"t": (dtype, words)}) for words in (old, new)]
    (bucket,) = plan_buckets(readers[0].schema)
    return readers[0], find_changes(bucket, *readers)


def there_and_back(old: Array, new: Array, dtype: str) -> bytes:
    """The payload, decoded by both decoders."""
    weights, changes = changes_of(old, new, dtype)
    payload = Dense().encode(changes)
    decoded = Dense().decode(
        memoryview(payload),
        num_changed=changes.num_changed,
        old=OldWords(bucket=changes.bucket, weights=weights),
        what="here",
    )
    assert decoded.positions is None
    assert np.array_equal(decoded.old, old)
    assert np.array_equal(decoded.new, new)
    assert np.array_equal(reference.take_dense(old, payload, dtype), new)
    return payload


def streams_of(payload: bytes, counts: list[int]) -> list[bytes]:
    rest = payload[1:]
    found = []
    for count in counts:
        numbers, rest = reference.read_stream(rest, count, "<u1")
        found.append(numbers.tobytes())
    assert rest == b""
    return found


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 257, 4096, 4097, 9001])
def test_planes_equal_the_reference(dtype: str, n: int) -> None:
    width = WIDTHS[dtype]
    rng = np.random.default_rng(n)
    old = np.frombuffer(rng.bytes(n * width), WORDS[width]).copy()
    new = old ^ WORDS[width](1 << (8 * width - 1))
    payload = there_and_back(old, new, dtype)
    steps = reference.zigzag(reference.steps(old, new, dtype))
    if payload[0] == PLANES:
        assert streams_of(payload, [n] * width) == reference.planes(steps, width)
    assert payload[0] == PLANES or n < 10


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 257, 4096, 4097, 9001])
def test_tokens_equal_the_reference(dtype: str, n: int) -> None:
    width = WIDTHS[dtype]
    rng = np.random.default_rng(n)
    old = np.frombuffer(rng.bytes(n * width), WORDS[width]).copy()
    new = old + rng.integers(-4, 5, n).astype(WORDS[width])
    wide = rng.random(n) < 0.1
    new[wide] ^= np.frombuffer(rng.bytes(n * width), WORDS[width])[wide]
    old[0], new[0] = 5, 6
    payload = there_and_back(old, new, dtype)
    assert payload[0] == TOKENS
    tokens, planes = reference.tokens_and_planes(old, new, dtype)
    counts = [-(-n // 4), *[len(plane) for plane in planes]]
    assert streams_of(payload, counts) == [tokens, *planes]


def raw(*numbers: int) -> bytes:
    return struct.pack("<BI", 0, len(numbers)) + bytes(numbers)


@pytest.mark.parametrize(
    "payload",
    [
        bytes([0]) + raw(0, 2, 0, 1, 44) + raw(0, 0, 0, 0, 1),
        bytes([1]) + raw(0b01_00_10_00, 0b11) + raw(41) + raw(1),
    ],
)
def test_the_two_forms_of_one_change_written_by_hand(payload: bytes) -> None:
    """Steps of I16 words: 0, 1, 0, -1, 150; zigzag 0, 2, 0, 1, 300."""
    old = np.array([7, 7, 7, 7, 65500], np.uint16)
    new = np.array([7, 8, 7, 6, 114], np.uint16)
    weights, changes = changes_of(old, new, "I16")
    decoded = Dense().decode(
        memoryview(payload),
        num_changed=3,
        old=OldWords(bucket=changes.bucket, weights=weights),
        what="here",
    )
    assert decoded.new.tolist() == new.tolist()
    assert reference.take_dense(old, payload, "I16").tolist() == new.tolist()


def test_small_steps_cost_far_less_than_a_byte() -> None:
    rng = np.random.default_rng(1)
    old = rng.integers(0, 1 << 16, 100_000).astype(np.uint16)
    moved = rng.random(old.size) < 0.3
    new = old + np.where(moved, rng.choice([-1, 1], old.size), 0).astype(np.uint16)
    entropy_bytes = old.size * (-0.7 * np.log2(0.7) - 0.3 * np.log2(0.15)) / 8
    assert len(there_and_back(old, new, "I16")) < 1.03 * entropy_bytes


def test_noise_is_stored_raw() -> None:
    rng = np.random.default_rng(2)
    old, new = (np.frombuffer(rng.bytes(40_000), np.uint32) for _ in range(2))
    assert len(there_and_back(old, new, "I32")) == 40_000 + 1 + 4 * 5
