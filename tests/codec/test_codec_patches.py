"""Patches take weights exactly from one state to the next."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from codec_cases import (
    Slow,
    changed,
    digest_of,
    from_words,
    mixed_schema,
    random_weights,
    same_bits,
    schema_of,
)
from hypothesis import given
from hypothesis import strategies as st

from stitch.codec import (
    DigestState,
    PatchedReader,
    PatchEncoder,
    PatchHeader,
    decode_parts,
    encode_patch,
    plan_buckets,
    read_header,
    reference,
)
from stitch.errors import SchemaMismatchError, UsageError
from stitch.tensors import HostWeights
from stitch.types import PatchStats, Schema

ENCODINGS = ("auto", "gaps", "ranks", "dense")


def travel(old: HostWeights, new: HostWeights, encoding: str = "auto") -> tuple[bytes, PatchStats]:
    """Encode, decode, and check every result against `new` and the reference decoder."""
    before = DigestState.of(old, threads=1)
    data, stats = encode_patch(old, new, before=before, encoding=encoding, threads=1)
    update, after = decode_parts([data], old, before, threads=1)
    assert after.version_digest() == digest_of(new)
    assert read_header(data).digest_after == digest_of(new)
    result = HostWeights.load(old)
    update.apply(result)
    assert same_bits(result, new)
    update.apply(result)
    assert same_bits(result, new)
    assert same_bits(HostWeights.load(PatchedReader(old, update)), new)
    update.undo(result)
    assert same_bits(result, old)
    assert update.num_changed == stats.num_changed == read_header(data).num_changed
    assert read_header(data).stats(len(data)) == stats
    words = [old.words_at(i).copy() for i in range(len(old.schema))]
    if stats.num_changed < 5000:
        reference.apply_part(data, old.schema, dict(enumerate(words)))
        assert all(np.array_equal(w, new.words_at(i)) for i, w in enumerate(words))
    return data, stats


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("density", [0.0, 0.002, 0.05, 0.5, 1.0])
def test_every_kind_of_tensor_travels(encoding: str, density: float) -> None:
    old = random_weights(mixed_schema(), 1)
    travel(old, changed(old, density, 2), encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(data=st.data())
def test_any_words_travel(encoding: str, data: st.DataObject) -> None:
    arrays: list[dict[str, tuple[str, np.ndarray]]] = [{}, {}]
    for dtype, width in (("F8_E5M2", 1), ("BF16", 2), ("I32", 4), ("F64", 8)):
        content = data.draw(st.binary(max_size=60))
        size = len(content) // width
        other = data.draw(st.binary(min_size=len(content), max_size=len(content)))
        for half, source in zip(arrays, (content, other), strict=True):
            words = np.frombuffer(source[: size * width], f"<u{width}")
            half[dtype.lower()] = (dtype, words)
    travel(from_words(arrays[0]), from_words(arrays[1]), encoding)


def test_all_old_words_of_16_bits_travel_to_special_values() -> None:
    old = np.tile(np.arange(1 << 16, dtype=np.uint16), 4)
    new = np.repeat(np.array([0x0000, 0x8000, 0x7FC1, 0xFF80], np.uint16), 1 << 16)
    for dtype in ("BF16", "F16"):
        for encoding in ENCODINGS:
            travel(from_words({"w": (dtype, old)}), from_words({"w": (dtype, new)}), encoding)


def test_all_pairs_of_8_bit_words_travel() -> None:
    old, new = (a.ravel().astype(np.uint8) for a in np.meshgrid(np.arange(256), np.arange(256)))
    for dtype in ("F8_E4M3", "U8"):
        for encoding in ENCODINGS:
            travel(from_words({"w": (dtype, old)}), from_words({"w": (dtype, new)}), encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("gap", [1, 255, 256, 65535, 65536, 70000])
def test_gaps_of_every_width_travel(gap: int, encoding: str) -> None:
    old = np.zeros(5 * (gap + 1) + 1, np.uint16)
    new = old.copy()
    new[:: gap + 1] = 0x8000
    travel(from_words({"w": ("BF16", old)}), from_words({"w": ("BF16", new)}), encoding)


@pytest.mark.parametrize("size", [(1 << 24) - 1, 1 << 24, (1 << 24) + 1])
def test_first_and_last_element_of_long_tensors_travel(size: int) -> None:
    old = np.zeros(size, np.uint8)
    new = old.copy()
    new[[0, size - 1]] = 1
    data, stats = travel(from_words({"w": ("I8", old)}), from_words({"w": ("I8", new)}))
    assert stats.num_changed == 2
    assert len(data) < 700
    assert read_header(data).encodings == stats.encodings


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_unchanged_weights_give_one_tiny_part(encoding: str) -> None:
    weights = random_weights(mixed_schema(), 1)
    (part,) = PatchEncoder(weights, weights, encoding=encoding).parts()
    assert len(part) < 300
    header = read_header(part)
    assert header.digest_before == header.digest_after == digest_of(weights)
    assert header.num_changed == 0
    assert set(header.encodings) == {"absent"}
    update, after = decode_parts([part], weights, DigestState.of(weights))
    assert update.updates == []
    assert after.version_digest() == digest_of(weights)


def test_weights_without_tensors_travel() -> None:
    nothing = HostWeights.allocate(Schema(()))
    travel(nothing, nothing)


def test_minus_zero_for_zero_is_a_change_and_equal_nans_are_none() -> None:
    old = from_words({"w": ("BF16", np.array([0x0000, 0x7FC1, 0x7FC1], np.uint16))})
    new = from_words({"w": ("BF16", np.array([0x8000, 0x7FC1, 0x7FC2], np.uint16))})
    _, stats = travel(old, new)
    assert stats.num_changed == 2


def parts_of(
    old: HostWeights, new: HostWeights, **options: object
) -> tuple[list[bytes], PatchEncoder]:
    encoder = PatchEncoder(
        old,
        new,
        max_part_bytes=600,
        max_bucket_elements=128,
        **options,  # type: ignore[arg-type]
    )
    return list(encoder.parts()), encoder


@pytest.mark.parametrize("threads", [1, 3])
def test_parts_are_bounded_and_make_one_patch_in_any_order(threads: int) -> None:
    old = random_weights(mixed_schema(), 1)
    new = changed(old, 0.6, 2)
    parts, encoder = parts_of(old, new, threads=threads)
    assert len(parts) > 3
    headers = [read_header(part) for part in parts]
    assert [h.part for h in headers] == list(range(len(parts)))
    assert [h.digest_after is not None for h in headers] == [False] * (len(parts) - 1) + [True]
    assert encoder.stats.num_bytes == sum(map(len, parts))
    assert encoder.stats.num_changed == sum(h.num_changed for h in headers)
    assert encoder.after.version_digest() == digest_of(new)
    update, after = decode_parts(parts[::-1], old, encoder.before, threads=threads)
    assert after.version_digest() == digest_of(new)
    result = HostWeights.load(old)
    update.apply(result)
    assert same_bits(result, new)


def test_threads_and_readers_do_not_change_a_single_byte() -> None:
    old = random_weights(mixed_schema(), 1)
    new = changed(old, 0.1, 2)
    expected, _ = parts_of(old, new, threads=1)
    for threads in (2, 5):
        assert parts_of(Slow(old), Slow(new), threads=threads)[0] == expected  # type: ignore[arg-type]


def test_new_content_is_read_exactly_once() -> None:
    old = random_weights(mixed_schema(), 1)
    reader = Slow(changed(old, 0.1, 2))
    list(PatchEncoder(old, reader, max_bucket_elements=128, threads=2).parts())
    seen = sorted(reader.reads)
    total = sum(stop - start for _, start, stop in seen)
    assert total == old.schema.num_elements
    assert len(set(seen)) == len(seen)


def test_only_a_few_buckets_are_in_memory_at_a_time() -> None:
    """Readers hand out arrays that count themselves."""
    old = random_weights(schema_of(w=("BF16", (64 * 100,))), 1)
    new = changed(old, 0.1, 2)
    live: set[int] = set()
    peak = 0
    lock = threading.Lock()

    class Counted(np.ndarray):  # type: ignore[type-arg]
        def __del__(self) -> None:
            with lock:
                live.discard(id(self))

    class Counting(Slow):
        def read(self, name: str, start: int, stop: int) -> object:
            nonlocal peak
            words = super().read(name, start, stop).view(Counted)
            with lock:
                live.add(id(words))
                peak = max(peak, len(live))
            return words

    encoder = PatchEncoder(old, Counting(new), max_bucket_elements=64, threads=2)
    assert len(list(encoder.parts())) == 1
    assert peak <= 4


def test_results_are_asked_for_only_after_the_parts() -> None:
    weights = random_weights(schema_of(a=("BF16", (8,))), 1)
    encoder = PatchEncoder(weights, weights)
    with pytest.raises(UsageError, match="after is known only"):
        _ = encoder.after
    with pytest.raises(UsageError, match="stats is known only"):
        _ = encoder.stats


def test_wrong_arguments_are_named() -> None:
    a = random_weights(schema_of(a=("BF16", (8,))), 1)
    b = random_weights(schema_of(a=("F16", (8,))), 1)
    with pytest.raises(UsageError, match="'zip' is not one of auto, gaps, ranks, dense"):
        PatchEncoder(a, a, encoding="zip")
    with pytest.raises(SchemaMismatchError, match=r"only in old \['a BF16\[8\]'\]"):
        PatchEncoder(a, b)
    with pytest.raises(SchemaMismatchError, match="digest state"):
        PatchEncoder(a, a, before=DigestState.of(b))
    with pytest.raises(SchemaMismatchError, match="digest state"):
        decode_parts([b""], a, DigestState.of(b))


class Watched(Slow):
    """Counts the reads that have begun, and those that have not ended; the first two meet."""

    def __init__(self, weights: HostWeights, broken_from: int | None = None) -> None:
        super().__init__(weights)
        self._broken_from = broken_from
        self._lock, self._barrier = threading.Lock(), threading.Barrier(2)
        self.begun = self.in_flight = 0

    def read(self, name: str, start: int, stop: int) -> Any:
        with self._lock:
            self.begun += 1
            self.in_flight += 1
            meets = self.begun <= 2
        try:
            if meets:
                self._barrier.wait(30)
            if self._broken_from is not None and start > self._broken_from:
                raise OSError("gone")
            return super().read(name, start, stop)
        finally:
            with self._lock:
                self.in_flight -= 1


def test_a_failing_reader_fails_the_encoder_and_nothing_more_is_read() -> None:
    old = random_weights(schema_of(w=("BF16", (4000,))), 1)
    new = Watched(old, broken_from=200)
    encoder = PatchEncoder(old, new, max_bucket_elements=64, threads=3)
    with pytest.raises(OSError, match="gone"):
        list(encoder.parts())
    assert new.in_flight == 0
    assert new.begun < 40


def test_of_an_abandoned_encoder_nothing_goes_on() -> None:
    old = random_weights(schema_of(w=("BF16", (4000,))), 1)
    new = Watched(changed(old, 0.6, 2))
    encoder = PatchEncoder(old, new, max_part_bytes=100, max_bucket_elements=64, threads=3)
    parts: Iterator[bytes] = encoder.parts()
    next(parts)
    del parts
    assert new.in_flight == 0
    assert new.begun < 60


def test_progress_reaches_the_total() -> None:
    old = random_weights(mixed_schema(), 1)
    seen: list[tuple[int, int]] = []
    encode_patch(old, old, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    # The opaque tensor's shape says 11, its bytes 13: bytes count.
    assert seen[-1] == (old.schema.num_bytes, old.schema.num_bytes)


def test_the_schema_travels_with_a_file_only_when_asked() -> None:
    old = random_weights(mixed_schema(), 1)
    data, _ = encode_patch(old, old)
    assert read_header(data).schema == old.schema
    bare, _ = encode_patch(old, old, embed_schema=False)
    header: PatchHeader = read_header(bare)
    assert header.schema is None
    assert header.schema_digest == old.schema.digest


@pytest.mark.parametrize("encoding", ["auto", "gaps", "ranks", "dense"])
def test_buckets_with_very_many_changes_are_cut(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stitch.codec.encode.MOST_LISTED", 100)
    monkeypatch.setattr("stitch.codec.encode.MOST_SHARING", 100)
    old = random_weights(mixed_schema(), 1)
    new = changed(old, 0.15, 2)
    data, stats = encode_patch(old, new, encoding=encoding, threads=2)
    header = read_header(data)
    assert header.num_changed == stats.num_changed > 300
    if encoding in ("gaps", "ranks"):
        assert all(entry.num_changed < 250 for entry in header.buckets)
        assert len(header.buckets) > len(plan_buckets(old.schema))
    update, _ = decode_parts([data], old, DigestState.of(old))
    update.apply(old)
    assert same_bits(old, new)
