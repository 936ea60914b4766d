"""Views: which dtypes change, and that rounding gives torch's bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.errors import UnsupportedDtypeError, UsageError
from stitch.tensors import HostWeights, Words, read_all
from stitch.tensors.casts import round_to_bf16
from stitch.types import DTYPE_BITS, Schema, TensorSpec
from stitch.views import ViewReader, view_schema

TORCH = {"F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
INTEGERS = {"F16": (np.uint16, torch.int16), "F32": (np.uint32, torch.int32)} | {
    "F64": (np.uint64, torch.int64)
}


def torch_rounding(words: Words, dtype: str) -> Words:
    values = torch.from_numpy(words.view(f"i{words.itemsize}")).view(TORCH[dtype])
    return values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def check_against_torch(words: Words, dtype: str) -> None:
    got, expected = round_to_bf16(words, dtype), torch_rounding(words, dtype)
    nan = np.isnan(words.view(f"f{words.itemsize}"))
    assert (got[~nan] == expected[~nan]).all()
    assert ((got[nan] & 0x7FFF) > 0x7F80).all()


def test_every_f16_rounds_as_in_torch() -> None:
    check_against_torch(np.arange(65536, dtype=np.uint16), "F16")


def test_f32_around_every_bf16_rounds_as_in_torch() -> None:
    upper = np.arange(65536, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        check_against_torch(upper | np.uint32(lower), "F32")


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(TORCH)), st.lists(st.integers(0, 2**64 - 1), min_size=1))
def test_random_bits_round_as_in_torch(dtype: str, patterns: list[int]) -> None:
    unsigned = INTEGERS[dtype][0]
    words = np.array(patterns, np.uint64)
    check_against_torch((words >> np.uint64(64 - DTYPE_BITS[dtype])).astype(unsigned), dtype)


def test_f64_near_ties_and_the_edges_of_the_range_round_as_in_torch() -> None:
    ties = np.float64(1) + np.arange(64) / 256
    near = np.concatenate([ties, np.nextafter(ties, 2), np.nextafter(ties, 0), -ties])
    edges = np.array([1e300, -1e300, 3.3895e38, 3.4e38, 1e-45, 1e-310, 0.0, -0.0, np.inf, -np.inf])
    check_against_torch(np.concatenate([near, edges]).view(np.uint64), "F64")


def test_long_arrays_round_block_by_block_into_a_given_array() -> None:
    words = np.random.default_rng(0).integers(0, 2**32, 100_001, np.uint32)
    out = np.zeros(words.size, np.uint16)
    assert round_to_bf16(words, "F32", out) is out
    check_against_torch(words, "F32")
    assert (out == round_to_bf16(words, "F32")).all()


def test_other_dtypes_do_not_round() -> None:
    with pytest.raises(UnsupportedDtypeError, match="I32"):
        round_to_bf16(np.zeros(1, np.uint32), "I32")


EVERY = Schema.of(
    [TensorSpec.of(dtype, dtype, [4, 8]) for dtype in DTYPE_BITS]
    + [TensorSpec("opaque", "MYSTERY", (3,), 5)]
)


def test_bf16_changes_wide_floats_only_and_checkpoint_nothing() -> None:
    assert view_schema(EVERY, "checkpoint") == EVERY
    served = view_schema(EVERY, "bf16")
    assert list(served.index) == list(EVERY.index)
    for spec, base in zip(served.tensors, EVERY.tensors, strict=True):
        if base.dtype in TORCH:
            assert (spec.dtype, spec.shape, spec.num_bytes) == ("BF16", (4, 8), 64)
        else:
            assert spec == base


def test_an_unknown_view_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown view 'fp8'"):
        view_schema(EVERY, "fp8")


@pytest.mark.parametrize("view", ["bf16", "checkpoint"])
def test_a_view_reads_any_span_as_the_whole_says(view: str) -> None:
    weights = HostWeights.allocate(EVERY)
    random = np.random.default_rng(0)
    for index in range(len(EVERY)):
        words = weights.words_at(index)
        words.view(np.uint8)[:] = random.integers(0, 256, words.nbytes, np.uint8)
    reader = ViewReader(weights, view)
    for spec in reader.schema.tensors:
        whole = read_all(reader, spec.name)
        assert whole.nbytes == spec.num_bytes
        assert (reader.read(spec.name, 2, 5) == whole[2:5]).all()
        assert reader.read(spec.name, 2, 2).size == 0
        if spec == EVERY[spec.name]:
            assert whole.tobytes() == weights.words(spec.name).tobytes()


def test_scalars_and_empty_tensors_have_views() -> None:
    schema = Schema.of([TensorSpec.of("e", "F32", [0, 2]), TensorSpec.of("s", "F32", [])])
    weights = HostWeights(schema, [np.zeros(0, np.uint32), np.array([0x3F808000], np.uint32)])
    reader = ViewReader(weights, "bf16")
    assert read_all(reader, "s").tolist() == [0x3F80]
    assert reader.schema["e"].shape == (0, 2)
    assert read_all(reader, "e").size == 0
