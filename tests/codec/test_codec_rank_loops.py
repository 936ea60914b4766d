"""Ranks inside classes and back: the compiled loops against numpy, for all they switch between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from stitch.codec.ranks import place_loops, rank_loops
from stitch.codec.ranks.classes import EXPONENTS, classes_of
from stitch.codec.ranks.table import LANES, MAX_CLASSES
from stitch.codec.ranks.tile_loops import MANY_PLACED, MANY_RANKED, NUM_KEYS, TILE
from stitch.codec.words import WORD_DTYPES, Positions, Words

Numbers = npt.NDArray[np.int64]
WIDTHS = {"F8_E4M3": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8, "I8": 1, "U32": 4}
NEVER = 0xFFFFFFFF


def normal(rng: np.random.Generator, count: int) -> Words:
    """BF16 words of a normal distribution: a dozen classes have nearly all."""
    return (rng.normal(0, 0.02, count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def any_bits(rng: np.random.Generator, count: int) -> Words:
    return rng.integers(0, 1 << 16, count).astype(np.uint16)


def mostly_zero(rng: np.random.Generator, count: int) -> Words:
    words = normal(rng, count)
    words[rng.random(count) < 0.6] = 0
    return words


def of_two_sizes(rng: np.random.Generator, count: int) -> Words:
    """Where one half ends, the classes that most have change."""
    words = normal(rng, count)
    words[count // 2 :] -= np.uint16(40 << 7)
    return words


def equal(rng: np.random.Generator, count: int) -> Words:
    return np.full(count, 0x3F80, np.uint16)


SHAPES = (normal, any_bits, mostly_zero, of_two_sizes, equal)


def keys_and_ranks(words: Words, dtype: str, first: int) -> tuple[Numbers, Numbers]:
    """Of each word (n,), by sorting: its key, and how many words of that key come before it."""
    lanes = (np.arange(words.size) + first) % LANES
    keys = classes_of(words, dtype).astype(np.int64) | lanes * MAX_CLASSES
    order = np.argsort(keys, kind="stable")
    ranks = np.empty(words.size, np.int64)
    starts = np.searchsorted(keys[order], np.arange(NUM_KEYS))
    ranks[order] = np.arange(words.size) - starts[keys[order]]
    return keys, ranks


def shape_of(dtype: str) -> tuple[np.uint64, np.uint64]:
    shift, mask = EXPONENTS.get(dtype, (0, 0))
    return np.uint64(shift), np.uint64(mask)


def cut(count: int, rng: np.random.Generator) -> list[slice]:
    """Three slices of any sizes: state is kept from one to the next."""
    lo, hi = sorted(rng.integers(0, count + 1, 2).tolist())
    return [part for part in (slice(0, lo), slice(lo, hi), slice(hi, count)) if part != slice(0, 0)]


def check(words: Words, dtype: str, positions: Positions, rng: np.random.Generator) -> None:
    """Rank the changed positions of a bucket, then find them again by what comes between."""
    width = words.itemsize
    keys, ranks = keys_and_ranks(words, dtype, 0)
    counts = np.zeros(NUM_KEYS, np.uint32)
    found_ranks = np.empty(positions.size, np.uint32)
    found_keys = np.empty(positions.size, np.uint16)
    for part in cut(words.size, rng):
        lo, hi = np.searchsorted(positions, (part.start, part.stop))
        rank_loops.rank_words(width)(
            words[part], *shape_of(dtype), positions[lo:hi], part.start, counts,
            found_ranks[lo:hi], found_keys[lo:hi],
        )  # fmt: skip
    assert np.array_equal(found_keys, keys[positions])
    assert np.array_equal(found_ranks, ranks[positions])
    assert np.array_equal(counts, np.bincount(keys, minlength=NUM_KEYS))

    order = np.argsort(found_keys, kind="stable")
    starts = np.searchsorted(found_keys[order], np.arange(NUM_KEYS)).astype(np.int64)
    stops = np.searchsorted(found_keys[order], np.arange(NUM_KEYS), side="right").astype(np.int64)
    some = starts < stops
    waits = np.diff(found_ranks[order].astype(np.int64), prepend=-1) - 1
    waits[starts[some]] = found_ranks[order][starts[some]]
    waits = waits.astype(np.uint32)
    now = np.full(NUM_KEYS + 1, NEVER, np.uint32)
    now[:-1][some] = waits[starts[some]]
    values = rng.integers(1, 3, positions.size)
    flips = np.zeros(positions.size, np.uint8)
    at = np.full(positions.size, -1, np.int64)
    old, new = np.zeros((2, positions.size), words.dtype)
    following, found = starts.copy(), 0
    for part in cut(words.size, rng):
        found = place_loops.place_words(width, width, False)(
            words[part], words[part], *shape_of(dtype), part.start, waits, now, following, stops,
            values, flips, found, at, old, new,
        )  # fmt: skip
    assert found == positions.size
    assert np.array_equal(at, positions)
    assert np.array_equal(old, words[positions])
    moved = np.empty(positions.size, np.int64)
    moved[order] = values
    assert np.array_equal(new, words[positions] + moved.astype(words.dtype))
    assert np.array_equal(following, stops)
    left = np.bincount(keys, minlength=NUM_KEYS)
    for key in np.flatnonzero(some):
        left[key] -= found_ranks[order][stops[key] - 1] + 1
    assert np.array_equal(NEVER - now[:-1].astype(np.int64), left)


@pytest.mark.parametrize("make", SHAPES)
@pytest.mark.parametrize("share", [0.0005, 0.5 * MANY_PLACED / TILE, 2 * MANY_RANKED / TILE, 0.9])
def test_every_distribution_at_every_density(
    make: Callable[[np.random.Generator, int], Words], share: float
) -> None:
    rng = np.random.default_rng(int(share * 1e6))
    for count in (20 * TILE + 7, 50 * TILE):
        words = make(rng, count)
        check(words, "BF16", np.flatnonzero(rng.random(count) < share), rng)


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize(
    "count", [1, 3, 4, 31, 32, 33, 63, 64, TILE - 1, TILE, TILE + 1, TILE + 33, 3 * TILE + 31]
)
def test_every_width_and_size(dtype: str, count: int) -> None:
    rng = np.random.default_rng(count)
    width = WIDTHS[dtype]
    for share in (0.01, 0.3):
        words: Words = np.frombuffer(rng.bytes(count * width), WORD_DTYPES[width])
        if dtype == "F64":
            words = rng.normal(0, 0.02, count).view(np.uint64)
        check(words, dtype, np.flatnonzero(rng.random(count) < share), rng)
        check(words, dtype, np.arange(count), rng)


def test_changes_that_come_in_swarms() -> None:
    """Tiles with many changes between tiles with few: the loops take turns."""
    rng = np.random.default_rng(5)
    words = normal(rng, 60 * TILE)
    shares: Any = np.repeat(rng.choice([0.0, 0.002, 0.2, 1.0], 60), TILE)
    check(words, "BF16", np.flatnonzero(rng.random(words.size) < shares), rng)


def test_classes_in_every_place() -> None:
    """A window of classes at either end of all that there are, and classes far outside of it."""
    rng = np.random.default_rng(6)
    for lowest in (0, 1, 100, 238, 249, 254):
        classes = lowest + rng.integers(0, min(17, 256 - lowest), 12 * TILE)
        classes[rng.random(classes.size) < 0.003] = rng.integers(0, 256)
        words = (classes << 7 | rng.integers(0, 128, classes.size)).astype(np.uint16)
        check(words, "BF16", np.flatnonzero(rng.random(words.size) < 0.004), rng)
