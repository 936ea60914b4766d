"""Comparing and digesting: kernels equal the reference, whatever the arrays look like."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch.codec import kernels, reference
from stitch.codec.words import WORD_DTYPES, Positions, Words

WIDTHS = (1, 2, 4, 8)


def find_changed(old: Words, new: Words) -> Positions:
    """Positions that a scan lists when it has to ask for more room again and again."""
    room = kernels.Room.of(old.itemsize, 0)
    for _ in kernels.scan(old, new, room, np.zeros(2, np.uint64)):
        room.grow()
    return room.listed()[0]


@pytest.mark.parametrize("width", WIDTHS)
def test_changed_positions_equal_numpy_at_every_length_and_density(width: int) -> None:
    rng = np.random.default_rng(width)
    for n in [*range(80), 1000, 1024, 1025]:
        old = np.frombuffer(rng.bytes(n * width), WORD_DTYPES[width])
        for density in (0.0, 0.01, 0.5, 1.0):
            new = old.copy()
            new[rng.random(n) < density] ^= WORD_DTYPES[width].type(1 << rng.integers(8 * width))
            assert np.array_equal(find_changed(old, new), np.flatnonzero(old != new))


@pytest.mark.parametrize("width", WIDTHS)
def test_each_single_changed_word_is_found(width: int) -> None:
    old = np.zeros(203, WORD_DTYPES[width])
    for position in range(old.size):
        for bit in (0, 8 * width - 1):
            new = old.copy()
            new[position] = 1 << bit
            assert find_changed(old, new).tolist() == [position]


@pytest.mark.parametrize("size", [(1 << 24) - 1, 1 << 24, (1 << 24) + 1])
def test_changes_at_both_ends_of_long_arrays_are_found(size: int) -> None:
    old = np.zeros(size, np.uint16)
    new = old.copy()
    places = [0, 1, 255, 256, 65535, 65536, size - 2, size - 1]
    new[places] = 1
    assert find_changed(old, new).tolist() == places
    gain = kernels.sum_change(old, 0, np.array(places), new[places])
    assert np.array_equal(gain, kernels.sum_words(new) - kernels.sum_words(old))


def test_arrays_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot compare"):
        find_changed(np.zeros(3, np.uint8), np.zeros(4, np.uint8))
    with pytest.raises(ValueError, match="not inside"):
        kernels.sum_change(np.zeros(3, np.uint8), 0, np.array([3]), np.zeros(1, np.uint8))
    with pytest.raises(ValueError, match="not inside"):
        kernels.sum_change(np.zeros(3, np.uint8), 0, np.array([-1]), np.zeros(1, np.uint8))


@given(st.binary(max_size=200))
def test_lanes_equal_the_reference(data: bytes) -> None:
    words = np.frombuffer(data, np.uint8)
    assert tuple(kernels.sum_words(words).tolist()) == reference.lanes(data)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_gain_of_a_change_is_the_difference_of_the_sums(width: int) -> None:
    rng = np.random.default_rng(width)
    for n in (1, 3, 8, 9, 300, 5000):
        old = np.frombuffer(rng.bytes(n * width), WORD_DTYPES[width])
        for density in (0.002, 0.1, 1.0):
            positions = np.flatnonzero(rng.random(n) < density)
            new = old.copy()
            new[positions] = np.frombuffer(rng.bytes(positions.size * width), old.dtype)
            gain = kernels.sum_change(old, 7, positions, new[positions])
            expected = kernels.sum_words(new, 7) - kernels.sum_words(old, 7)
            assert np.array_equal(gain, expected)


def test_unaligned_and_read_only_arrays_are_taken_as_they_are() -> None:
    raw = np.frombuffer(b"x" + bytes(range(200)) * 2, np.uint8)
    odd = raw[1:].view(np.uint16)
    even = odd.copy()
    assert not odd.flags.aligned
    assert find_changed(odd, even).size == 0
    assert np.array_equal(kernels.sum_words(odd), kernels.sum_words(even))
    even[5] ^= 1
    gain = kernels.sum_change(odd, 0, np.array([5]), even[5:6])
    assert np.array_equal(gain, kernels.sum_words(even) - kernels.sum_words(odd))


def test_one_swapped_pair_of_words_changes_the_lanes() -> None:
    words = np.arange(64, dtype=np.uint64)
    swapped = words.copy()
    swapped[[3, 40]] = swapped[[40, 3]]
    assert (kernels.sum_words(words) != kernels.sum_words(swapped)).all()


NO_PLACE = "caching.CacheImpl._locator_classes = []"
DISK_FULL = """
def save(self, key, data):
    raise OSError(28, 'No space left on device')
caching.IndexDataCacheFile.save = save
caching.IndexDataCacheFile.load = lambda self, key: None
"""


@pytest.mark.parametrize("fault", [NO_PLACE, DISK_FULL])
def test_kernels_compile_where_the_cache_cannot_be_written(fault: str, tmp_path: Path) -> None:
    code = f"""
import numpy as np
from numba.core import caching
{fault}
from stitch.codec import kernels
room = kernels.Room.of(1, 99)
list(kernels.scan(np.zeros(99, np.uint8), np.ones(99, np.uint8), room, np.zeros(2, np.uint64)))
print(room.count)
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "99\n", done.stderr


def test_importing_the_codec_loads_no_numba() -> None:
    code = (
        "import sys, stitch.codec as c; c.UpdateSet, c.DigestState, c.read_header; "
        "assert not {'numba', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
