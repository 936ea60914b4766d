"""`ranks` against its reference, in both directions; class tables, scales, and sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from codec_cases import from_words, same_bits, schema_of
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.codec import DigestState, PatchEncoder, decode_parts, encode_patch, reference
from stitch.codec import reference_ranks as slow
from stitch.codec.buckets import Bucket, Slice
from stitch.codec.changes import find_changes
from stitch.codec.encodings import OldWords
from stitch.codec.encodings.ranks import Ranks, values_between
from stitch.codec.ranks.scales import BlockScales, scales_of
from stitch.codec.words import WORD_DTYPES, Words
from stitch.errors import CorruptPatchError
from stitch.tensors import HostWeights
from stitch.types import FLOAT_DTYPES, Schema, TensorSpec

WIDTHS = {
    "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F32": 4, "F64": 8,
    "I8": 1, "U16": 2, "I32": 4, "I64": 8,
}  # fmt: skip


def words_like_weights(dtype: str, count: int, seed: int) -> Words:
    """Bit patterns with the exponents of normally distributed weights."""
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 0.03, count).astype(np.float64)
    if dtype == "F64":
        return values.view(np.uint64)
    single = values.astype(np.float32).view(np.uint32)
    if dtype == "F32":
        return single
    if dtype == "F16":
        return values.astype(np.float16).view(np.uint16)
    if dtype == "BF16":
        return (single >> 16).astype(np.uint16)
    return rng.integers(0, 1 << 63, count).astype(WORD_DTYPES[WIDTHS[dtype]])


def changed_words(words: Words, density: float, seed: int, spread: int = 3) -> Words:
    """Some words moved by a few units, a few of them to anywhere."""
    rng = np.random.default_rng(seed)
    moves = rng.integers(-spread, spread, words.size, endpoint=True)
    moves[rng.random(words.size) >= density] = 0
    new = words + moves.astype(words.dtype)
    wild = rng.random(words.size) < density / 20
    new[wild] = rng.integers(0, 1 << 63, wild.sum()).astype(words.dtype)
    return new


def bucket_of(dtype: str, old: Words, new: Words) -> tuple[Any, Any]:
    """What an encoding gets to encode, and to decode."""
    schema = schema_of(a=(dtype, (old.size,)))
    positions = np.flatnonzero(old != new)
    weights = SimpleNamespace(schema=schema)
    bucket = SimpleNamespace(
        dtype=dtype,
        num_elements=old.size,
        num_bytes=old.nbytes,
        slices=[SimpleNamespace(tensor=0, start=0, stop=old.size, num_elements=old.size)],
    )
    changes = SimpleNamespace(
        bucket=bucket,
        positions=positions,
        old=old[positions],
        new=new[positions],
        old_slices=(old,),
        old_weights=weights,
    )
    held = SimpleNamespace(
        bucket=bucket, weights=weights, whole=lambda: [old], at=lambda where: old[where]
    )
    return changes, held


def decoded(payload: bytes, old: Words, held: Any, num_changed: int) -> Words:
    found = Ranks().decode(memoryview(payload), num_changed=num_changed, old=held, what="it")
    new = old.copy()
    assert found.positions is not None
    assert np.array_equal(found.old, old[found.positions])
    new[found.positions] = found.new
    return new


@pytest.mark.parametrize("density", [0.002, 0.1, 0.7, 1.0])
@pytest.mark.parametrize("dtype", WIDTHS)
def test_what_the_loops_encode_the_reference_decodes(dtype: str, density: float) -> None:
    old = words_like_weights(dtype, 1500, 1)
    new = changed_words(old, density, 2, spread=40)
    old[7], new[7] = 0, 1
    changes, held = bucket_of(dtype, old, new)
    payload = Ranks().encode(changes)
    classes = [slow.exponent(int(word), dtype) for word in old]
    count = changes.positions.size
    assert payload[0] == 0
    assert np.array_equal(slow.decode(payload[1:], old, dtype, count, classes), new)
    assert np.array_equal(decoded(payload, old, held, count), new)


CHOICES = st.builds(
    slow.Choices,
    low_gap=st.integers(0, 27),
    guess=st.integers(0, 7),
    low_size=st.integers(0, 62),
    invert=st.booleans(),
    down=st.booleans(),
    always_flips=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(dtype=st.sampled_from(sorted(WIDTHS)), choices=CHOICES, seed=st.integers(0, 99))
def test_whatever_a_writer_chooses_the_loops_decode(
    dtype: str, choices: slow.Choices, seed: int
) -> None:
    choices.always_flips &= dtype in FLOAT_DTYPES
    old = words_like_weights(dtype, 200, seed)
    new = changed_words(old, 0.3, seed + 1)
    if dtype == "F64" and choices.down:
        new = np.where((new ^ old) >> np.uint64(61), old, new)  # a base is below 2^62
    if dtype == "I64":
        choices.down = False
    old[3], new[3] = 0, 1
    changes, held = bucket_of(dtype, old, new)
    classes = [slow.exponent(int(word), dtype) for word in old]
    payload = b"\0" + slow.encode(old, new, dtype, classes, choices)
    assert np.array_equal(decoded(payload, old, held, changes.positions.size), new)


def test_positions_cost_no_more_than_their_entropy_given_the_class() -> None:
    old = words_like_weights("BF16", 1 << 20, 3)
    rng = np.random.default_rng(4)
    chance = 2.0 ** -(np.clip(((old >> 7) & 0xFF).astype(float) - 110, 0, 30))
    moves = np.where(rng.random(old.size) < chance, rng.choice([-1, 1], old.size), 0)
    new = old + moves.astype(np.uint16)
    changes, _ = bucket_of("BF16", old, new)
    k = changes.positions.size
    classes = (old >> 7) & 0xFF
    bits = float(k)  # one for each sign
    for cls in np.unique(classes):
        inside = classes == cls
        p = (old != new)[inside].mean()
        if 0 < p < 1:
            bits -= inside.sum() * (p * np.log2(p) + (1 - p) * np.log2(1 - p))
    size = len(Ranks().encode(changes))
    assert bits / 8 < size < 1.03 * bits / 8 + 200


def test_a_class_of_which_all_but_a_few_change_costs_what_the_few_do() -> None:
    old = np.full(100_000, 0x3F80, np.uint16)
    new = old + np.uint16(1)
    new[[5, 70_000]] = old[[5, 70_000]]
    changes, held = bucket_of("BF16", old, new)
    payload = Ranks().encode(changes)
    assert len(payload) < 200
    assert np.array_equal(decoded(payload, old, held, 99_998), new)


def test_values_are_exact_for_the_extremes_of_64_bits() -> None:
    numbers = [0, 1, 2**62, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1]
    old = np.repeat(np.array(numbers, np.uint64), len(numbers))
    new = np.tile(np.array(numbers, np.uint64), len(numbers))
    for dtype in ("F64", "I64", "U64", "C64"):
        changes, held = bucket_of(dtype, old, new)
        payload = Ranks().encode(changes)
        assert np.array_equal(decoded(payload, old, held, changes.positions.size), new)


def quantised(scale_dtype: str, spec: TensorSpec, scales: TensorSpec, seed: int) -> HostWeights:
    rng = np.random.default_rng(seed)
    weights = HostWeights.allocate(Schema.of([spec, scales]))
    words = weights.words(spec.name)
    words[:] = rng.integers(0, 1 << (8 * words.itemsize), words.size).astype(words.dtype)
    held = weights.words(scales.name)
    held[:] = words_like_weights(scale_dtype, held.size, seed + 1)
    return weights


SCALED = {
    "int8 by channel": (("a.weight", "I8", (24, 40)), ("a.weight_scale", "F32", (24, 1))),
    "int8 by group": (("a.weight", "I8", (24, 40)), ("a.weight_scale", "BF16", (24, 5))),
    "int8 by block": (("a.weight", "I8", (32, 64)), ("a.weight_scale_inv", "F32", (2, 4))),
    "packed int4": (("a.weight_packed", "I32", (24, 16)), ("a.weight_scale", "F16", (24, 4))),
    "GPTQ": (("a.qweight", "I32", (16, 24)), ("a.scales", "F16", (4, 24))),
    "MXFP4": (("a.w_blocks", "U8", (3, 8, 5, 16)), ("a.w_scales", "F8_E8M0", (3, 8, 5))),
    "F64 scales": (("a.weight", "U8", (8, 40)), ("a.weight_scale", "F64", (8, 10))),
}


@pytest.mark.parametrize("max_elements", [64, 1 << 23])
@pytest.mark.parametrize("case", SCALED)
def test_quantised_words_are_classed_by_the_scale_of_their_block(
    case: str, max_elements: int
) -> None:
    spec, scales = (TensorSpec.of(*fields) for fields in SCALED[case])
    old = quantised(scales.dtype, spec, scales, 5)
    new = HostWeights.load(old)
    words = new.words(spec.name)
    words[:] = changed_words(words.copy(), 0.3, 6)
    new.words(scales.name)[::2] += 1
    assert scales_of(old.schema.index[spec.name], old.schema) is not None
    encoder = PatchEncoder(
        old,
        new,
        encoding="ranks",
        threads=1,
        max_bucket_elements=max_elements,
        max_part_bytes=None,
    )
    (data,) = encoder.parts()
    assert encoder.stats.encodings.keys() <= {"ranks", "absent"}
    assert (encoder.stats.encodings["ranks"] > 2) == (max_elements == 64)
    update, _ = decode_parts([data], old, DigestState.of(old))
    by_reference = {i: old.words_at(i).copy() for i in range(2)}
    reference.apply_part(data, old.schema, by_reference)
    assert all(np.array_equal(by_reference[i], new.words_at(i)) for i in range(2))
    update.apply(old)
    assert same_bits(old, new)


def test_scales_make_patches_of_quantised_tensors_smaller() -> None:
    spec, scales = (TensorSpec.of(*fields) for fields in SCALED["int8 by group"])
    spec = TensorSpec.of(spec.name, "I8", (2048, 512))
    scales = TensorSpec.of(scales.name, "BF16", (2048, 16))
    old = quantised("BF16", spec, scales, 7)
    exponents = ((old.words(scales.name) >> 7) & 0xFF).astype(float)
    chance = np.repeat(0.001 * 2.0 ** (exponents.max() - exponents), 32)
    new = HostWeights.load(old)
    rng = np.random.default_rng(8)
    words = new.words(spec.name)
    words += (rng.random(words.size) < chance).astype(np.uint8)
    with_scales = len(encode_patch(old, new, encoding="ranks")[0])
    bare_old, bare_new = (
        from_words({"a.weight": ("I8", weights.words(spec.name))}) for weights in (old, new)
    )
    without = len(encode_patch(bare_old, bare_new, encoding="ranks")[0])
    assert with_scales < 0.9 * without


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("a.weight_scale", "F32", (5, 1)),
        ("a.weight_scale", "F32", (24, 7)),
        ("other", "F32", (24, 1)),
        ("a.weight_scale", "F32", ()),
    ],
)
def test_scales_that_do_not_fit_are_not_used(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    schema = Schema.of(
        [TensorSpec.of("a.weight", "I8", (24, 40)), TensorSpec.of(name, dtype, shape)]
    )
    found = scales_of(schema.index["a.weight"], schema)
    assert found is None or shape == ()
    if found is not None:
        assert found == BlockScales(schema.index[name], 24, 40)


def test_hostile_scales_are_refused() -> None:
    spec, scales = (TensorSpec.of(*fields) for fields in SCALED["int8 by group"])
    old = quantised("BF16", spec, scales, 9)
    new = HostWeights.load(old)
    new.words(spec.name)[3] += 1
    index = old.schema.index[spec.name]
    bucket = Bucket("I8", (Slice(index, 0, spec.num_words),))
    changes = find_changes(bucket, old, new)
    payload = bytearray(Ranks().encode(changes))
    assert payload[:3] == b"\1\0\1"
    held = OldWords(bucket=bucket, weights=old)
    for offset, value in ((0, 2), (2, 2), (3, 7), (7, 0), (11, 0), (7, 25), (11, 255)):
        bad = bytearray(payload)
        bad[offset] = value
        with pytest.raises(CorruptPatchError):
            Ranks().decode(memoryview(bytes(bad)), num_changed=1, old=held, what="it")
    for length in range(len(payload)):
        with pytest.raises(CorruptPatchError):
            Ranks().decode(memoryview(bytes(payload[:length])), num_changed=1, old=held, what="it")


def test_values_of_floats_are_differences_of_magnitudes() -> None:
    old = np.array([0x3F80, 0xBF80, 0x0001, 0x8000], np.uint16)
    new = np.array([0x3F81, 0xBF81, 0x8001, 0x0000], np.uint16)
    values, flips = values_between(old, new, "BF16")
    assert values.tolist() == [1, 1, 0, 0]
    assert flips.tolist() == [0, 0, 1, 1]
