"""How numba loops are compiled here. Import it, and the modules that do, only through kernels.

Each loop is made by a factory that fixes what varies (as the word size), so that widths and shifts
are constants, and is compiled at most once for it: the signatures accept read-only and unaligned
inputs, so the caller's arrays never trigger another compilation. Two habits keep the loops fast and
right: integers of different signedness never meet in an expression (numba would make them floats),
and inner loops run over slices from 0, which spares numba its check for negative indices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import register_jitable

UINT = {1: types.uint8, 2: types.uint16, 4: types.uint32, 8: types.uint64}
"""Bytes of a word -> numba type."""
NUMPY_UINT: Mapping[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Bytes of a word -> numpy scalar type."""
SIGNED = {1: types.int8, 2: types.int16, 4: types.int32, 8: types.int64}
NUMPY_INT: Mapping[int, Any] = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
"""The same, signed."""


def input_array(element: Any, ndim: int = 1) -> Any:
    return types.Array(element, ndim, "C", readonly=True, aligned=False)


def output_array(element: Any, ndim: int = 1) -> Any:
    return types.Array(element, ndim, "C", readonly=False, aligned=False)


def compiled(function: Callable[..., Any], result: Any, *arguments: Any) -> Callable[..., Any]:
    signature = result(*arguments)
    made: Callable[..., Any]
    try:
        made = numba.njit(signature, nogil=True, error_model="numpy", cache=True)(function)
    except (RuntimeError, OSError):
        # No place for the cache can be written, or its disk is full: compile for this process.
        made = numba.njit(signature, nogil=True, error_model="numpy")(function)
    return made


def inlined(made: Callable[..., Any]) -> Callable[..., Any]:
    """What `compiled` made, for use inside other loops: it takes arrays of any alignment there."""
    function: Callable[..., Any] = register_jitable(made.py_func)  # type: ignore[attr-defined]
    return function
