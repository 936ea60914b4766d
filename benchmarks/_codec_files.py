"""How the other wires pack arrays into files: a header in JSON, and the arrays after it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

_LENGTH = struct.Struct("<Q")


def buffer(array: npt.NDArray[Any]) -> memoryview:
    """An array's bytes, not copied."""
    data: Any = array.view(np.uint8)  # numpy's types do not say that arrays are buffers
    return memoryview(data)


def to_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def pack(header: Mapping[str, Any], arrays: Iterable[bytes | memoryview]) -> bytes:
    """As safetensors: the header's length, the header, the arrays."""
    text = to_json(header)
    return b"".join([_LENGTH.pack(len(text)), text, *arrays])


def unpack(data: bytes) -> tuple[dict[str, Any], memoryview]:
    """The header, and all arrays as one piece."""
    (length,) = _LENGTH.unpack_from(data)
    header: dict[str, Any] = json.loads(data[_LENGTH.size : _LENGTH.size + length])
    return header, memoryview(data)[_LENGTH.size + length :]
