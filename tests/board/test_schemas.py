"""Stored schemas: round trips, and strict parsing of rows from the board."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch.board.schemas import parse_schema
from stitch.errors import CorruptRecordError, StitchError
from stitch.types import DTYPE_BITS, Schema, TensorSpec

GOOD = ["a.weight", "BF16", [2, 3], 12]


@pytest.mark.parametrize("dtype", [*DTYPE_BITS, "X_NEW7"])
def test_every_dtype_comes_back(dtype: str) -> None:
    bits = DTYPE_BITS.get(dtype, 8)
    specs = [TensorSpec(f"t{n}", dtype, (n, 4, 2), n * bits) for n in range(3)]
    specs.append(TensorSpec("scalar", "F64", (), 8))
    schema = Schema.of(specs)
    assert parse_schema(schema.to_json_bytes(), "k") == schema


@pytest.mark.parametrize(
    "row",
    [
        [], GOOD[:3], [*GOOD, 1], {}, None, "x",
        ["", "BF16", [2, 3], 12], ["a" * 1001, "BF16", [2, 3], 12], [7, "BF16", [2, 3], 12],
        ["a", "", [2, 3], 12], ["a", None, [2, 3], 12],
        ["a", "BF16", 6, 12], ["a", "BF16", [-2, -3], 12], ["a", "BF16", [2.0, 3], 12],
        ["a", "BF16", [True, 6], 12], ["a", "BF16", [2**61], 2**62], ["a", "BF16", [2**40] * 2, 12],
        ["a", "BF16", [1] * 65, 2], ["a", "BF16", [2, 3], 13], ["a", "BF16", [2, 3], True],
        ["a", "F4", [3], 1], ["a", "X_NEW7", [3], -1], ["a", "X_NEW7", [3], 2**61],
    ],
    ids=repr,
)  # fmt: skip
def test_a_row_that_cannot_be_true_is_refused_by_number(row: object) -> None:
    data = json.dumps([GOOD, row]).encode()
    with pytest.raises(CorruptRecordError, match="k: tensor 1"):
        parse_schema(data, "k")


@pytest.mark.parametrize("rows", [[GOOD, GOOD], [["b", "U8", [], 1], ["a", "U8", [], 1]], {}, 3])
def test_rows_that_repeat_are_unsorted_or_are_no_list_are_refused(rows: object) -> None:
    with pytest.raises(CorruptRecordError, match="k: "):
        parse_schema(json.dumps(rows).encode(), "k")


@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_raise_typed_errors_only(data: bytes) -> None:
    with contextlib.suppress(StitchError):
        assert isinstance(parse_schema(b"[" + data, "k"), Schema)


def test_a_shape_of_very_many_dimensions_is_refused_before_they_are_multiplied() -> None:
    row = ["a", "U8", [2**60] * 1_000_000, 0]
    with pytest.raises(CorruptRecordError, match="1000000 dimensions"):
        parse_schema(json.dumps([row]).encode(), "k")
