"""Weights in host memory."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest

from stitch.errors import SchemaMismatchError, UsageError
from stitch.tensors import HostWeights, read_all
from stitch.types import Schema, TensorSpec

SCHEMA = Schema.of(
    [
        TensorSpec.of("bools", "BOOL", [5]),
        TensorSpec.of("bf16", "BF16", [3]),
        TensorSpec.of("f64", "F64", [2, 2]),
        TensorSpec.of("empty", "F32", [0, 4]),
        TensorSpec.of("scalar", "I32", []),
    ]
)


def filled() -> HostWeights:
    weights = HostWeights.allocate(SCHEMA)
    for index in range(len(SCHEMA)):
        weights.words_at(index)[:] = index + 1
    return weights


def test_allocated_words_are_zero_aligned_and_of_the_word_dtype() -> None:
    weights = HostWeights.allocate(SCHEMA)
    for spec in SCHEMA.tensors:
        words = weights.words(spec.name)
        assert words.shape == (spec.num_words,)
        assert words.dtype.itemsize == spec.word_bytes
        assert words.ctypes.data % 64 == 0
        assert not words.any()


def test_words_are_the_weights_own_memory() -> None:
    weights = HostWeights.allocate(SCHEMA)
    weights.words("bf16")[1] = 7
    assert weights.words_at(SCHEMA.index["bf16"]).tolist() == [0, 7, 0]
    assert weights.read("bf16", 1, 3).tolist() == [7, 0]


def test_a_read_view_cannot_be_written() -> None:
    view = filled().read("bf16", 0, 3)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_load_copies_and_reports_progress() -> None:
    source = filled()
    reports: list[tuple[int, int]] = []
    copy = HostWeights.load(source, progress=lambda done, total: reports.append((done, total)))
    source.words("f64")[:] = 0
    assert read_all(copy, "f64").tolist() == [SCHEMA.index["f64"] + 1] * 4
    assert reports[-1] == (SCHEMA.num_bytes, SCHEMA.num_bytes)
    assert reports == sorted(reports)


def test_filling_from_another_schema_is_refused() -> None:
    other = HostWeights.allocate(Schema.of([TensorSpec.of("bf16", "BF16", [3])]))
    with pytest.raises(SchemaMismatchError, match="same schema"):
        filled().fill(other)


def test_unknown_tensors_and_spans_outside_are_refused() -> None:
    weights = filled()
    with pytest.raises(SchemaMismatchError, match="'nope'"):
        weights.words("nope")
    for index in (-1, len(SCHEMA)):
        with pytest.raises(UsageError, match="there is no tensor"):
            weights.words_at(index)
    with pytest.raises(UsageError, match="has 3 words"):
        weights.read("bf16", 0, 4)


@pytest.mark.parametrize(
    "words",
    [[], [np.zeros(3, np.uint16)], [np.zeros(2, np.uint32)], [np.zeros(4, np.uint32)[::2]]],
)
def test_arrays_that_do_not_fit_the_schema_are_refused(words: list[np.ndarray]) -> None:
    schema = Schema.of([TensorSpec.of("t", "F32", [3])])
    with pytest.raises(SchemaMismatchError):
        HostWeights(schema, words)


def test_a_stamp_is_forgotten_when_others_may_write() -> None:
    def stamped() -> HostWeights:
        weights = filled()
        weights.stamp = "mine"
        return weights

    weights = stamped()
    weights.read("bf16", 0, 3)
    assert weights.stamp == "mine"
    for touch in (
        lambda w: w.words("bf16"),
        lambda w: w.words_at(0),
        lambda w: w.fill(filled()),
    ):
        weights = stamped()
        touch(weights)
        assert weights.stamp is None


def pickled(weights: HostWeights) -> HostWeights:
    made: HostWeights = pickle.loads(pickle.dumps(weights))  # noqa: S301 - our own bytes
    return made


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickled])
def test_extents_are_where_the_words_are_in_copies_too(
    duplicate: Callable[[HostWeights], HostWeights],
) -> None:
    for weights in (filled(), duplicate(filled())):
        for index, spec in enumerate(SCHEMA.tensors):
            words = weights.words_at(index)
            assert weights.extents[index].tolist() == [words.ctypes.data, spec.num_words]
            assert (words == index + 1).all()
