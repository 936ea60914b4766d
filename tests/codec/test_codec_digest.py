"""Digests: equal to the reference, in O(changed) for updates, and sensitive to what matters."""

from __future__ import annotations

import numpy as np
import pytest
from codec_cases import Slow, changed, from_words, mixed_schema, random_weights, schema_of

from stitch.codec import DigestState, TensorUpdate, UpdateSet, diff_update, digest, reference
from stitch.errors import SchemaMismatchError
from stitch.tensors import HostWeights
from stitch.types import Schema, TensorSpec


def tensor_bytes(weights: HostWeights) -> list[bytes]:
    return [weights.words_at(i).tobytes() for i in range(len(weights.schema))]


@pytest.mark.parametrize("chunk_bytes", [64, 1 << 24])
@pytest.mark.parametrize("threads", [1, 2])
def test_digests_equal_the_reference(
    chunk_bytes: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "CHUNK_BYTES", chunk_bytes)
    weights = random_weights(mixed_schema(), 1)
    seen: list[tuple[int, int]] = []
    state = DigestState.of(weights, lambda done, total: seen.append((done, total)), threads)
    contents = tensor_bytes(weights)
    for index, content in enumerate(contents):
        assert tuple(state.lanes[index].tolist()) == reference.lanes(content)
        assert state.tensor_digest(index) == "{:016x}{:016x}".format(*reference.lanes(content))
    assert state.version_digest() == reference.version_digest(weights.schema.tensors, contents)
    assert seen[-1] == (weights.schema.num_bytes, weights.schema.num_bytes)


def test_empty_tensors_have_the_zero_digest_and_a_schema_without_tensors_has_one() -> None:
    weights = HostWeights.allocate(schema_of(a=("F32", (0,))))
    assert DigestState.of(weights).tensor_digest(0) == "0" * 32
    nothing = DigestState.of(HostWeights.allocate(Schema(())))
    assert nothing.version_digest() == reference.version_digest([], [])


@pytest.mark.parametrize("density", [0.0, 0.003, 0.2, 1.0])
def test_an_update_leads_to_the_digest_of_the_new_weights(density: float) -> None:
    old = random_weights(mixed_schema(), 1)
    new = changed(old, density, 2)
    update = diff_update(old, new)
    for reader in (old, Slow(old)):
        after = DigestState.of(old).updated(update, reader)
        assert after.version_digest() == DigestState.of(new).version_digest()


@pytest.mark.parametrize(("start", "count"), [(0, 100), (8, 88), (3, 50), (1, 99), (96, 4)])
def test_whole_range_updates_may_begin_and_end_anywhere(start: int, count: int) -> None:
    weights = random_weights(schema_of(a=("BF16", (100,))), 1)
    old = weights.words_at(0)[start : start + count].copy()
    update = UpdateSet([TensorUpdate(tensor=0, positions=None, start=start, new=~old, old=old)])
    after = DigestState.of(weights).updated(update, weights)
    update.apply(weights)
    assert after.version_digest() == DigestState.of(weights).version_digest()


def test_an_update_reads_only_around_its_changes() -> None:
    weights = random_weights(schema_of(a=("BF16", (1000,)), b=("BF16", (1000,))), 1)
    reader = Slow(weights)
    one = np.ones(2, np.uint16)
    update = TensorUpdate(tensor=1, positions=np.array([50, 71]), new=one, old=one)
    DigestState.of(weights).updated(UpdateSet([update]), reader)
    assert reader.reads == [("b", 48, 72)]


def test_shards_cut_on_eight_byte_words_add_up() -> None:
    words = np.arange(1000, dtype=np.uint16)
    whole = from_words({"a": ("BF16", words)})
    cut = 400
    parts = [
        digest.kernels.sum_words(words[:cut], 0),
        digest.kernels.sum_words(words[cut:], cut * 2 // 8),
    ]
    assert np.array_equal(DigestState.of(whole).lanes[0], parts[0] + parts[1])


def test_name_dtype_shape_and_content_all_count() -> None:
    words = np.arange(24, dtype=np.uint16)

    def digest_with(spec: TensorSpec, content: np.ndarray = words) -> str:
        return DigestState.of(HostWeights(Schema((spec,)), [content.copy()])).version_digest()

    base = TensorSpec.of("a", "BF16", (4, 6))
    others = [
        digest_with(TensorSpec.of("b", "BF16", (4, 6))),
        digest_with(TensorSpec.of("a", "F16", (4, 6))),
        digest_with(TensorSpec.of("a", "BF16", (6, 4))),
        digest_with(base, words ^ np.uint16(1)),
        digest_with(base, words[::-1]),
    ]
    assert len({digest_with(base), *others}) == 6


def test_minus_zero_and_nan_payloads_count() -> None:
    patterns = np.array([0x0000, 0x8000, 0x7FC0, 0x7FC1, 0xFFC0], np.uint16)
    digests = {
        DigestState.of(from_words({"a": ("BF16", patterns[i : i + 1])})).version_digest()
        for i in range(patterns.size)
    }
    assert len(digests) == patterns.size


def test_digest_states_are_not_mixed_up_between_schemas() -> None:
    a = random_weights(schema_of(a=("BF16", (8,))), 1)
    b = random_weights(schema_of(b=("BF16", (8,))), 1)
    with pytest.raises(SchemaMismatchError):
        DigestState.of(a).updated(UpdateSet([]), b)
    with pytest.raises(ValueError, match="lanes must be"):
        DigestState(a.schema, np.zeros((2, 2), np.uint64))


def test_a_copy_is_independent() -> None:
    state = DigestState.of(random_weights(mixed_schema(), 1))
    twin = state.copy()
    twin.lanes[0] += np.uint64(1)
    assert twin.version_digest() != state.version_digest()
