"""Numpy arrays as a trainer's tensors: specs and bit-exact copies, any strides and byte order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stitch.errors import UnsupportedDtypeError
from stitch.tensors.casts import round_to_bf16
from stitch.tensors.reader import WORD_DTYPES, Words
from stitch.types import TensorSpec

DTYPE_NAMES: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
"""numpy dtype name -> safetensors dtype; names that numpy lacks come from the ml_dtypes package."""


def spec_of(name: str, array: NDArray[Any]) -> TensorSpec:
    """The spec of an array; UnsupportedDtypeError for a dtype that safetensors cannot hold."""
    dtype = DTYPE_NAMES.get(array.dtype.name)
    if dtype is None:
        raise UnsupportedDtypeError(f"tensor {name!r}: safetensors cannot hold {array.dtype}")
    return TensorSpec.of(name, dtype, array.shape)


def copy_words(spec: TensorSpec, got: TensorSpec, array: NDArray[Any], out: Words) -> None:
    """Write an array's words into `out` in logical order; `got` is its own spec, `spec` the wanted.

    The shapes agree, and `got.dtype` is `spec.dtype` or is rounded to it.
    """
    little = array.dtype.newbyteorder("<")
    flat = np.ascontiguousarray(array.astype(little, copy=False)).reshape(-1)
    if got.dtype == spec.dtype:
        out[...] = flat.view(WORD_DTYPES[spec.word_bytes])
    elif spec.dtype == "BF16":
        round_to_bf16(flat.view(WORD_DTYPES[got.word_bytes]), got.dtype, out)
    else:
        # Through F32, as torch rounds F64 to F16.
        with np.errstate(over="ignore", invalid="ignore"):
            out.view("<f2")[...] = flat.astype("<f4", copy=False)
