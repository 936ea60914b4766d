"""`auto` picks what is smallest without trying, and `decode="changed"` keeps to changed words."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from codec_cases import changed, from_words, mixed_schema, random_weights, same_bits, schema_of

from stitch.codec import (
    DigestState,
    PatchEncoder,
    choice,
    decode_parts,
    encode_patch,
    plan_buckets,
    read_header,
)
from stitch.codec.changes import BucketChanges, find_changes
from stitch.codec.encodings import ENCODINGS
from stitch.errors import UsageError
from stitch.tensors import HostWeights
from stitch.testing.synthetic import adam_step, synthetic_schema, synthetic_weights

FLOATS = ("BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2")


def absorbed(dtype: str, density: float, hidden: int = 96) -> tuple[HostWeights, HostWeights]:
    """Weights before and after a step of which only `density` is not absorbed."""
    old = synthetic_weights(synthetic_schema(hidden, 1, dtype), seed=3)
    new = HostWeights.load(old)
    adam_step(new, density, 1)
    return old, new


def all_changes(
    old: HostWeights, new: HostWeights, max_elements: int = 1 << 23
) -> Iterator[BucketChanges]:
    for bucket in plan_buckets(old.schema, max_elements):
        changes = find_changes(bucket, old, new)
        if changes.num_changed:
            yield changes


def sizes_of(changes: BucketChanges) -> dict[str, int]:
    return {name: len(encoding.encode(changes)) for name, encoding in ENCODINGS.items()}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("density", [0.004, 0.02, 0.2])
def test_the_choice_is_the_smallest_where_the_class_tells_what_changes(
    dtype: str, density: float
) -> None:
    for changes in all_changes(*absorbed(dtype, density)):
        sizes = sizes_of(changes)
        chosen = choice.choose(changes, "any")
        assert sizes[chosen] <= 1.03 * min(sizes.values()), sizes
        assert chosen == "ranks" or dtype == "F8_E4M3"  # nearly all of these are zeros
        saved = 8 * (sizes["gaps"] - sizes["ranks"]) / changes.num_changed
        assert abs(choice.saved_bits(changes) / changes.num_changed - saved) < 1.5


@pytest.mark.parametrize("dtype", [*FLOATS, "I8", "U16", "I64", "F4"])
@pytest.mark.parametrize("density", [0.002, 0.02, 0.2])
def test_the_choice_is_gaps_where_the_class_tells_nothing(dtype: str, density: float) -> None:
    old = random_weights(schema_of(a=(dtype, (300, 500))), 1)
    for changes in all_changes(old, changed(old, density, 2)):
        sizes = sizes_of(changes)
        assert choice.choose(changes, "any") == "gaps"
        assert sizes["gaps"] <= 1.02 * min(sizes.values()) + 60, sizes


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3", "I8", "U8"])
@pytest.mark.parametrize("density", [0.3, 0.6, 1.0])
def test_the_choice_is_dense_where_much_changed(dtype: str, density: float) -> None:
    old = random_weights(schema_of(a=(dtype, (300, 500))), 1)
    for changes in all_changes(old, changed(old, density, 2)):
        sizes = sizes_of(changes)
        assert choice.choose(changes, "any") == "dense"
        assert sizes["dense"] <= 1.04 * min(sizes.values()), sizes


def test_small_buckets_do_not_pay_for_classes() -> None:
    old = random_weights(schema_of(a=("BF16", (2000,))), 1)
    for density, seed in itertools.product((0.001, 0.01, 0.1), range(5)):
        for changes in all_changes(old, changed(old, density, seed)):
            sizes = sizes_of(changes)
            assert sizes[choice.choose(changes, "any")] <= 1.1 * min(sizes.values()) + 8, sizes


def scaled(num_rows: int = 256, row_words: int = 512) -> tuple[HostWeights, HostWeights]:
    """I8 weights in blocks of 32 with BF16 scales; those of small scales change more often."""
    rng = np.random.default_rng(4)
    exponents = rng.integers(118, 126, (num_rows, row_words // 32))
    words = rng.integers(0, 256, num_rows * row_words).astype(np.uint8)
    schema = schema_of(
        **{
            "w.weight": ("I8", (num_rows, row_words)),
            "w.weight_scale": ("BF16", exponents.shape),
        }
    )
    old = HostWeights.allocate(schema)
    old.words("w.weight")[:] = words
    old.words("w.weight_scale")[:] = (exponents << 7).reshape(-1)
    new = HostWeights.load(old)
    chance = np.repeat(0.2 * 0.5 ** (exponents - 118.0), 32, axis=1).reshape(-1)
    new.words("w.weight")[rng.random(words.size) < chance] += 1
    return old, new


def test_block_scales_tell_what_changes_in_integers() -> None:
    old, new = scaled()
    for max_elements in (1 << 23, 10_000):  # buckets that begin inside a row
        for changes in all_changes(old, new, max_elements):
            if changes.bucket.num_elements < 10_000 or changes.bucket.dtype != "I8":
                continue
            sizes = sizes_of(changes)
            assert choice.choose(changes, "any") == "ranks"
            assert sizes["ranks"] == min(sizes.values())
            saved = 8 * (sizes["gaps"] - sizes["ranks"]) / changes.num_changed
            assert abs(choice.saved_bits(changes) / changes.num_changed - saved) < 1.5


def test_tensors_with_and_without_scales_share_a_bucket() -> None:
    old, new = scaled(64)
    arrays_of = lambda weights: {  # noqa: E731
        spec.name: (spec.dtype, weights.words(spec.name)) for spec in weights.schema.tensors
    }
    plain = np.arange(1000, dtype=np.uint8)
    mixed = [
        from_words(arrays_of(weights) | {"plain": ("I8", plain + np.uint8(k))})
        for k, weights in enumerate((old, new))
    ]
    for changes in all_changes(*mixed):
        assert choice.choose(changes, "any") in ENCODINGS


def test_each_bucket_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stitch.codec.encode.MOST_SHARING", 0)
    calls: list[str] = []

    class Counting:
        def __init__(self, name: str) -> None:
            self._name = name
            self.reads = ENCODINGS[name].reads
            self.lists_changes = ENCODINGS[name].lists_changes

        def encode(self, changes: BucketChanges) -> bytes:
            calls.append(self._name)
            return ENCODINGS[self._name].encode(changes)

    counting = {name: Counting(name) for name in ENCODINGS}
    monkeypatch.setattr("stitch.codec.encode.ENCODINGS", counting)
    for density in (0.01, 0.15, 0.9):
        old, new = absorbed("BF16", density, 32)
        calls.clear()
        list(PatchEncoder(old, new, threads=1, max_bucket_elements=4096).parts())
        assert len(calls) == len(list(all_changes(old, new, 4096)))


@pytest.mark.parametrize("density", [0.002, 0.1, 0.5, 1.0])
def test_patches_for_receivers_without_a_copy_hold_gaps_only(density: float) -> None:
    old = random_weights(mixed_schema(), 1)
    new = changed(old, density, 2)
    data, stats = encode_patch(old, new, decode="changed")
    assert set(stats.encodings) <= {"gaps", "absent"}
    assert choice.needed_decode(stats.encodings) == "changed"
    update, _ = decode_parts([data], old, DigestState.of(old))
    result = HostWeights.load(old)
    update.apply(result)
    assert same_bits(result, new)


@pytest.mark.parametrize("dtype", ["BF16", "F32", "U8"])
def test_gaps_of_a_bucket_that_changed_entirely_are_no_larger_than_dense(dtype: str) -> None:
    old = random_weights(schema_of(a=(dtype, (300, 500))), 1)
    for new in (changed(old, 1.0, 2), absorbed_fully(old)):
        for changes in all_changes(old, new):
            sizes = sizes_of(changes)
            assert sizes["gaps"] <= 1.02 * sizes["dense"]


def absorbed_fully(old: HostWeights) -> HostWeights:
    """Every word one or two further."""
    new = HostWeights.load(old)
    for index in range(len(old.schema)):
        words = new.words_at(index)
        words += np.random.default_rng(1).integers(1, 3, words.size).astype(words.dtype)
    return new


def test_what_decoding_may_read_is_checked() -> None:
    weights = random_weights(schema_of(a=("BF16", (8,))), 1)
    assert choice.allowed_encodings("any") == tuple(ENCODINGS)
    assert choice.allowed_encodings("changed") == ("gaps",)
    PatchEncoder(weights, weights, encoding="gaps", decode="changed")
    for encoding in ("ranks", "dense"):
        with pytest.raises(UsageError, match=f"'{encoding}' reads whole buckets .* allows gaps"):
            PatchEncoder(weights, weights, encoding=encoding, decode="changed")
    wrong: Any = "nothing"
    with pytest.raises(UsageError, match="'nothing' is not one of any, changed"):
        PatchEncoder(weights, weights, decode=wrong)


def test_what_a_patch_needs_follows_from_its_encodings() -> None:
    assert choice.needed_decode(["absent"]) == "changed"
    assert choice.needed_decode(["absent", "gaps"]) == "changed"
    assert choice.needed_decode(["dense", "gaps"]) == "any"
    assert choice.needed_decode(["ranks"]) == "any"
    assert choice.needed_decode(["gaps", "braids"]) is None


def test_unchanged_models_of_many_tensors_take_a_few_hundred_bytes() -> None:
    schema = schema_of(**{f"model.layers.{n}.weight": ("BF16", (64, 8)) for n in range(500)})
    weights = random_weights(schema, 1)
    for options in ({}, {"encoding": "ranks"}, {"decode": "changed"}):
        (part,) = PatchEncoder(weights, weights, max_bucket_elements=512, **options).parts()
        assert len(part) < 400
        assert read_header(part).encodings == {"absent": 500}
