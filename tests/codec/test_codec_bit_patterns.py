"""Every bit pattern there and back: all old words, a spread of new ones, each encoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from codec_cases import same_bits

from stitch.codec import DigestState, decode_parts, encode_patch, read_header
from stitch.codec.encodings import ENCODINGS
from stitch.codec.ranks.classes import EXPONENTS
from stitch.codec.ulp import from_ordered, is_ordered_by_sign, to_ordered
from stitch.codec.words import WORD_DTYPES, Words
from stitch.tensors import HostWeights
from stitch.types import DTYPE_BITS, Schema, TensorSpec

CHOICES = [*ENCODINGS, "auto"]
OPAQUE = "X3_Y5"
"""A dtype that nobody knows: bytes."""


def dtypes_of(width: int) -> list[str]:
    return [dtype for dtype, bits in DTYPE_BITS.items() if max(1, bits // 8) == width]


def weights_of(arrays: dict[str, Words]) -> HostWeights:
    """One tensor for each dtype; sub-byte and unknown ones are given as bytes."""
    specs = []
    for dtype, words in arrays.items():
        bits = DTYPE_BITS.get(dtype, 8)
        specs.append(TensorSpec(dtype, dtype, (8 * words.nbytes // bits,), words.nbytes))
    schema = Schema.of(specs)
    return HostWeights(schema, [arrays[spec.dtype] for spec in schema.tensors])


def check_round_trip(old: HostWeights, new: HostWeights, encoding: str) -> None:
    """Encode, decode, apply and undo: bits and digests are exactly those of the weights."""
    before, after = (DigestState.of(weights, threads=1) for weights in (old, new))
    part, stats = encode_patch(old, new, before=before, encoding=encoding, threads=1)
    differs = [old.words_at(i) != new.words_at(i) for i in range(len(old.schema))]
    assert stats.num_changed == sum(map(np.count_nonzero, differs))
    update, found = decode_parts([part], old, before, threads=1)
    assert np.array_equal(found.lanes, after.lanes)
    assert read_header(part).digest_after == found.version_digest() == after.version_digest()
    copy = HostWeights.load(old)
    update.apply(copy, threads=1)
    assert same_bits(copy, new)
    update.undo(copy, threads=1)
    assert same_bits(copy, old)


def scattered(old: Words, new: Words, seed: int, share: int = 12) -> tuple[Words, Words]:
    """The pairs among unchanged words of the same kind, `share` times as many in all."""
    rng = np.random.default_rng(seed)
    places = np.sort(rng.permutation(share * old.size)[: old.size])
    before = rng.choice(old, share * old.size)
    before[places] = old
    after = before.copy()
    after[places] = new
    return before, after


def stepped(words: Words, dtype: str, steps: Sequence[int]) -> Iterator[Words]:
    """Words (n,) that lie so many ULP away, around the corner from one end to the other."""
    for step in steps:
        distance = words.dtype.type(step % (1 << 8 * words.itemsize))
        if is_ordered_by_sign(dtype):
            yield from_ordered(to_ordered(words) + distance)
        else:
            yield words + distance


def landmarks(dtype: str) -> list[int]:
    """Both zeros, subnormals, the least and greatest normal numbers, infinities, NaNs; the ends."""
    bits = DTYPE_BITS[dtype]
    mantissa, field = EXPONENTS.get(dtype, (bits // 2, (1 << (bits // 2 - 1)) - 1))
    unit, top = 1 << mantissa, 1 << (bits - 1)
    infinity = field << mantissa
    sizes = [0, 1, 2, unit - 1, unit, unit + 1, infinity - unit, infinity - 1, infinity]
    sizes += [infinity + 1, infinity + unit // 2, infinity + unit // 2 + 1, top - 1]
    sizes += [(field >> 1) << mantissa, ((field >> 1) << mantissa) + 1]
    return [size | sign for size in dict.fromkeys(sizes) for sign in (0, top)]


def spread(old: Words, dtype: str) -> Iterator[Words]:
    """New words (n,) for all of `old` (n,), one kind of change at a time."""
    bits = 8 * old.itemsize
    yield old
    yield from stepped(old, dtype, [1, -1, 2, -2, 3, -3, 8, -200, 1 << (bits - 1)])
    top = old.dtype.type(1 << (bits - 1))
    yield old ^ top
    yield ~old
    for landmark in landmarks(dtype):
        yield np.full_like(old, landmark)
    rng = np.random.default_rng(bits)
    for _ in range(4):
        yield np.frombuffer(rng.bytes(old.nbytes), old.dtype)


@pytest.mark.parametrize("encoding", CHOICES)
@pytest.mark.parametrize("dtype", dtypes_of(2))
def test_all_16_bit_words_become_a_spread_of_others(dtype: str, encoding: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    news = list(spread(every, dtype))
    assert len(news) > 40
    old, new = np.tile(every, len(news)), np.concatenate(news)
    check_round_trip(weights_of({dtype: old}), weights_of({dtype: new}), encoding)


@pytest.mark.parametrize("encoding", CHOICES)
def test_all_16_bit_words_change_among_others_that_do_not(encoding: str) -> None:
    """Few changes in each class: other gaps, and classes that are not turned inside out."""
    befores, afters = {}, {}
    every = np.arange(1 << 16, dtype=np.uint16)
    for seed, dtype in enumerate(dtypes_of(2)):
        news = np.choose(np.arange(every.size) % 10, list(spread(every, dtype))[1:11])
        befores[dtype], afters[dtype] = scattered(every, news, seed)
    check_round_trip(weights_of(befores), weights_of(afters), encoding)


def all_pairs() -> tuple[Words, Words]:
    every = np.arange(256, dtype=np.uint8)
    return np.repeat(every, 256), np.tile(every, 256)


@pytest.mark.parametrize("encoding", CHOICES)
def test_all_pairs_of_8_bit_words(encoding: str) -> None:
    dtypes = [*dtypes_of(1), OPAQUE]
    assert {"F8_E4M3", "F8_E5M2", "F8_E8M0", "BOOL", "F4", "F6_E2M3", "I8"} < set(dtypes)
    old, new = (np.tile(words, 3) for words in all_pairs())
    check_round_trip(
        weights_of(dict.fromkeys(dtypes, old)), weights_of(dict.fromkeys(dtypes, new)), encoding
    )


@pytest.mark.parametrize("encoding", CHOICES)
def test_all_pairs_of_8_bit_words_among_others_that_do_not_change(encoding: str) -> None:
    befores, afters = {}, {}
    for seed, dtype in enumerate([*dtypes_of(1), OPAQUE]):
        befores[dtype], afters[dtype] = scattered(*all_pairs(), seed)
    check_round_trip(weights_of(befores), weights_of(afters), encoding)


def extremes(dtype: str) -> Words:
    """Landmarks and their neighbours, single bits, runs of bits, and both inverted."""
    width = DTYPE_BITS[dtype] // 8
    marks = np.array(landmarks(dtype), np.uint64)
    single = np.uint64(1) << np.arange(8 * width, dtype=np.uint64)
    words = np.concatenate([marks, single, single - np.uint64(1)]).astype(WORD_DTYPES[width])
    near = list(stepped(words, dtype, [1, -1, 2, -3]))
    result: npt.NDArray[np.unsignedinteger] = np.unique(np.concatenate([words, ~words, *near]))
    return result


@pytest.mark.parametrize("encoding", CHOICES)
@pytest.mark.parametrize("width", [4, 8])
def test_extreme_and_random_wide_words(width: int, encoding: str) -> None:
    befores, afters = {}, {}
    rng = np.random.default_rng(width)
    for seed, dtype in enumerate(dtypes_of(width)):
        ends = extremes(dtype)
        noise = [np.frombuffer(rng.bytes(60_000 * width), ends.dtype) for _ in range(2)]
        old = np.concatenate([np.repeat(ends, ends.size), noise[0]])
        new = np.concatenate([np.tile(ends, ends.size), noise[1]])
        befores[dtype], afters[dtype] = old, new
        check_round_trip(
            *(weights_of({dtype: words}) for words in scattered(old, new, seed, 4)), encoding
        )
    check_round_trip(weights_of(befores), weights_of(afters), encoding)


@pytest.mark.parametrize("encoding", CHOICES)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_one_changed_word_alone_has_any_value(width: int, encoding: str) -> None:
    """Buckets of one changed word: nothing is learnt from neighbours."""
    rng = np.random.default_rng(width)
    for dtype in dtypes_of(width):
        if DTYPE_BITS[dtype] < 8:
            continue
        ends = extremes(dtype)
        for old_word, new_word in rng.choice(ends, (12, 2)):
            if old_word == new_word:
                continue
            place = rng.integers(17)
            old = rng.choice(ends, 17)
            old[place] = old_word
            new = old.copy()
            new[place] = new_word
            check_round_trip(weights_of({dtype: old}), weights_of({dtype: new}), encoding)
