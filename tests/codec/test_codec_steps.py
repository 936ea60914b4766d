"""ULP steps are a bijection for every pair of bit patterns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch.codec import plan_buckets, reference
from stitch.codec.changes import find_changes
from stitch.codec.encodings.gaps import Gaps
from stitch.codec.reference_pairs import read_paired
from stitch.codec.streams import PAIRS
from stitch.codec.ulp import from_ordered, steps_between, take_steps, to_ordered
from stitch.tensors import HostWeights
from stitch.types import Schema, TensorSpec

SPREAD = np.array(
    [0, 1, 2, 0x7F, 0x80, 0xFF, 0x100, 0x3F7F, 0x3F80, 0x3F81, 0x7C00, 0x7F7F, 0x7F80, 0x7F81,
     0x7FFF, 0x8000, 0x8001, 0xBF80, 0xFC00, 0xFF7F, 0xFF80, 0xFF81, 0xFFC0, 0xFFFE, 0xFFFF],
    np.uint16,
)  # fmt: skip
"""Zeros, ones, infinities and NaNs of BF16 and F16, and their neighbours."""

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@pytest.mark.parametrize("dtype", ["BF16", "F16", "U16", "I16"])
def test_all_16_bit_patterns_reach_a_spread_of_others_and_back(dtype: str) -> None:
    old = np.arange(1 << 16, dtype=np.uint16)
    for target in SPREAD:
        new = np.full_like(old, target)
        assert np.array_equal(take_steps(old, steps_between(old, new, dtype), dtype), new)
        assert np.array_equal(take_steps(new, steps_between(new, old, dtype), dtype), old)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "U8", "I8", "F8_E8M0", "BOOL", "X1"])
def test_all_pairs_of_8_bit_patterns_are_reached(dtype: str) -> None:
    old, new = (a.ravel().astype(np.uint8) for a in np.meshgrid(np.arange(256), np.arange(256)))
    steps = steps_between(old, new, dtype)
    assert np.array_equal(take_steps(old, steps, dtype), new)
    assert np.array_equal(steps.astype(object), reference.steps(old, new, dtype))


@pytest.mark.parametrize("dtype", ["F32", "I32", "F64", "I64", "C64"])
def test_wide_patterns_are_reached(dtype: str) -> None:
    width = 4 if dtype.endswith("32") else 8
    rng = np.random.default_rng(3)
    edges = [0, 1, (1 << (8 * width - 1)) - 1, 1 << (8 * width - 1), (1 << (8 * width)) - 1]
    noise = rng.integers(0, 1 << 63, 200, dtype=np.uint64).astype(WORDS[width]).tolist()
    values = np.array(edges + noise, WORDS[width])
    old, new = (a.ravel() for a in np.meshgrid(values, values))
    steps = steps_between(old, new, dtype)
    assert np.array_equal(take_steps(old, steps, dtype), new)
    assert np.array_equal(steps[:2000].astype(object), reference.steps(old, new, dtype)[:2000])


def test_the_order_of_mapped_words_is_the_order_of_the_values() -> None:
    words = np.arange(1 << 16, dtype=np.uint16)
    values = (words.astype(np.uint32) << 16).view(np.float32)
    finite = np.isfinite(values)
    by_rank = values[finite][np.argsort(to_ordered(words)[finite])]
    assert (by_rank[1:] >= by_rank[:-1]).all()
    assert np.array_equal(from_ordered(to_ordered(words)), words)


def test_crossing_zero_and_flipping_its_sign_are_small_steps() -> None:
    zero, minus_zero, tiny, minus_tiny = np.array([0, 0x8000, 1, 0x8001], np.uint16)[:, None]
    assert steps_between(minus_zero, zero, "BF16") == 1
    assert steps_between(minus_tiny, tiny, "BF16") == 3


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "BF16", "U16", "F32", "I32", "F64", "I64"])
def test_gap_streams_equal_the_reference(dtype: str) -> None:
    width = {"8": 1, "3": 1, "6": 2, "2": 4, "4": 8}[dtype[-1]]
    rng = np.random.default_rng(6)
    for n, every in ((1, 1), (257, 3), (4097, 1), (70_000, 900), (70_000, 15)):
        old = np.frombuffer(rng.bytes(n * width), WORDS[width]).copy()
        new = old.copy()
        new[n - 1 :: -every] += WORDS[width](1 + rng.integers(100))
        schema = Schema.of([TensorSpec.of("t", dtype, [n])])
        readers = []
        for words in (old, new):
            weights = HostWeights.allocate(schema)
            weights.words("t")[:] = words
            readers.append(weights)
        (bucket,) = plan_buckets(schema)
        payload = Gaps().encode(find_changes(bucket, *readers))
        gaps, steps = reference.gaps_and_steps(old, new, dtype)
        if payload[0] == PAIRS:
            assert read_paired(payload[5:], len(gaps)) == (gaps, steps)
            continue
        found, rest = reference.read_stream(payload, len(gaps), "<u4")
        assert found.tolist() == gaps
        found, rest = reference.read_stream(rest, len(steps), f"<i{max(2, width)}")
        assert found.tolist() == steps
        assert rest == b""


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), max_size=40))
def test_steps_equal_the_reference(pairs: list[tuple[int, int]]) -> None:
    old = np.array([a for a, _ in pairs], np.uint32)
    new = np.array([b for _, b in pairs], np.uint32)
    for dtype in ("F32", "I32"):
        steps = steps_between(old, new, dtype)
        assert np.array_equal(steps.astype(object), reference.steps(old, new, dtype))
        assert np.array_equal(reference.take_steps(old, steps.astype(object), dtype), new)
        zigzag = reference.zigzag(reference.steps(old, new, dtype))
        assert all(0 <= n < 1 << 32 for n in zigzag)
        assert np.array_equal(reference.unzigzag(zigzag), reference.steps(old, new, dtype))
