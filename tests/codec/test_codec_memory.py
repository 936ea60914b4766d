"""Encoding and applying take a few buckets of memory beyond the weights, the files and the update.

Counted is what Python and numpy allocate. `benchmarks.codec` measures the whole process.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import numpy as np
import pytest
from codec_cases import Slow, from_words, same_bits

from stitch.codec import DigestState, PatchEncoder, decode_parts, warm
from stitch.codec.encodings import ENCODINGS
from stitch.tensors import HostWeights

BUCKET_ELEMENTS = 1 << 19
BUCKET_BYTES = 2 * BUCKET_ELEMENTS
NUM_BUCKETS = 5
FIXED_BYTES = 1 << 18
"""What is needed however small the buckets are."""

Result = TypeVar("Result")


@cache
def step(density: float) -> tuple[HostWeights, HostWeights, DigestState]:
    """BF16 weights before and after, and the digest state before; all loops are compiled."""
    rng = np.random.default_rng(1)
    size = NUM_BUCKETS * BUCKET_ELEMENTS
    old = (rng.normal(0, 0.02, size).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = old.copy()
    moved = rng.random(size) < density
    new[moved] += rng.choice(np.array([1, -1]), int(moved.sum())).astype(np.uint16)
    before, after = (from_words({"a": ("BF16", words)}) for words in (old, new))
    warm(before.schema)
    return before, after, DigestState.of(before, threads=1)


def traced(work: Callable[[], Result]) -> tuple[Result, int]:
    """What `work` returns, and the most bytes that were allocated at once on the way."""
    tracemalloc.start()
    try:
        return work(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def peaks(encoding: str, threads: int, density: float) -> tuple[float, float]:
    """Buckets that encode and apply take beyond inputs and outputs."""
    old, new, before = step(density)

    def encoded() -> list[bytes]:
        encoder = PatchEncoder(
            old,
            new,
            before=before,
            encoding=encoding,
            threads=threads,
            max_bucket_elements=BUCKET_ELEMENTS,
        )
        return list(encoder.parts())

    encoded()  # loads what is loaded on first use
    parts, encode_bytes = traced(encoded)
    encode_bytes -= sum(map(len, parts))
    held = HostWeights.load(old)
    (update, _), decode_bytes = traced(lambda: decode_parts(parts, held, before, threads=threads))
    _, write_bytes = traced(lambda: update.apply(held, threads=threads))
    assert same_bits(held, new)
    apply_bytes = max(decode_bytes - update.num_bytes, write_bytes)
    return (encode_bytes - FIXED_BYTES) / BUCKET_BYTES, (apply_bytes - FIXED_BYTES) / BUCKET_BYTES


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("density", [0.005, 0.03])
@pytest.mark.parametrize("encoding", [*ENCODINGS, "auto"])
def test_a_step_takes_four_buckets(encoding: str, density: float, threads: int) -> None:
    """Of a policy in training, or one with a high learning rate."""
    encode, apply = peaks(encoding, threads, density)
    assert encode <= 4
    assert apply <= (4 if encoding != "dense" else 4 * threads)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("density", [0.6, 1.0])
def test_a_step_in_which_most_changes_takes_four_buckets_a_thread(
    density: float, threads: int
) -> None:
    encode, apply = peaks("auto", threads, density)
    assert encode <= 4 * threads
    assert apply <= 4 * threads


@pytest.mark.parametrize("density", [0.0003, 0.03])
@pytest.mark.parametrize("encoding", [*ENCODINGS, "auto"])
def test_readers_that_copy_take_four_buckets(encoding: str, density: float) -> None:
    """Two of them are a bucket's old and new words; no other bucket's are held meanwhile."""
    old, new, before = step(density)

    def encoded() -> list[bytes]:
        encoder = PatchEncoder(
            Slow(old),
            Slow(new),
            before=before,
            encoding=encoding,
            threads=1,
            max_bucket_elements=BUCKET_ELEMENTS,
        )
        return list(encoder.parts())

    encoded()  # loads what is loaded on first use
    parts, encode_bytes = traced(encoded)
    encode_bytes -= sum(map(len, parts))
    (update, _), decode_bytes = traced(lambda: decode_parts(parts, Slow(old), before, threads=1))
    assert (encode_bytes - FIXED_BYTES) / BUCKET_BYTES <= 4
    assert (decode_bytes - update.num_bytes - FIXED_BYTES) / BUCKET_BYTES <= 4
