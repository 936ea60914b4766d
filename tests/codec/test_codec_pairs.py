"""Paired streams: the same from kernels and reference, exact, and one error for anything else."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from codec_cases import changed, from_words, random_weights, same_bits, schema_of
from hypothesis import given
from hypothesis import strategies as st

from stitch.codec import (
    Bucket,
    DigestState,
    Slice,
    decode_parts,
    encode_patch,
    pairs,
    read_header,
    reference,
)
from stitch.codec.buckets import MAX_BUCKET_ELEMENTS
from stitch.codec.changes import BucketChanges
from stitch.codec.encodings.gaps import Gaps
from stitch.codec.encodings.port import OldWords
from stitch.codec.reference_pairs import read_paired, write_paired
from stitch.codec.streams import PAIRS
from stitch.codec.ulp import steps_between, take_steps
from stitch.codec.words import WORD_DTYPES, Positions, Words
from stitch.errors import CorruptPatchError
from stitch.tensors import HostWeights

FLOATS = {"F8_E4M3": 1, "F8_E5M2": 1, "F16": 2, "BF16": 2}
GOLDEN = Path(__file__).parent / "golden_streams" / "pairs.stream"


def changed_by(
    steps: Sequence[int], positions: Positions, old: Words, dtype: str, num_elements: int
) -> BucketChanges:
    """The changes that take `steps` (k,) at ascending `positions` (k,), where `old` words are."""
    new = take_steps(old, np.asarray(steps, f"<i{old.itemsize}"), dtype)
    nowhere = HostWeights.allocate(schema_of())
    return BucketChanges(
        bucket=Bucket(dtype, (Slice(0, 0, num_elements),)),
        positions=positions,
        old=old,
        new=new,
        gains=(),
        old_weights=nowhere,
        new_weights=nowhere,
    )


def changes_of(
    dtype: str, num_elements: int, count: int, *, most: int = 3, shift: int = 0, seed: int = 1
) -> BucketChanges:
    """`count` changes by up to `most` << `shift` either way, and for some by as much as can be."""
    rng = np.random.default_rng(seed)
    width = FLOATS[dtype]
    top = 1 << (8 * width - 1)
    positions = np.sort(rng.choice(num_elements, count, replace=False)).astype(np.int64)
    old = rng.integers(0, 2 * top, count).astype(WORD_DTYPES[width])
    steps = rng.integers(1, most + 1, count) * rng.choice([-1, 1], count) << shift
    steps[: count // 8] = -top >> shift << shift
    return changed_by(steps, positions, old, dtype, num_elements)


def gaps_and_steps(changes: BucketChanges) -> tuple[list[int], list[int]]:
    gaps = np.diff(changes.positions, prepend=-1) - 1
    return gaps.tolist(), steps_between(changes.old, changes.new, changes.bucket.dtype).tolist()


def body_of(changes: BucketChanges, fine: int = 1) -> bytes:
    body = pairs._write(changes, fine)
    assert body is not None
    return body


def read(body: bytes, count: int) -> tuple[list[int], list[int]]:
    positions, steps = pairs.read(memoryview(body), count, "test")
    return (np.diff(positions, prepend=-1) - 1).tolist(), steps.tolist()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("fine", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 63, 1000])
def test_kernels_and_reference_read_each_other(dtype: str, fine: int, count: int) -> None:
    for num_elements in (count, 20 * count, MAX_BUCKET_ELEMENTS):
        changes = changes_of(dtype, num_elements, count, seed=count)
        gaps, steps = gaps_and_steps(changes)
        body = body_of(changes, fine)
        assert read_paired(body, count) == (gaps, steps)
        assert read(body, count) == (gaps, steps)
        assert read(write_paired(gaps, steps, fine, 0), count) == (gaps, steps)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
@pytest.mark.parametrize("shift", [1, 7, 15])
def test_zeros_below_every_step_cost_nothing(dtype: str, shift: int) -> None:
    plain = changes_of(dtype, 90_000, 9000, most=1)
    shifted = changes_of(dtype, 90_000, 9000, most=1, shift=shift)
    gaps, steps = gaps_and_steps(shifted)
    assert not np.any(np.array(steps) % (1 << shift))
    body = body_of(shifted)
    assert len(body) <= len(body_of(plain)) + 64
    assert read(body, 9000) == read_paired(body, 9000) == (gaps, steps)
    assert read(write_paired(gaps, steps, 1, shift), 9000) == (gaps, steps)


def test_the_largest_gaps_and_steps_of_all_sizes() -> None:
    last = MAX_BUCKET_ELEMENTS - 1
    for gaps in ([last], [0, last - 1], [last - 1, 0], [last // 2, last // 2]):
        for size in range(16):
            for step in (1 << size, -(1 << size), (1 << size) - 1, 1 - (1 << size)):
                if step and -32768 <= step < 32768:
                    steps = [step] * len(gaps)
                    for fine in (0, 1, 2):
                        body = write_paired(gaps, steps, fine, 0)
                        assert read(body, len(gaps)) == (gaps, steps)


def test_the_size_is_near_the_entropy() -> None:
    """Gaps of a fair draw, and steps up or down: what both cost at least, and 1 % more."""
    count, share = 60_000, 0.004
    changes = changes_of("BF16", round(count / share), count, most=1)
    steps = np.where(np.arange(count) % 7 < 3, 1, -1).astype(np.int16)
    fair = changed_by(steps, changes.positions, changes.old, "BF16", changes.bucket.num_elements)
    bits = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) / share + 1
    assert len(body_of(fair)) < count * bits / 8 * 1.01 + 200


def test_many_changes_of_narrow_floats_are_paired_and_others_are_not() -> None:
    def first_byte(dtype: str, density: float) -> int:
        old = random_weights(schema_of(a=(dtype, (500, 400))), 1)
        data, _ = encode_patch(old, changed(old, density, 2), encoding="gaps")
        header = read_header(data)
        return data[header.buckets[0].offset]

    for dtype in FLOATS:
        assert first_byte(dtype, 0.05) == PAIRS
        assert first_byte(dtype, 0.01) != PAIRS  # too few
        assert first_byte(dtype, 0.3) != PAIRS  # too close
    for dtype in ("F32", "F64", "I8", "U16", "F4"):
        assert first_byte(dtype, 0.05) != PAIRS


def test_more_kinds_of_pairs_than_a_stream_has_room_for() -> None:
    """Every size of a gap with every size of a step."""
    sizes = [(1 << g, 1 << s) for g in range(1, 27) for s in range(15)]
    gaps = [gap for gap, _ in sizes for _ in range(20)]
    steps = np.array([step for _, step in sizes for _ in range(20)], np.int16)
    keep = np.cumsum(np.array(gaps) + 1) < MAX_BUCKET_ELEMENTS
    positions = (np.cumsum(np.array(gaps) + 1) - 1)[keep]
    steps = steps[keep]
    old = np.full(steps.size, 0x2000, np.uint16)
    changes = changed_by(steps, positions, old, "BF16", MAX_BUCKET_ELEMENTS)
    assert pairs._write(changes, 1) is None
    assert pairs._write(changes, 0) is None
    assert pairs.write(changes) is None
    assert Gaps().encode(changes)[0] != PAIRS


def test_the_golden_stream_still_reads_and_writes_the_same() -> None:
    state, drawn = 1, []
    for _ in range(800):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        drawn.append(state >> 40)
    gaps = np.array([1 + (n & 0x3FF) for n in drawn])
    steps = np.array([(1 + (n >> 20) % 3) * (-1) ** (n >> 10) for n in drawn], np.int16)
    old = np.array([n & 0x3FFF for n in drawn], np.uint16)
    positions = np.cumsum(gaps) - 1
    changes = changed_by(steps, positions, old, "BF16", 1 << 20)
    if os.environ.get("STITCH_WRITE_GOLDEN"):
        GOLDEN.write_bytes(body_of(changes))
    golden = GOLDEN.read_bytes()
    assert body_of(changes) == golden
    assert read(golden, 800) == read_paired(golden, 800) == gaps_and_steps(changes)


def body_with(**replaced: bytes | int) -> bytes:
    """A body of four changes, parts of it replaced: `_2=7` puts a 7 in byte 2."""
    body = bytearray(write_paired([0, 3, 300, 5], [1, -1, 40, -2], 1, 0))
    for place, value in replaced.items():
        at = int(place[1:])
        new = bytes([value]) if isinstance(value, int) else value
        body[at : at + len(new)] = new
    return bytes(body)


LISTED = struct.unpack_from("<H", body_with(), 3)[0] + 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "too few"),
        (body_with()[:24], "too few"),
        (body_with(_0=16), "cannot be"),
        (body_with(_1=3), "cannot be"),
        (body_with(_2=16), "cannot be"),
        (body_with(_3=b"\xff\xff"), "cannot be"),
        (body_with(_3=struct.pack("<H", LISTED)), "do not sum"),
        (body_with(_3=struct.pack("<H", LISTED - 2)), "do not sum"),
        (body_with(_25=9), "do not sum"),
        (body_with(_5=b"\xff\xff\0\0"), "do not fit"),
        (body_with(_21=b"\xff\xff\xff\xff"), "do not fit"),
        (body_with()[:-1], "does not hold"),
        (body_with() + bytes(1), "does not hold"),
        (body_with(_5=b"\xff\xff\xff\xff"), "does not hold"),
        (body_with(_0=10), "more than 16 bits"),
    ],
)
def test_broken_bodies_are_refused(body: bytes, message: str) -> None:
    with pytest.raises(CorruptPatchError, match=message):
        pairs.read(memoryview(body), 4, "test")


@pytest.mark.parametrize("count", [1, 3, 5, 8, 1000, 1 << 20])
def test_another_number_of_changes_is_refused(count: int) -> None:
    with pytest.raises(CorruptPatchError, match="does not hold"):
        pairs.read(memoryview(body_with()), count, "test")


def test_a_short_body_takes_little_memory_whatever_number_is_asked_for() -> None:
    body = memoryview(body_with())
    pairs.read(body, 4, "test")  # loads what is loaded on first use
    tracemalloc.start()
    try:
        with pytest.raises(CorruptPatchError, match="does not hold"):
            pairs.read(body, MAX_BUCKET_ELEMENTS, "test")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_bit_after_the_last_is_refused() -> None:
    body = bytearray(body_with())
    body[-1] ^= 0x80
    with pytest.raises(CorruptPatchError, match="does not hold"):
        pairs.read(memoryview(bytes(body)), 4, "test")


def test_a_table_with_too_many_pairs_is_refused() -> None:
    widths = [16] * 256 + [1]
    head = struct.pack("<BBBH4II", 0, 2, 15, len(widths) - 1, *[1 << 16] * 4, 0)
    with pytest.raises(CorruptPatchError, match="do not sum"):
        pairs.read(memoryview(head + bytes(widths)), 1, "test")


def test_a_width_of_zero_in_two_bytes_is_refused() -> None:
    """A table that would be right if it were none, or the beginning of a run."""
    body = write_paired([7] * 4, [1, -1, 2, 1], 1, 0)
    listed = struct.unpack_from("<H", body, 3)[0] + 1
    for table in (b"\x80\0" + body[27:], b"\x80\0" + body[26:], b"\x80" + body[25:]):
        for more in (-1, 0, 1):
            forged = body[:3] + struct.pack("<H", listed - 1 + more) + body[5:25] + table
            with pytest.raises(CorruptPatchError, match="do not sum"):
                pairs.read(memoryview(forged), 4, "test")
            with pytest.raises(AssertionError):
                read_paired(forged, 4)


def test_the_bits_read_past_the_end_are_always_spare() -> None:
    most = max(pairs.STEP_CLASSES + pairs.GAP_BITS - 1 - fine for fine in range(3))
    assert pairs.STATES * most + 64 <= 8 * pairs.SPARE_BYTES


@pytest.mark.parametrize("dtype", ["F32", "I64"])
def test_wider_words_have_no_paired_streams(dtype: str) -> None:
    bucket = Bucket(dtype, (Slice(0, 0, 400),))
    weights = HostWeights.allocate(schema_of(a=(dtype, (400,))))
    body = body_with()
    payload = struct.pack("<BI", PAIRS, len(body)) + body
    with pytest.raises(Exception, match="unknown stream form 4"):
        Gaps().decode(
            memoryview(payload),
            num_changed=4,
            old=OldWords(bucket=bucket, weights=weights),
            what="test",
        )


def test_a_position_outside_the_bucket_is_refused() -> None:
    weights = HostWeights.allocate(schema_of(a=("BF16", (400,))))
    body = body_with()
    payload = struct.pack("<BI", PAIRS, len(body)) + body
    for num_elements in (304, 400):
        old = OldWords(bucket=Bucket("BF16", (Slice(0, 0, num_elements),)), weights=weights)
        if num_elements == 400:
            decoded = Gaps().decode(memoryview(payload), num_changed=4, old=old, what="test")
            assert decoded.positions is not None
            assert decoded.positions.tolist() == [0, 4, 305, 311]
            continue
        with pytest.raises(CorruptPatchError, match="position 311 is outside the bucket of 304"):
            Gaps().decode(memoryview(payload), num_changed=4, old=old, what="test")


def check_altered_bodies(choose: Callable[[int], int], rounds: int) -> None:
    """Bodies with some bytes altered, cut or spliced give as many changes, or the one error."""
    for number in range(rounds):
        count = 1 + choose(300)
        changes = changes_of("BF16", 50 * count, count, seed=number)
        body = bytearray(body_of(changes, choose(3)))
        for _ in range(choose(5)):
            body[choose(len(body))] = choose(256)
        if not choose(4):
            del body[choose(len(body)) :]
        wanted = max(1, count + choose(7) - 3)
        try:
            positions, steps = pairs.read(memoryview(bytes(body)), wanted, "test")
        except CorruptPatchError:
            continue
        assert positions.size == steps.size == wanted
        assert (np.diff(positions, prepend=-1) > 0).all()
        assert steps.all()


@given(st.integers(0, 1 << 32))
def test_altered_bodies_give_changes_or_the_one_error(seed: int) -> None:
    check_altered_bodies(random.Random(seed).randrange, 3)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_pair_of_bits_round_trips_in_a_paired_stream(dtype: str) -> None:
    """All old words against words near and far; far enough apart that the stream is paired."""
    size = 1 << 8 * FLOATS[dtype]
    word = WORD_DTYPES[FLOATS[dtype]]
    every = np.tile(np.arange(size).astype(word), max(1, 8192 // size))
    for add in (1, 2, 3, size // 2, size // 2 + 1, size - 1):
        old = np.zeros(16 * every.size, word)
        old[5::16] = every
        new = old.copy()
        new[5::16] += word.type(add)
        before, after = from_words({"a": (dtype, old)}), from_words({"a": (dtype, new)})
        data, _ = encode_patch(before, after, encoding="gaps")
        assert data[read_header(data).buckets[0].offset] == PAIRS
        update, _ = decode_parts([data], before, DigestState.of(before))
        update.apply(before)
        assert same_bits(before, after)


def test_a_patch_with_paired_streams_is_what_the_reference_says() -> None:
    old = random_weights(schema_of(a=("BF16", (300, 400)), b=("F8_E4M3", (200, 400))), 1)
    new = changed(old, 0.06, 2)
    data, _ = encode_patch(old, new, encoding="gaps")
    header = read_header(data)
    assert [data[entry.offset] for entry in header.buckets] == [PAIRS, PAIRS]
    tensors = {i: old.words_at(i).copy() for i in range(2)}
    reference.apply_part(data, old.schema, tensors)
    assert all(np.array_equal(words, new.words_at(i)) for i, words in tensors.items())
