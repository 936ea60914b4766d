"""Numpy arrays in place of torch tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stitch.errors import SchemaMismatchError, UnsupportedDtypeError
from stitch.tensors.reader import Words, word_dtype
from stitch.tensors.torch_state import copy_words, select, spec_of
from stitch.types import Schema, TensorSpec

DTYPES = ["bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8"]


def copied(spec: TensorSpec, array: np.ndarray) -> Words:
    out = np.full(spec.num_words, 0xA5, word_dtype(spec))
    copy_words(spec, array, out)
    return out


LAYOUTS = {
    "contiguous": lambda a: a,
    "transposed": lambda a: a.T,
    "reversed": lambda a: a[::-1, ::-2],
    "fortran": lambda a: np.asfortranarray(a),
    "broadcast": lambda a: np.broadcast_to(a[:1], (5, 6)),
    "scalar": lambda a: a[1:2, 1].reshape(()),
    "empty": lambda a: a[:, :0],
    "foreign byte order": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_copied_in_logical_order(dtype: str, layout: str) -> None:
    base = np.random.default_rng(0).integers(0, 2, (4, 6)).astype(dtype)
    array = LAYOUTS[layout](base)
    before = array.copy()
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"))
    assert copied(spec_of("t", array), array).tobytes() == little.tobytes()
    assert (array == before).all()


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("served", ["BF16", "F16"])
def test_rounding_agrees_with_torch(dtype: str, served: str) -> None:
    array = (np.random.default_rng(0).normal(size=(40, 30)) * 1e4).astype(dtype)
    spec = TensorSpec.of("t", served, array.shape)
    assert (copied(spec, array) == copied(spec, torch.from_numpy(array))).all()
    assert (
        copied(spec, array[:, ::-1]).reshape(40, 30)[:, ::-1].ravel() == copied(spec, array)
    ).all()


def test_what_safetensors_cannot_hold_is_refused() -> None:
    for array in (np.zeros(2, "c16"), np.array(["a"]), np.array([object()]), np.zeros(2, "M8[s]")):
        with pytest.raises(UnsupportedDtypeError, match="'t'"):
            spec_of("t", array)


def test_shapes_and_dtypes_are_checked_as_for_torch() -> None:
    with pytest.raises(SchemaMismatchError, match="another shape"):
        copied(TensorSpec.of("t", "F32", []), np.zeros(1, np.float32))
    with pytest.raises(SchemaMismatchError, match="wanted F32"):
        copied(TensorSpec.of("t", "F32", [1]), np.zeros(1, np.int32))


def test_arrays_and_tensors_may_be_mixed_in_one_state() -> None:
    state = {"a": np.zeros(2, np.float32), "b": torch.ones(2)}
    schema = Schema.of(spec_of(name, value) for name, value in state.items())
    values = {spec.name: copied(spec, value).tolist() for spec, value in select(schema, state)}
    assert values == {"a": [0, 0], "b": [0x3F800000] * 2}
