"""The two plain views: `checkpoint` serves every tensor as stored, `bf16` rounds floats to BF16."""

from __future__ import annotations

from stitch.errors import UsageError
from stitch.tensors.casts import BF16_SOURCES, round_to_bf16
from stitch.tensors.reader import WeightReader, Words
from stitch.types import Schema, TensorSpec

VIEWS = ("bf16", "checkpoint")


def view_schema(base: Schema, view: str) -> Schema:
    """The schema of a base's view; names and shapes stay.

    `bf16` turns F16, F32 and F64 into BF16 and leaves all other dtypes; `checkpoint` keeps all.
    """
    if view not in VIEWS:
        raise UsageError(f"unknown view {view!r}: choose one of {', '.join(VIEWS)}")
    if view == "checkpoint":
        return base
    return Schema(tuple(_bf16_spec(spec) for spec in base.tensors))


class ViewReader:
    """A WeightReader that shows the view of another reader's tensors, rounding as it reads.

    BF16 is rounded to nearest, ties to even: the same bits as torch's CPU cast for every value but
    NaN, which stays NaN.
    """

    def __init__(self, reader: WeightReader, view: str) -> None:
        self._reader = reader
        self._base = reader.schema
        self._schema = view_schema(self._base, view)

    @property
    def schema(self) -> Schema:
        return self._schema

    def read(self, name: str, start: int, stop: int) -> Words:
        """Words [start, stop) of the view: a word of the view is one element of the base."""
        words = self._reader.read(name, start, stop)
        stored, served = self._base[name].dtype, self._schema[name].dtype
        return words if stored == served else round_to_bf16(words, stored)


def _bf16_spec(spec: TensorSpec) -> TensorSpec:
    if spec.dtype not in BF16_SOURCES:
        return spec
    return TensorSpec.of(spec.name, "BF16", spec.shape)
