"""Buckets decoded and written together: the same as one by one, and the guilty one is named."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from unittest import mock

import numpy as np
import pytest
from codec_cases import Slow, changed, random_weights, same_bits, schema_of
from patch_damage import joined, split

from stitch.codec import (
    DigestState,
    PatchEncoder,
    TensorUpdate,
    UpdateSet,
    decode_parts,
    encode,
    pairs,
)
from stitch.codec.reference_pairs import write_paired
from stitch.codec.update import JointUpdate
from stitch.errors import CorruptPatchError, UsageError
from stitch.tensors import HostWeights

SCHEMA = schema_of(
    a=("BF16", (70, 100)),
    b=("F16", (3000,)),
    c=("BF16", (11,)),
    d=("BF16", (4000,)),
    e=("I8", (2000,)),
    f=("F8_E4M3", (5000,)),
)


def patch(old: HostWeights, new: HostWeights) -> list[bytes]:
    """One part with a payload for each bucket of 1024 elements, paired where that can be."""
    encoder = PatchEncoder(
        old, new, encoding="gaps", threads=1, max_part_bytes=None, max_bucket_elements=1024
    )
    apart = mock.patch.object(encode, "MOST_SHARING", 0)
    with apart, mock.patch.multiple(pairs, _FEW=1, _DENSE=1):
        return list(encoder.parts())


def weights_and_patch() -> tuple[HostWeights, HostWeights, list[bytes], DigestState]:
    """Steps of one, so that few kinds of pairs occur."""
    old = random_weights(SCHEMA, 1)
    new = HostWeights.load(old)
    rng = np.random.default_rng(2)
    for index in range(len(SCHEMA)):
        words = new.words_at(index)
        words[rng.random(words.size) < 0.1] ^= words.dtype.type(1)
    return old, new, patch(old, new), DigestState.of(old, threads=1)


def rows(update: UpdateSet) -> list[tuple[int, int, list[int], list[int], list[int]]]:
    return [
        (it.tensor, it.start, it.flat_positions().tolist(), it.old.tolist(), it.new.tolist())
        for it in update.updates
    ]


@pytest.mark.parametrize("threads", [1, 2, 5, None])
def test_weights_in_memory_and_others_get_the_same_update(threads: int | None) -> None:
    old, new, parts, before = weights_and_patch()
    forms = [payload[0] for payload in split(parts[0])[1]]
    assert forms.count(4) > 10
    assert len(set(forms)) > 1
    alone, after_alone = decode_parts(parts, Slow(old), before, threads=1)
    with mock.patch("stitch.codec.decode._LITTLE_WORK", 100):
        together, after = decode_parts(parts, old, before, threads=threads)
    assert after.version_digest() == after_alone.version_digest()
    assert together.num_bytes == alone.num_bytes
    assert together.num_changed == alone.num_changed
    assert "updates" not in together.__dict__, "nobody has asked for single updates yet"
    held = HostWeights.load(old)
    with mock.patch("stitch.codec.update._BATCH", 97):
        together.apply(held, threads=threads)
        assert same_bits(held, new)
        together.undo(held, threads=threads)
    assert same_bits(held, old)
    assert rows(together) == rows(alone)
    assert together.to_bytes(SCHEMA) == alone.to_bytes(SCHEMA)
    twice = UpdateSet.compose([together, UpdateSet([])])
    assert rows(twice) == rows(UpdateSet.compose([alone, UpdateSet([])]))
    copy.deepcopy(together).apply(held)
    assert same_bits(held, new)
    again = copy.deepcopy(together)
    assert "updates" not in again.__dict__, "copies would hold everything twice"
    assert rows(again) == rows(alone)


def damaged(
    parts: Sequence[bytes], number: int, damage: Callable[[bytes, int, int], bytes]
) -> bytes:
    header, payloads = split(parts[0])
    entry = header.buckets[number]
    payloads[number] = damage(payloads[number], entry.num_changed, entry.bucket.num_elements)
    return joined(header, header.buckets, payloads)


def paired(gaps: list[int], steps: list[int]) -> bytes:
    body = write_paired(gaps, steps, 1, 0)
    return b"\x04" + len(body).to_bytes(4, "little") + body


DAMAGE: dict[str, tuple[Callable[[bytes, int, int], bytes], str]] = {
    "outside": (
        lambda payload, count, size: paired([0] * (count - 1) + [size - count + 1], [1] * count),
        "is outside the bucket of",
    ),
    "zero": (
        lambda payload, count, size: paired([0] * count, [256] * count),
        "a step is zero or too wide for its word",
    ),
    "more": (lambda payload, count, size: payload + b"\0", "1 bytes after the changes"),
    "fewer": (
        lambda payload, count, size: paired([0] * (count + 99), [1] * (count + 99)),
        "does not hold",
    ),
    "head": (lambda payload, count, size: b"\x04\x05\0\0\0" + bytes(5), "5 bytes are too few"),
    "shift": (
        lambda payload, count, size: payload[:5] + b"\x10" + payload[6:],
        "cannot be",
    ),
    "widths": (
        lambda payload, count, size: payload[:30] + b"\x7f" * 8 + payload[38:],
        "do not sum to",
    ),
    "states": (
        lambda payload, count, size: payload[:10] + bytes(16) + payload[26:],
        "do not fit its length",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_bucket_that_is_wrong_is_named(kind: str) -> None:
    old, _, parts, before = weights_and_patch()
    header, payloads = split(parts[0])
    damage, message = DAMAGE[kind]
    wanted = "F8_E4M3" if kind == "zero" else "BF16"
    numbers = [
        number
        for number, entry in enumerate(header.buckets)
        if entry.bucket.dtype == wanted and payloads[number][0] == 4
    ]
    assert len(numbers) >= 3
    for number in (numbers[0], numbers[1], numbers[-1]):
        part = damaged(parts, number, damage)
        name = rf"patch part 0, bucket {number} \(.*{message}"
        for weights in (old, Slow(old)):
            with pytest.raises(CorruptPatchError, match=name):
                decode_parts([part], weights, before, threads=1)


def joint(tensors: list[int], ends: list[int], positions: list[int]) -> UpdateSet:
    words = np.arange(1, len(positions) + 1).astype(np.uint16)
    return UpdateSet(
        joint=[
            JointUpdate(
                tensors=np.array(tensors),
                ends=np.array(ends),
                positions=np.array(positions, np.int64),
                new=words,
                old=np.zeros_like(words),
            )
        ]
    )


def test_slices_without_changes_are_no_updates() -> None:
    update = joint([3, 0, 2, 0], [0, 2, 2, 3], [5, 6999, 0])
    assert [(it.tensor, it.flat_positions().tolist()) for it in update.updates] == [
        (0, [0]),
        (0, [5, 6999]),
    ]
    weights = HostWeights.allocate(SCHEMA)
    update.apply(weights)
    assert weights.words("a")[[5, 6999, 0]].tolist() == [1, 2, 3]
    assert sum(int(np.count_nonzero(weights.words_at(i))) for i in range(len(SCHEMA))) == 3


@pytest.mark.parametrize(
    ("tensors", "positions", "name"),
    [
        ([0, 2], [3, 11], "update of tensor 2 writes uint16 words 11 to 11; the tensor has 11"),
        ([0, 2], [-1, 3], "update of tensor 0"),
        ([0, 4], [3, 3], "update of tensor 4 writes uint16 words"),
        ([0, 9], [3, 3], "there is no tensor 9"),
    ],
)
def test_an_update_that_does_not_fit_writes_nothing(
    tensors: list[int], positions: list[int], name: str
) -> None:
    weights = HostWeights.allocate(SCHEMA)
    with pytest.raises(UsageError, match=name):
        joint(tensors, [1, 2], positions).apply(weights)
    assert same_bits(weights, HostWeights.allocate(SCHEMA))


def test_read_only_weights_are_refused() -> None:
    words = [np.zeros(spec.num_words, f"u{spec.word_bytes}") for spec in SCHEMA.tensors]
    words[2].flags.writeable = False
    weights = HostWeights(SCHEMA, words)
    with pytest.raises(UsageError, match=r"update of tensor 2 .* and is read-only"):
        joint([0, 2], [1, 2], [3, 3]).apply(weights)
    assert not words[0].any()
    joint([0, 3], [1, 2], [3, 3]).apply(weights)
    assert words[0][3] == 1


def test_positions_out_of_order_never_lead_outside() -> None:
    """Nothing that decodes makes such; who does learns of it, and memory stays whole."""
    weights = HostWeights.allocate(SCHEMA)
    with pytest.raises(ValueError, match="not inside its tensor"):
        joint([0], [3], [3, 7001, 5]).apply(weights)
    assert np.flatnonzero(weights.words("a")).tolist() == [3]
    assert not weights.words("b").any()


def test_single_and_joint_updates_come_in_one_order() -> None:
    single = TensorUpdate(
        tensor=1, positions=None, start=4, new=np.ones(2, np.uint16), old=np.zeros(2, np.uint16)
    )
    both = UpdateSet([single], joint([2, 0], [1, 2], [1, 1])._joint)
    assert [it.tensor for it in both.updates] == [0, 1, 2]
    weights = HostWeights.allocate(SCHEMA)
    both.apply(weights)
    assert [int(weights.words_at(i).sum()) for i in range(3)] == [2, 2, 1]


def test_a_changed_model_of_any_dtype_arrives() -> None:
    old = random_weights(SCHEMA, 3)
    new = changed(old, 0.3, 4)
    before = DigestState.of(old, threads=1)
    update, after = decode_parts(patch(old, new), old, before)
    held = HostWeights.load(old)
    update.apply(held)
    assert same_bits(held, new)
    assert after.version_digest() == DigestState.of(new).version_digest()
