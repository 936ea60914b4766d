"""Lossless patches: digests, encodings, patch files and update sets. See docs/format.md.

Importing this package loads neither numba nor the compressors; names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stitch.codec.buckets import Bucket, Slice, plan_buckets
    from stitch.codec.decode import decode_parts
    from stitch.codec.difference import diff_update
    from stitch.codec.digest import DigestState
    from stitch.codec.encode import PatchEncoder, encode_patch
    from stitch.codec.kernels import warm
    from stitch.codec.patch import PatchHeader, read_header
    from stitch.codec.patched import PatchedReader
    from stitch.codec.update import TensorUpdate, UpdateSet

__all__ = [
    "Bucket",
    "DigestState",
    "PatchEncoder",
    "PatchHeader",
    "PatchedReader",
    "Slice",
    "TensorUpdate",
    "UpdateSet",
    "decode_parts",
    "diff_update",
    "encode_patch",
    "plan_buckets",
    "read_header",
    "warm",
]

_HOMES = {
    "Bucket": "buckets",
    "DigestState": "digest",
    "PatchEncoder": "encode",
    "PatchHeader": "patch",
    "PatchedReader": "patched",
    "Slice": "buckets",
    "TensorUpdate": "update",
    "UpdateSet": "update",
    "decode_parts": "decode",
    "diff_update": "difference",
    "encode_patch": "encode",
    "plan_buckets": "buckets",
    "read_header": "patch",
    "warm": "kernels",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
