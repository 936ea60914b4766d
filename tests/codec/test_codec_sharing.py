"""Buckets with few changes share one payload: the same changes, for less."""

from __future__ import annotations

import numpy as np
import pytest
from codec_cases import DTYPES, changed, mixed_schema, random_weights, same_bits, schema_of

from stitch.codec import (
    DigestState,
    UpdateSet,
    decode_parts,
    diff_update,
    encode,
    plan_buckets,
    read_header,
    reference,
)
from stitch.codec.buckets import DEFAULT_BUCKET_ELEMENTS, MAX_BUCKET_ELEMENTS, Bucket, Slice
from stitch.codec.buckets import groups_of as grouped
from stitch.tensors import HostWeights, Words
from stitch.types import Schema


class Copying:
    """A reader that hands out copies and remembers how large they were."""

    def __init__(self, weights: HostWeights) -> None:
        self._weights = weights
        self.schema: Schema = weights.schema
        self.sizes: list[int] = []

    def read(self, name: str, start: int, stop: int) -> Words:
        self.sizes.append(stop - start)
        return self._weights.read(name, start, stop).copy()


def patch_of(
    old: HostWeights, new: HostWeights, *, max_bucket_elements: int, threads: int = 1
) -> tuple[bytes, encode.PatchEncoder]:
    encoder = encode.PatchEncoder(
        old,
        new,
        encoding="gaps",
        threads=threads,
        max_part_bytes=None,
        max_bucket_elements=max_bucket_elements,
    )
    (data,) = encoder.parts()
    return data, encoder


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("most", [0, 20, 1 << 16])
def test_shared_payloads_hold_the_same_changes(
    dtype: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "MOST_SHARING", most)
    schema = schema_of(a=(dtype, (3000,)), b=(dtype, (6,)), c=(dtype, (700, 3)))
    old = random_weights(schema, 1)
    new = changed(old, 0.01, 2)
    new.words("c")[1024:1536] = old.words("c")[1024:1536]
    data, encoder = patch_of(old, new, max_bucket_elements=512)
    header = read_header(data)
    plain = plan_buckets(schema, 512)
    if most == 1 << 16:
        assert len(header.buckets) == -(-len(plain) // 4)
    elif most:
        assert all(entry.num_changed <= most for entry in header.buckets)
    assert header.num_elements == schema.num_elements
    assert encoder.stats.num_changed == header.num_changed
    by_reference = {i: old.words_at(i).copy() for i in range(len(schema))}
    reference.apply_part(data, schema, by_reference)
    assert all(np.array_equal(words, new.words_at(i)) for i, words in by_reference.items())
    for reader in (old, Copying(old)):
        update, after = decode_parts([data], reader, DigestState.of(old))
        assert after.version_digest() == DigestState.of(new).version_digest()
        copy = HostWeights.load(old)
        update.apply(copy)
        assert same_bits(copy, new)


def test_a_patch_does_not_depend_on_the_threads() -> None:
    old = random_weights(mixed_schema(), 1)
    for density in (0.001, 0.05, 1.0):
        new = changed(old, density, 2)
        one, two = (patch_of(old, new, max_bucket_elements=64, threads=n)[0] for n in (1, 2))
        assert one == two


def test_buckets_with_many_changes_stay_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "MOST_SHARING", 10)
    old = random_weights(schema_of(a=("BF16", (64 * 8,))), 1)
    new = HostWeights.load(old)
    for bucket, count in enumerate([1, 11, 2, 7, 0, 10, 0, 1]):
        new.words("a")[64 * bucket : 64 * bucket + count] ^= 1
    data, _ = patch_of(old, new, max_bucket_elements=64)
    found = sorted(
        (entry.num_changed, len(entry.bucket.slices)) for entry in read_header(data).buckets
    )
    assert found == [(1, 1), (10, 1), (10, 3), (11, 1)]


def test_reading_around_changes_holds_a_bucket_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many slices share a payload; each read is of one slice."""
    monkeypatch.setattr("stitch.codec.encodings.port.DEFAULT_BUCKET_ELEMENTS", 1024)
    old = random_weights(schema_of(a=("BF16", (2048,)), b=("BF16", (2048,))), 1)
    new = changed(old, 0.05, 2)
    data, _ = patch_of(old, new, max_bucket_elements=1024)
    assert [len(entry.bucket.slices) for entry in read_header(data).buckets] == [4]
    reader = Copying(old)
    update, _ = decode_parts([data], reader, DigestState.of(old))
    assert max(reader.sizes) <= 1024
    assert len(reader.sizes) == 4
    again = diff_update(old, new)
    assert isinstance(again, UpdateSet)
    assert update.num_changed == again.num_changed


@pytest.mark.parametrize("density", [0.01, 1.0])
def test_each_bucket_is_read_once(density: float) -> None:
    """Also where so much changed that comparing only counts it, and it is listed later."""
    old = random_weights(schema_of(a=("BF16", (50_000,)), b=("I8", (70_000,))), 1)
    reader = Copying(changed(old, density, 2))
    encoder = encode.PatchEncoder(
        old,
        reader,
        before=DigestState.of(old),
        encoding="gaps",
        threads=1,
        max_bucket_elements=40_000,
    )
    assert len(list(encoder.parts())) == 1
    assert sum(reader.sizes) == old.schema.num_elements


def test_groups_are_of_one_dtype_and_fit_one_bucket() -> None:
    quarter = MAX_BUCKET_ELEMENTS // 4
    sizes = [quarter, quarter, quarter, quarter, 1, quarter, 4 * quarter, 8, 8]
    dtypes = ["BF16"] * 8 + ["F32"]
    buckets = [
        Bucket(dtype, (Slice(i, 0, n),))
        for i, (dtype, n) in enumerate(zip(dtypes, sizes, strict=True))
    ]
    groups = grouped(buckets, 4)
    assert [len(group) for group in groups] == [4, 2, 1, 1, 1]
    assert [bucket for group in groups for bucket in group] == buckets
    assert [len(group) for group in grouped(buckets, 1)] == [1] * 9
    assert grouped([], 4) == []
    assert 4 * DEFAULT_BUCKET_ELEMENTS <= MAX_BUCKET_ELEMENTS
