"""Update sets: applying, undoing, composing, and their bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from codec_cases import (
    Slow,
    changed,
    from_words,
    mixed_schema,
    random_weights,
    same_bits,
    schema_of,
)
from hypothesis import given
from hypothesis import strategies as st

from stitch.codec import PatchedReader, TensorUpdate, UpdateSet, diff_update
from stitch.errors import CorruptPatchError, SchemaMismatchError, UnsupportedFormatError, UsageError
from stitch.tensors import HostWeights

SCHEMA = schema_of(a=("BF16", (64,)), b=("U8", (40,)), c=("F32", (9,)))


def sparse(tensor: int, positions: list[int], old: list[int], new: list[int]) -> TensorUpdate:
    dtype = (np.uint16, np.uint8, np.uint32)[tensor]
    return TensorUpdate(
        tensor=tensor,
        positions=np.array(positions, np.int64),
        old=np.array(old, dtype),
        new=np.array(new, dtype),
    )


def check_form(update_set: UpdateSet) -> None:
    """Ordered, not empty, not overlapping, ascending."""
    for update in update_set.updates:
        assert update.new.size > 0
        if update.positions is not None:
            assert (np.diff(update.positions) > 0).all()
    for a, b in zip(update_set.updates, update_set.updates[1:], strict=False):
        assert (a.tensor, a.last) < (b.tensor, b.first)


@pytest.mark.parametrize("density", [0.0, 0.05, 0.6, 1.0])
def test_a_difference_applies_and_undoes(density: float) -> None:
    old = random_weights(mixed_schema(), 1)
    new = changed(old, density, 2)
    for update in (diff_update(old, new), diff_update(Slow(old), Slow(new), threads=1)):
        check_form(update)
        copy = HostWeights.load(old)
        update.apply(copy)
        assert same_bits(copy, new)
        update.undo(copy)
        assert same_bits(copy, old)


def test_nearly_whole_tensors_are_held_without_positions() -> None:
    old = random_weights(schema_of(a=("BF16", (1000,))), 1)
    (update,) = diff_update(old, changed(old, 1.0, 2)).updates
    assert update.positions is None
    (update,) = diff_update(old, changed(old, 0.01, 2)).updates
    assert update.positions is not None


def test_a_patched_reader_overlays_any_span() -> None:
    old = random_weights(mixed_schema(), 1)
    for density in (0.0, 0.02, 1.0):
        new = changed(old, density, 2)
        reader = PatchedReader(Slow(old), diff_update(old, new))
        for spec in old.schema.tensors:
            for start, stop in ((0, spec.num_words), (spec.num_words // 3, spec.num_words // 2)):
                got = reader.read(spec.name, start, stop)
                assert np.array_equal(got, new.read(spec.name, start, stop))


def test_updates_that_do_not_fit_are_refused() -> None:
    weights = HostWeights.allocate(SCHEMA)
    for update in (
        sparse(0, [64], [0], [1]),
        sparse(0, [-1, 3], [0, 0], [1, 1]),
        TensorUpdate(
            tensor=0, positions=None, start=60, new=np.ones(5, np.uint16), old=np.ones(5, np.uint16)
        ),
        TensorUpdate(
            tensor=1, positions=np.array([0]), new=np.ones(1, np.uint16), old=np.ones(1, np.uint16)
        ),
    ):
        with pytest.raises(UsageError, match="update of tensor"):
            UpdateSet([update]).apply(weights)
    with pytest.raises(UsageError, match="differ in number"):
        sparse(0, [1, 2], [0], [1])


def test_composition_keeps_first_old_and_last_new_and_drops_what_came_back() -> None:
    first = UpdateSet([sparse(0, [1, 5, 9], [10, 50, 90], [11, 51, 91])])
    second = UpdateSet([sparse(0, [2, 5, 9], [20, 51, 91], [22, 52, 90]), sparse(2, [0], [0], [1])])
    composed = UpdateSet.compose([first, second])
    check_form(composed)
    a, c = composed.updates
    assert a.positions is not None
    assert a.positions.tolist() == [1, 2, 5]
    assert a.old.tolist() == [10, 20, 50]
    assert a.new.tolist() == [11, 22, 52]
    assert (c.tensor, composed.num_changed) == (2, 4)


def test_composing_nothing_gives_nothing() -> None:
    assert UpdateSet.compose([]).updates == []
    assert UpdateSet.compose([UpdateSet([]), UpdateSet([])]).updates == []


def test_a_change_and_its_reverse_compose_to_nothing() -> None:
    old = random_weights(mixed_schema(), 1)
    for density in (0.05, 1.0):
        new = changed(old, density, 2)
        round_trip = UpdateSet.compose([diff_update(old, new), diff_update(new, old)])
        assert round_trip.updates == []


ranges = st.tuples(st.integers(0, 63), st.integers(1, 40))
places = st.lists(st.integers(0, 63), min_size=1, max_size=20, unique=True)


@given(st.lists(st.lists(st.one_of(ranges, places), min_size=1, max_size=3), max_size=5))
def test_composition_equals_applying_one_after_another(plan: list[list[Any]]) -> None:
    """Ranges and positions, overlapping across sets, against the difference of the ends."""
    weights = from_words({"a": ("BF16", np.zeros(64, np.uint16))})
    base = HostWeights.load(weights)
    words = weights.words_at(0)
    sets, value = [], 0
    for step in plan:
        taken = np.zeros(64, bool)
        updates = []
        for item in step:
            if isinstance(item, tuple):
                chosen = np.arange(item[0], min(64, item[0] + item[1]))
            else:
                chosen = np.array(sorted(item))
            span = slice(chosen[0], chosen[-1] + 1)
            if taken[span].any():
                continue
            taken[span] = True
            value += 1
            new = (np.arange(chosen.size) + value) % 3
            updates.append(
                TensorUpdate(
                    tensor=0,
                    positions=None if isinstance(item, tuple) else chosen,
                    start=int(chosen[0]) if isinstance(item, tuple) else 0,
                    new=new.astype(np.uint16),
                    old=words[chosen].copy(),
                )
            )
            words[chosen] = new
        sets.append(UpdateSet(sorted(updates, key=lambda update: update.first)))
    composed = UpdateSet.compose(sets)
    check_form(composed)
    copy = HostWeights.load(base)
    composed.apply(copy)
    assert same_bits(copy, weights)
    composed.undo(copy)
    assert same_bits(copy, base)
    expected = diff_update(base, weights)
    if len(sets) != 1:
        assert composed.num_changed == expected.num_changed
    again = UpdateSet.from_bytes(composed.to_bytes(weights.schema), weights.schema)
    again.apply(copy)
    assert same_bits(copy, weights)


@pytest.mark.parametrize("density", [0.0, 0.05, 1.0])
def test_update_sets_survive_as_bytes(density: float) -> None:
    old = random_weights(mixed_schema(), 1)
    new = changed(old, density, 2)
    update = diff_update(old, new)
    data = update.to_bytes(old.schema)
    for form in (data, memoryview(data), bytearray(data)):
        again = UpdateSet.from_bytes(form, old.schema)
        assert again.num_bytes == update.num_bytes
        assert again.num_changed == update.num_changed
        copy = HostWeights.load(old)
        again.apply(copy)
        assert same_bits(copy, new)
        again.undo(copy)
        assert same_bits(copy, old)


def test_the_bytes_are_a_safetensors_file() -> None:
    update = UpdateSet([sparse(0, [1, 5], [10, 50], [11, 51]), sparse(1, [3], [1], [2])])
    arrays = safetensors.numpy.load(update.to_bytes(SCHEMA))
    assert arrays["0.positions"].tolist() == [1, 5]
    assert arrays["0.new"].dtype == np.uint16
    assert arrays["1.old"].tolist() == [1]
    assert len(arrays) == 6


def test_updates_are_views_of_the_bytes() -> None:
    data = UpdateSet([sparse(0, [1, 5], [10, 50], [11, 51])]).to_bytes(SCHEMA)
    (update,) = UpdateSet.from_bytes(data, SCHEMA).updates
    assert update.positions is not None
    for array in (update.positions, update.new, update.old):
        assert np.shares_memory(array, np.frombuffer(data, np.uint8))
        assert not array.flags.writeable


def repacked(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def put(key: str, field: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        header[key][field] = value

    return change


SAMPLE = UpdateSet(
    [
        sparse(0, [1, 5], [10, 50], [11, 51]),
        TensorUpdate(
            tensor=1, positions=None, start=3, new=np.ones(4, np.uint8), old=np.zeros(4, np.uint8)
        ),
    ]
).to_bytes(SCHEMA)

META = "__metadata__"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("0.positions", "shape", [3]), "numbers at"),
        (put("0.positions", "shape", [2, 1]), "unexpected dtype, shape"),
        (put("0.positions", "shape", [-2]), "length"),
        (put("0.positions", "dtype", "U64"), "positions are U64"),
        (put("0.positions", "dtype", "F64"), "unexpected dtype"),
        (put("0.positions", "data_offsets", [0, 1 << 40]), "numbers at"),
        (put("0.new", "dtype", "I64"), "numbers at"),
        (put("0.new", "data_offsets", [0, 4]), "expected to begin at 16"),
        (put("0.new", "more", 1), "has keys"),
        (lambda h: h.pop("1.old"), "bytes after its arrays"),
        (lambda h: h.pop("0.positions"), "expected to begin at 0"),
        (lambda h: h.pop(META), "must be an object"),
        (put(META, "updates", "[[0,0],[2,3]]"), "expected U32"),
        (put(META, "updates", "[[0,1],[1,3]]"), "start is 1"),
        (put(META, "updates", "[[0,0],[1,37]]"), "outside the tensor"),
        (put(META, "updates", "[[0,0],[1,41]]"), "start"),
        (put(META, "updates", "[[0,0],[3,0]]"), "tensor must be an integer in 0..2"),
        (put(META, "updates", "[[0,0]]"), "unknown arrays"),
        (put(META, "updates", "[[0,0],[1,3],[2,0]]"), "is missing"),
        (put(META, "updates", "[[0,0],[1]]"), "must be pairs"),
        (put(META, "updates", "[[0,0],7]"), "must be a list"),
        (put(META, "updates", "nonsense"), "not the expected JSON"),
        (put(META, "updates", "é"), "not the expected JSON"),
        (put(META, "updates", [[0, 0], [1, 3]]), "must be a string"),
    ],
)
def test_inconsistent_update_sets_are_refused(
    change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(CorruptPatchError, match=message):
        UpdateSet.from_bytes(repacked(SAMPLE, change), SCHEMA)


@pytest.mark.parametrize("positions", [[5, 1], [5, 5], [-1, 5], [5, 64]])
def test_positions_that_do_not_ascend_inside_the_tensor_are_refused(positions: list[int]) -> None:
    data = UpdateSet([sparse(0, positions, [1, 2], [3, 4])]).to_bytes(SCHEMA)
    with pytest.raises(CorruptPatchError, match="do not ascend inside the tensor"):
        UpdateSet.from_bytes(data, SCHEMA)


def test_updates_out_of_order_or_overlapping_are_refused() -> None:
    one, two = sparse(0, [1, 5], [1, 2], [3, 4]), sparse(0, [3], [1], [2])
    for updates in ([one, two], [two, one], [sparse(1, [0], [0], [1]), one]):
        with pytest.raises(CorruptPatchError, match="out of order or overlap"):
            UpdateSet.from_bytes(UpdateSet(updates).to_bytes(SCHEMA), SCHEMA)


def test_empty_updates_are_refused() -> None:
    data = UpdateSet([sparse(0, [], [], [])]).to_bytes(SCHEMA)
    with pytest.raises(CorruptPatchError, match="0 new and 0 old"):
        UpdateSet.from_bytes(data, SCHEMA)


def test_other_schemas_and_later_formats_are_told_apart() -> None:
    with pytest.raises(SchemaMismatchError, match="is for schema"):
        UpdateSet.from_bytes(SAMPLE, schema_of(a=("BF16", (64,))))
    later = repacked(SAMPLE, put(META, "format", "stitch-update-2"))
    with pytest.raises(UnsupportedFormatError, match="stitch-update-2"):
        UpdateSet.from_bytes(later, SCHEMA)


@given(st.integers(0, len(SAMPLE) - 1))
def test_truncated_update_sets_are_refused(keep: int) -> None:
    with pytest.raises(CorruptPatchError):
        UpdateSet.from_bytes(SAMPLE[:keep], SCHEMA)


@given(st.binary(max_size=100))
def test_noise_is_no_update_set(noise: bytes) -> None:
    for data in (noise, struct.pack("<Q", len(noise)) + noise, SAMPLE + noise + b"\0"):
        with pytest.raises(CorruptPatchError):
            UpdateSet.from_bytes(data, SCHEMA)


@given(st.integers(0, 8 * len(SAMPLE) - 1))
def test_a_flipped_bit_never_leads_outside_the_tensors(bit: int) -> None:
    altered = bytearray(SAMPLE)
    altered[bit // 8] ^= 1 << (bit % 8)
    try:
        update = UpdateSet.from_bytes(bytes(altered), SCHEMA)
    except (CorruptPatchError, SchemaMismatchError, UnsupportedFormatError):
        return
    update.apply(HostWeights.allocate(SCHEMA))
