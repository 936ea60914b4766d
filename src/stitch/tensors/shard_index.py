"""The index of a sharded checkpoint: which file holds which tensor.

`model.safetensors.index.json` holds `{"metadata": {...}, "weight_map": {tensor name: file name}}`.
File names come from outside: each must be one plain segment beside the index, so that none leads
out of the directory. The file itself may be a symbolic link, as in the Hugging Face hub's cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from stitch.errors import CorruptCheckpointError
from stitch.tensors.strict_json import unique_keys
from stitch.types import BLOB_NAME

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20


def read_shard_index(path: Path) -> Mapping[str, frozenset[str]]:
    """File name -> the tensors it must hold, sorted by file name. Raises CorruptCheckpointError."""
    if path.stat().st_size > MAX_INDEX_BYTES:
        raise CorruptCheckpointError(f"{path} exceeds {MAX_INDEX_BYTES} bytes")
    try:
        index = json.loads(path.read_bytes(), object_pairs_hook=unique_keys)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} is not valid JSON: {error}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptCheckpointError(f"{path} has no weight_map")
    files: dict[str, set[str]] = {}
    for name, file_name in weight_map.items():
        files.setdefault(_check_file_name(file_name, name, path), set()).add(name)
    _check_case(files, path)
    return {file_name: frozenset(files[file_name]) for file_name in sorted(files)}


def build_shard_index(homes: Mapping[str, str], num_bytes: int) -> bytes:
    """The index of tensors (name -> file name); equal input gives equal bytes."""
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(homes.items()))}
    return json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"


def _check_file_name(file_name: object, name: str, path: Path) -> str:
    if (
        not isinstance(file_name, str)
        or not BLOB_NAME.fullmatch(file_name)
        or not file_name.endswith(".safetensors")
    ):
        raise CorruptCheckpointError(
            f"{path}: tensor {name!r:.200} is said to be in {file_name!r:.200}; only plain names "
            "of .safetensors files beside the index are allowed"
        )
    return file_name


def _check_case(files: Mapping[str, object], path: Path) -> None:
    seen: dict[str, str] = {}
    for file_name in files:
        other = seen.setdefault(file_name.lower(), file_name)
        if other != file_name:
            raise CorruptCheckpointError(f"{path}: {other} and {file_name} differ only in case")
