"""Buckets partition a schema."""

from __future__ import annotations

import pytest
from codec_cases import mixed_schema, schema_of
from hypothesis import given
from hypothesis import strategies as st

from stitch.codec import Bucket, Slice, plan_buckets
from stitch.codec.buckets import ALIGNMENT, check_bucket, check_disjoint, cut_bucket
from stitch.errors import CorruptPatchError
from stitch.types import Schema, TensorSpec


@given(
    st.lists(st.tuples(st.sampled_from(["BF16", "F32", "I8"]), st.integers(0, 70)), max_size=12),
    st.integers(8, 64),
)
def test_every_element_is_in_exactly_one_bucket(rows: list[tuple[str, int]], limit: int) -> None:
    schema = Schema.of(TensorSpec.of(f"t{i:02}", d, (n,)) for i, (d, n) in enumerate(rows))
    seen: set[tuple[int, int]] = set()
    buckets = plan_buckets(schema, limit)
    for bucket in buckets:
        assert bucket.num_elements <= limit
        check_bucket(bucket, schema)
        for piece in bucket.slices:
            elements = {(piece.tensor, i) for i in range(piece.start, piece.stop)}
            assert not elements & seen
            seen |= elements
    assert len(seen) == schema.num_elements
    check_disjoint(buckets, schema)


def test_small_tensors_of_one_dtype_share_a_bucket_and_large_ones_are_cut() -> None:
    schema = schema_of(a=("BF16", (30,)), b=("F32", (4,)), c=("BF16", (20,)), d=("BF16", (5,)))
    assert plan_buckets(schema, 32) == [
        Bucket("BF16", (Slice(0, 0, 30),)),
        Bucket("F32", (Slice(1, 0, 4),)),
        Bucket("BF16", (Slice(2, 0, 20), Slice(3, 0, 5))),
    ]
    cut = plan_buckets(schema_of(a=("BF16", (1000,))), 100)
    assert [b.slices[0].start for b in cut] == list(range(0, 1000, 96))


def test_cuts_fall_on_multiples_of_eight_elements() -> None:
    for bucket in plan_buckets(mixed_schema(), 100):
        assert all(piece.start % ALIGNMENT == 0 for piece in bucket.slices)


@pytest.mark.parametrize(
    ("bucket", "message"),
    [
        (Bucket("BF16", (Slice(9, 0, 8),)), "there is no tensor 9"),
        (Bucket("F32", (Slice(0, 0, 8),)), "is not F32"),
        (Bucket("BF16", (Slice(0, 0, 21),)), "not inside"),
        (Bucket("BF16", (Slice(0, 8, 8),)), "not inside"),
        (Bucket("BF16", (Slice(0, 4, 20),)), "not cut on multiples"),
        (Bucket("BF16", (Slice(0, 0, 12),)), "not cut on multiples"),
        (Bucket("BF16", ()), "no slices"),
    ],
)
def test_a_bucket_outside_the_schema_is_refused(bucket: Bucket, message: str) -> None:
    with pytest.raises(CorruptPatchError, match=message):
        check_bucket(bucket, schema_of(a=("BF16", (20,))))


def test_overlapping_slices_are_refused() -> None:
    schema = schema_of(a=("BF16", (40,)))
    with pytest.raises(CorruptPatchError, match="overlap"):
        check_disjoint(
            [Bucket("BF16", (Slice(0, 8, 40),)), Bucket("BF16", (Slice(0, 0, 16),))], schema
        )


@pytest.mark.parametrize("max_elements", [1, 8, 9, 100, 1000, 10_000])
def test_a_cut_bucket_has_the_same_elements_in_the_same_order(max_elements: int) -> None:
    schema = schema_of(a=("BF16", (1003,)), b=("BF16", (5,)), c=("BF16", (2049,)))
    (bucket,) = plan_buckets(schema, 1 << 20)
    pieces = cut_bucket(bucket, max_elements)
    joined: list[Slice] = []
    for piece in pieces:
        check_bucket(piece, schema)
        assert piece.num_elements <= max(8, max_elements) + 8
        for part in piece.slices:
            if joined and (joined[-1].tensor, joined[-1].stop) == (part.tensor, part.start):
                part = Slice(part.tensor, joined.pop().start, part.stop)
            joined.append(part)
    assert tuple(joined) == bucket.slices
    assert len(pieces) <= bucket.num_elements // max(8, max_elements - 8) + 1
