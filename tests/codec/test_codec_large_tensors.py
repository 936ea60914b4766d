"""Tensors of more than 2^31 and 2^32 elements, by slices: nothing here holds one in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from patch_damage import bucket_positions

from stitch.codec import (
    Bucket,
    DigestState,
    PatchedReader,
    PatchEncoder,
    Slice,
    TensorUpdate,
    UpdateSet,
    decode_parts,
    plan_buckets,
    read_header,
    reference,
)
from stitch.codec.buckets import MAX_BUCKET_ELEMENTS
from stitch.codec.changes import find_changes
from stitch.codec.encodings import ENCODINGS, OldWords
from stitch.codec.patch import Entry, PatchHeader, payload_checksum, write_part
from stitch.codec.words import WORD_DTYPES, Lanes, Words
from stitch.tensors import HostWeights
from stitch.types import Schema, TensorSpec

SIZES = {
    "BF16": (1 << 33) + 4096 + 3,
    "F64": (1 << 32) + 77,
    "I32": (1 << 32) + (1 << 31) + 1,
    "U8": (1 << 34) + (1 << 32) + 5,
}
"""Words of the tensor of each dtype. All go past word 2^31 of the digest, too."""

SCHEMA = Schema.of(TensorSpec.of(dtype, dtype, (size,)) for dtype, size in SIZES.items())
AROUND = 4096
"""Elements of a slice."""


def corners(size: int) -> list[int]:
    """Positions around every power of two at which some integer type ends, and both ends."""
    marks = [0, 1 << 30, 1 << 31, 1 << 32, (1 << 32) + (1 << 31), 1 << 33, 1 << 34, size]
    near = [mark + offset for mark in marks for offset in (-9, -2, -1, 0, 1, 2, 3, 700)]
    return sorted({position for position in near if 0 <= position < size})


class Made:
    """A WeightReader whose words are all 0 but at a few places of each tensor; holds only those."""

    def __init__(self, schema: Schema, places: Mapping[str, Mapping[int, int]]) -> None:
        self.schema = schema
        self._places = {
            name: (np.array(sorted(words)), [words[at] for at in sorted(words)])
            for name, words in places.items()
        }

    def read(self, name: str, start: int, stop: int) -> Words:
        spec = self.schema[name]
        assert 0 <= start <= stop <= spec.num_words
        words = np.zeros(stop - start, WORD_DTYPES[spec.word_bytes])
        positions, values = self._places.get(name, (np.empty(0, np.int64), []))
        lo, hi = np.searchsorted(positions, (start, stop))
        words[positions[lo:hi] - start] = values[lo:hi]
        return words


def places_of(seed: int) -> dict[str, dict[int, int]]:
    """New words for the corners of each tensor."""
    rng = np.random.default_rng(seed)
    return {
        spec.name: {at: int(rng.integers(1, 1 << min(63, 8 * spec.word_bytes))) for at in at_all}
        for spec in SCHEMA.tensors
        for at_all in [corners(spec.num_words)]
    }


OLD_PLACES, NEW_PLACES = places_of(1), places_of(2)
OLD, NEW = Made(SCHEMA, OLD_PLACES), Made(SCHEMA, NEW_PLACES)


def buckets_around_corners() -> list[Bucket]:
    """For each dtype, the slices that hold its corners, some to a bucket, the last ones first."""
    buckets = []
    for tensor, spec in enumerate(SCHEMA.tensors):
        starts = sorted({at // AROUND * AROUND for at in corners(spec.num_words)}, reverse=True)
        pieces = [Slice(tensor, at, min(at + AROUND, spec.num_words)) for at in starts]
        cuts = [pieces[i : i + 4] for i in range(0, len(pieces), 4)]
        buckets += [Bucket(spec.dtype, tuple(cut)) for cut in cuts]
    return buckets


def mixed(word: int, index: int) -> tuple[int, int]:
    """The two terms of a digest's 64-bit word."""
    key = (index + 1) * 0x9E3779B97F4A7C15 & reference.MASK
    h = (word ^ key) * 0xD6E8FEB86659FD93 & reference.MASK
    h ^= h >> 32
    h = h * 0xA0761D6478BD642F & reference.MASK
    h ^= h >> 29
    g = h * 0xE7037ED1A0B428DB & reference.MASK
    return h, g ^ (g >> 32)


def lanes_of(places: Mapping[int, int], width: int) -> tuple[int, int]:
    """What the words at these places contribute beyond words of zeros, in Python integers."""
    words: dict[int, int] = {}
    for at, value in places.items():
        words.setdefault(at * width // 8, 0)
        words[at * width // 8] |= value << 8 * (at * width % 8)
    a = b = 0
    for index, word in words.items():
        (h, g), (h0, g0) = mixed(word, index), mixed(0, index)
        a, b = a + h - h0, b + g - g0
    return a & reference.MASK, b & reference.MASK


def state_of(places: Mapping[str, Mapping[int, int]]) -> DigestState:
    """The digest state, less the same constant for each tensor: what many zeros give."""
    lanes = [lanes_of(places[spec.name], spec.word_bytes) for spec in SCHEMA.tensors]
    return DigestState(SCHEMA, np.array(lanes, np.uint64))


def patch_of(encoding: str, buckets: list[Bucket]) -> tuple[bytes, Lanes]:
    """A patch that compared these buckets (and says that it compared all)."""
    entries, payloads = [], []
    before = state_of(OLD_PLACES)
    gains = np.zeros_like(before.lanes)
    for bucket in buckets:
        changes = find_changes(bucket, OLD, NEW)
        payload = ENCODINGS[encoding].encode(changes)
        for piece, gain in zip(bucket.slices, changes.gains, strict=True):
            gains[piece.tensor] += gain
        payloads.append(payload)
        entries.append(
            Entry(
                bucket=bucket,
                encoding=encoding,
                num_changed=changes.num_changed,
                offset=0,
                num_bytes=len(payload),
                checksum=payload_checksum(payload),
            )
        )
    header = PatchHeader(
        format=1,
        part=0,
        last=True,
        schema_digest=SCHEMA.digest,
        digest_before=before.version_digest(),
        digest_after=before.plus(gains).version_digest(),
        num_elements=SCHEMA.num_elements,
        num_absent=len(plan_buckets(SCHEMA, MAX_BUCKET_ELEMENTS)),
        buckets=tuple(entries),
        schema=SCHEMA,
    )
    return write_part(header, payloads), gains


def check_words(
    reader: Made | PatchedReader | HostWeights, places: dict[str, dict[int, int]]
) -> None:
    for spec in SCHEMA.tensors:
        for at in places[spec.name]:
            stop = min(at + 3, spec.num_words)
            words = reader.read(spec.name, at, stop)
            assert [int(word) for word in words] == [
                places[spec.name].get(k, 0) for k in range(at, stop)
            ]


def changed_positions(update: UpdateSet) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {spec.name: [] for spec in SCHEMA.tensors}
    for part in update.updates:
        places = part.flat_positions()[part.new != part.old]
        found[SCHEMA.tensors[part.tensor].name] += places.tolist()
    return found


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_changes_far_inside_large_tensors_travel(encoding: str) -> None:
    part, gains = patch_of(encoding, buckets_around_corners())
    before, after = state_of(OLD_PLACES), state_of(NEW_PLACES)
    assert np.array_equal(before.plus(gains).lanes, after.lanes)
    assert read_header(part).schema == SCHEMA
    update, found = decode_parts([part], OLD, before)
    assert np.array_equal(found.lanes, after.lanes)
    differing = {
        name: [at for at in sorted(new) if new[at] != OLD_PLACES[name][at]]
        for name, new in NEW_PLACES.items()
    }
    assert changed_positions(update) == differing
    assert np.array_equal(before.updated(update, OLD).lanes, after.lanes)
    again = UpdateSet.from_bytes(update.to_bytes(SCHEMA), SCHEMA)
    assert changed_positions(again) == differing
    for each in (update, again):
        check_words(PatchedReader(OLD, each), NEW_PLACES)


@pytest.fixture
def sparse(tmp_path: Path) -> HostWeights:
    """The old weights in files with holes; their words can be written."""
    arrays = []
    for spec in SCHEMA.tensors:
        path = tmp_path / spec.name
        with path.open("wb") as file:
            file.truncate(spec.num_bytes)
        words = np.memmap(path, WORD_DTYPES[spec.word_bytes], "r+", shape=(spec.num_words,))
        for at, value in OLD_PLACES[spec.name].items():
            words[at] = value
        arrays.append(words)
    return HostWeights(SCHEMA, arrays)


def test_updates_of_large_tensors_are_written_and_taken_back(sparse: HostWeights) -> None:
    before = state_of(OLD_PLACES)
    parts = {name: patch_of(name, buckets_around_corners())[0] for name in ENCODINGS}
    updates = [decode_parts([part], sparse, before)[0] for part in parts.values()]
    for update in [*updates, UpdateSet.compose(updates)]:
        update.apply(sparse)
        check_words(sparse, NEW_PLACES)
        update.undo(sparse)
        check_words(sparse, OLD_PLACES)


def test_many_changes_of_a_large_tensor_are_written(sparse: HostWeights) -> None:
    """So many that the compiled loop writes them."""
    tensor = SCHEMA.index["U8"]
    blocks = [np.arange(at // AROUND * AROUND, at + 1) for at in corners(SIZES["U8"])]
    positions = np.unique(np.concatenate(blocks))
    assert positions.size > 8 * AROUND
    new = (positions % 255 + 1).astype(np.uint8)
    old = sparse.words_at(tensor)[positions]
    update = UpdateSet([TensorUpdate(tensor=tensor, positions=positions, new=new, old=old)])
    UpdateSet.from_bytes(update.to_bytes(SCHEMA), SCHEMA).apply(sparse)
    assert np.array_equal(sparse.words_at(tensor)[positions], new)
    update.undo(sparse)
    assert np.array_equal(sparse.words_at(tensor)[positions], old)
    check_words(sparse, OLD_PLACES)


@pytest.mark.parametrize("encoding", ["gaps", "ranks"])
def test_the_largest_bucket_holds_changes_at_both_ends(encoding: str) -> None:
    """2^28 elements, the first and last of which change."""
    tensor, end = SCHEMA.index["U8"], (1 << 32) + (1 << 31)
    slices = Slice(tensor, 0, 8), Slice(tensor, end - MAX_BUCKET_ELEMENTS + 8, end)
    bucket = Bucket("U8", slices)
    changes = find_changes(bucket, OLD, NEW)
    assert changes.positions[[0, -1]].tolist() == [0, MAX_BUCKET_ELEMENTS - 1]
    payload = ENCODINGS[encoding].encode(changes)
    old = OldWords(bucket=bucket, weights=OLD)
    decoded = ENCODINGS[encoding].decode(
        memoryview(payload), num_changed=changes.num_changed, old=old, what="here"
    )
    assert np.array_equal(bucket_positions(decoded, bucket), changes.positions)
    assert np.array_equal(decoded.old, changes.old)
    assert np.array_equal(decoded.new, changes.new)


class Blank(Made):
    """The same, faster: what it reads where nothing is are views of the same zeros."""

    def __init__(self, schema: Schema, places: Mapping[str, Mapping[int, int]]) -> None:
        super().__init__(schema, places)
        self._zeros = np.zeros(1 << 24, np.uint8)

    def read(self, name: str, start: int, stop: int) -> Words:
        lo, hi = np.searchsorted(self._places[name][0], (start, stop))
        if lo == hi and stop - start <= self._zeros.size:
            return self._zeros[: stop - start]
        return super().read(name, start, stop)


def test_a_whole_tensor_of_more_than_2_to_the_32_elements_is_encoded() -> None:
    """Everything is compared and digested once, from the cache."""
    size = (1 << 32) + AROUND + 5
    schema = Schema.of([TensorSpec.of("U8", "U8", (size,))])
    places = [
        {at: word for at, word in given["U8"].items() if at < size - 2} | {size - 1: last}
        for last, given in enumerate((OLD_PLACES, NEW_PLACES))
    ]
    old, new = (Blank(schema, {"U8": words}) for words in places)
    encoder = PatchEncoder(old, new, encoding="ranks", max_bucket_elements=1 << 24)
    parts = list(encoder.parts())
    gain = np.subtract(*(np.array(lanes_of(words, 1), np.uint64) for words in places[::-1]))
    assert np.array_equal(encoder.after.lanes - encoder.before.lanes, [gain])
    update, after = decode_parts(parts, old, encoder.before)
    assert np.array_equal(after.lanes, encoder.after.lanes)
    found = np.concatenate([part.flat_positions() for part in update.updates]).tolist()
    assert found == [at for at in sorted(places[1]) if places[0].get(at, 0) != places[1][at]]
    assert found[-1] == size - 1
