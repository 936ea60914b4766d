"""Finding changes, taking steps and writing words: compiled passes equal plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
from codec_cases import changed, mixed_schema, random_weights, same_bits, schema_of

from stitch.codec import diff_update, kernels, plan_buckets, reference
from stitch.codec.buckets import Bucket
from stitch.codec.changes import BucketChanges, find_changes
from stitch.codec.encodings import OldWords
from stitch.codec.ulp import Steps
from stitch.codec.update import TensorUpdate, UpdateSet
from stitch.codec.words import SIGNED_DTYPES, WORD_DTYPES, Positions, Words
from stitch.errors import UsageError
from stitch.tensors import HostWeights

WIDTHS = (1, 2, 4, 8)


def joined(slices: tuple[Words, ...]) -> Words:
    return np.concatenate(slices)


def check(changes: BucketChanges) -> None:
    """What is listed is what numpy finds, as a whole and block by block."""
    old, new = joined(changes.old_slices), joined(changes.new_slices)
    places = np.flatnonzero(old != new)
    assert changes.num_changed == places.size
    blocks = [tuple(part.copy() for part in block) for block in changes.blocks()]
    for listed in (
        (changes.positions, changes.old, changes.new),
        tuple(np.concatenate(parts) for parts in zip(*blocks, strict=True)),
    ):
        assert np.array_equal(listed[0], places)
        assert np.array_equal(listed[1], old[places])
        assert np.array_equal(listed[2], new[places])
    for piece, before, after, gain in zip(
        changes.bucket.slices, changes.old_slices, changes.new_slices, changes.gains, strict=True
    ):
        first = piece.start * before.itemsize // 8
        expected = kernels.sum_words(after, first) - kernels.sum_words(before, first)
        assert np.array_equal(gain, expected)


@pytest.mark.parametrize("density", [0.0, 0.001, 0.05, 0.3, 1.0])
def test_changes_of_all_dtypes_are_listed_and_digested(density: float) -> None:
    old = random_weights(mixed_schema(), 1)
    new = changed(old, density, 2)
    for elements in (64, 1 << 20):
        for bucket in plan_buckets(old.schema, elements):
            check(find_changes(bucket, old, new))


@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32", "F64"])
@pytest.mark.parametrize("density", [0.01, 0.06, 0.5])
def test_lists_that_outgrow_their_room_are_complete(dtype: str, density: float) -> None:
    old = random_weights(schema_of(a=(dtype, (700_001,)), b=(dtype, (77_777,))), 3)
    new = changed(old, density, 4)
    (bucket,) = plan_buckets(old.schema)
    check(find_changes(bucket, old, new))


def test_a_scan_stops_whenever_its_room_is_used_up() -> None:
    old = np.zeros(300_000, np.uint16)
    new = old + np.uint16(1)
    room = kernels.Room.of(2, 100)
    lanes = np.zeros(2, np.uint64)
    found = []
    for _ in kernels.scan(old, new, room, lanes, first=5, base=7):
        assert room.count > 0
        found.append(room.listed()[0].copy())
        room.count = 0
    found.append(room.listed()[0])
    assert len(found) > 10
    assert np.array_equal(np.concatenate(found), np.arange(7, 300_007))
    assert np.array_equal(lanes, kernels.sum_words(new, 5) - kernels.sum_words(old, 5))


def steps_for(
    width: int, dtype: str, count: int, seed: int
) -> tuple[Words, Positions, Steps, Words]:
    """(old words, positions, steps as they travel, new words at the positions)."""
    rng = np.random.default_rng(seed)
    old = np.frombuffer(rng.bytes(count * width), WORD_DTYPES[width])
    positions = np.flatnonzero(rng.random(count) < rng.choice([0.01, 0.5, 1.0]))
    steps = np.frombuffer(rng.bytes(positions.size * width), SIGNED_DTYPES[width])
    steps = np.where(steps == 0, 1, steps).astype(steps.dtype)
    new = reference.take_steps(old[positions], steps.astype(object), dtype)
    return old, positions, steps.astype(SIGNED_DTYPES[max(2, width)]), new


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("is_float", [False, True])
def test_taking_steps_equals_the_reference(width: int, is_float: bool) -> None:
    names = {1: ("U8", "F8_E4M3"), 2: ("I16", "BF16"), 4: ("U32", "F32"), 8: ("I64", "F64")}
    dtype = names[width][is_float]
    for seed, count in enumerate([1, 7, 8, 9, 255, 256, 257, 5000]):
        old, positions, steps, new = steps_for(width, dtype, count, seed)
        olds, news = np.empty((2, positions.size), old.dtype)
        places, moved = np.array([[40, 9, 0, 9], [0, count, old.ctypes.data, count]]), positions + 9
        gains, ends, bad = kernels.take_steps(places, dtype, moved, steps, olds, news)
        lanes = gains[1]
        assert bad == 0
        assert ends.tolist() == [0, positions.size]
        assert np.array_equal(moved, positions)
        assert not gains[0].any()
        assert np.array_equal(olds, old[positions])
        assert np.array_equal(news, new)
        after = old.copy()
        after[positions] = new
        assert np.array_equal(lanes, kernels.sum_words(after) - kernels.sum_words(old))


@pytest.mark.parametrize("width", WIDTHS)
def test_steps_that_are_zero_or_too_wide_are_counted(width: int) -> None:
    dtype = {1: "U8", 2: "BF16", 4: "F32", 8: "I64"}[width]
    old, olds, news = np.zeros((3, 20), WORD_DTYPES[width])
    steps = np.ones(20, SIGNED_DTYPES[max(2, width)])
    steps[[3, 9]] = 0
    if width == 1:
        steps[[0, 19]] = [128, -129]
        steps[[1, 18]] = [127, -128]
    places = np.array([[8, 12, old.ctypes.data, 20], [0, 8, old.ctypes.data, 20]])
    positions = np.arange(20)
    _, ends, bad = kernels.take_steps(places, dtype, positions, steps, olds, news)
    assert ends.tolist() == [12, 20]
    assert positions.tolist() == [*range(8, 20), *range(8)]
    assert bad == (4 if width == 1 else 2)


@pytest.mark.parametrize(
    ("positions", "num_words"), [([0, 19, 20], 20), ([-1, 3], 20), ([0, 17], 17), ([8, 11], 8)]
)
def test_positions_outside_the_slices_or_the_memory_are_refused(
    positions: list[int], num_words: int
) -> None:
    old = np.zeros(20, np.uint16)
    places = np.array([[0, 12, old.ctypes.data, num_words], [0, 8, old.ctypes.data, num_words]])
    count = len(positions)
    olds, news = np.empty((2, count), np.uint16)
    if positions == [0, 17]:
        places[1, 0] = 12  # the second slice ends past the memory
    with pytest.raises(ValueError, match="positions are not inside"):
        kernels.take_steps(
            places, "BF16", np.array(positions), np.ones(count, np.int16), olds, news
        )


def test_taking_steps_reads_around_the_positions_only() -> None:
    old = random_weights(schema_of(a=("BF16", (5000,)), b=("BF16", (403,))), 5)
    (bucket,) = plan_buckets(old.schema)
    reads = []

    class Watched:
        schema = old.schema

        def read(self, name: str, start: int, stop: int) -> Words:
            reads.append((name, start, stop))
            return old.read(name, start, stop).copy()

    positions = np.array([1003, 1205, 5000, 5402])
    decoded, bad = OldWords(bucket=bucket, weights=Watched()).take_steps(
        positions, np.ones(4, np.int16)
    )
    assert bad == 0
    assert positions.tolist() == [1003, 1205, 0, 402]
    assert reads == [("a", 1000, 1208), ("b", 0, 403)]
    assert decoded.old.tolist() == [
        int(words[at])
        for words, at in zip(
            [old.words_at(0)] * 2 + [old.words_at(1)] * 2, (1003, 1205, 0, 402), strict=True
        )
    ]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32", "F64"])
def test_updates_are_written_and_undone_in_any_number_of_threads(dtype: str, threads: int) -> None:
    old = random_weights(schema_of(a=(dtype, (400_003,)), b=(dtype, (3,))), 6)
    new = changed(changed(old, 0.2, 7), 0.9, 8)
    for target in (changed(old, 0.2, 7), new):
        update = diff_update(old, target, threads=threads)
        weights = HostWeights.load(old)
        update.apply(weights, threads=threads)
        assert same_bits(weights, target)
        update.undo(weights, threads)
        assert same_bits(weights, old)


def test_nothing_is_written_unless_all_updates_fit() -> None:
    weights = random_weights(schema_of(a=("BF16", (10,)), b=("BF16", (10,))), 9)
    before = HostWeights.load(weights)
    one = np.ones(1, np.uint16)
    updates = [
        TensorUpdate(tensor=0, positions=np.array([2]), new=one, old=one),
        TensorUpdate(tensor=1, positions=np.array([10]), new=one, old=one),
    ]
    with pytest.raises(UsageError, match="words 10 to 10; the tensor has 10"):
        UpdateSet(updates).apply(weights)
    assert same_bits(weights, before)


def test_weights_that_may_not_be_written_are_refused() -> None:
    schema = schema_of(a=("BF16", (10,)))
    fixed = np.zeros(10, np.uint16)
    fixed.flags.writeable = False
    one = np.ones(1, np.uint16)
    update = TensorUpdate(tensor=0, positions=np.array([2]), new=one, old=one)
    with pytest.raises(UsageError, match="read-only"):
        UpdateSet([update]).apply(HostWeights(schema, [fixed]))


def test_a_position_outside_the_target_is_named() -> None:
    target = np.zeros(5000, np.uint16)
    places = np.arange(2000)
    places[1500] = 5000
    words = np.ones(2000, np.uint16)
    update = TensorUpdate(tensor=0, positions=places, new=words, old=words)
    update.check_target(target)
    with pytest.raises(UsageError, match="position 5000 is not inside"):
        update.write(target, words)


def test_positions_beyond_32_bits_are_kept() -> None:
    positions = np.array([0, 1 << 32, (1 << 40) + 3])
    gaps = np.empty(3, np.uint32)
    kernels.to_gaps(np.array([5, 6, 1000]), -1, gaps)
    assert gaps.tolist() == [5, 0, 993]
    assert kernels.to_positions(gaps).tolist() == [5, 6, 1000]
    largest = np.full(3, (1 << 32) - 1, np.uint32)
    assert kernels.to_positions(largest).tolist() == [(n << 32) - 1 for n in (1, 2, 3)]
    assert kernels.scatter(positions, np.zeros(3, np.uint8), np.zeros(9, np.uint8)) == 1


def test_an_empty_bucket_of_changes_has_none() -> None:
    old = random_weights(schema_of(a=("F8_E5M2", (1000,))), 10)
    (bucket,) = plan_buckets(old.schema)
    assert isinstance(bucket, Bucket)
    assert find_changes(bucket, old, old).num_changed == 0
