"""The base checkpoint of a run: where it is, and the small files beside its weights."""

from __future__ import annotations

import os
import re
from pathlib import Path

from stitch.errors import UsageError
from stitch.tensors import Checkpoint

MAX_ASSETS_BYTES = 64 << 20
"""All small files of one base together."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja"]


def resolve_base(base: str | Path) -> Path:
    """A local path as it is; a Hugging Face hub name is downloaded (or found in its cache).

    Raises UsageError if it is neither, or cannot be downloaded.
    """
    path = Path(base)
    if path.exists():
        return path
    name = os.fspath(base)
    if isinstance(base, Path) or not _HUB_NAME.fullmatch(name):
        raise UsageError(f"there is no base checkpoint at {name}")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )
    except ImportError as error:
        raise UsageError(
            f"there is no base checkpoint at {name}; to download it as a hub name, install "
            "huggingface_hub"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UsageError(
            f"base {name!r} is neither a local path nor a hub model that can be downloaded: {error}"
        ) from error


def describe_base(base: str | Path) -> str:
    """What a run record says about its base: an absolute path, or the hub name as given."""
    return str(Path(base).resolve()) if Path(base).exists() else os.fspath(base)


def read_assets(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Name -> content of the small files (configuration, tokenizer ...) beside the weights.

    Raises UsageError if they are larger than MAX_ASSETS_BYTES together.
    """
    paths = checkpoint.assets()
    total = sum(path.stat().st_size for path in paths)
    if total > MAX_ASSETS_BYTES:
        raise UsageError(
            f"the {len(paths)} small files in {checkpoint.path} have {total} bytes together; a run "
            f"keeps at most {MAX_ASSETS_BYTES}; move what does not belong to the model"
        )
    return {path.name: path.read_bytes() for path in paths}
