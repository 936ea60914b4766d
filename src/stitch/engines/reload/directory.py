"""Directories for engines: whose they are, and what may be in them."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from stitch.errors import CorruptCheckpointError, UsageError
from stitch.tensors import Checkpoint

MARK = ".stitch-generations"


def claimed(directory: Path) -> int:
    """Take the directory for this process; the descriptor that holds the lock."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark = directory / MARK
        if not mark.exists() and any(directory.iterdir()):
            raise UsageError(
                f"{directory} is not empty and was not made for an engine: give a directory that "
                "may be filled and emptied"
            )
        lock = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UsageError(f"cannot keep checkpoints in {directory}: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise UsageError(f"{directory} is in use by another replica") from None
    return lock


def check_not_quantised(base: Path) -> None:
    """UsageError for quantised checkpoints: engines repack such weights, and load them once."""
    try:
        config = json.loads((base / "config.json").read_bytes())
    except (OSError, ValueError):
        return  # the engine says what is wrong with it
    if isinstance(config, dict) and config.get("quantization_config"):
        raise UsageError(f"{base} is quantised: engines do not load such weights twice")


def check_plain(path: Path) -> None:
    """Only regular files: no link may lead an engine elsewhere later."""
    for file in path.iterdir():
        if file.is_symlink() or not file.is_file():
            raise CorruptCheckpointError(f"{file} is not a plain file")


def check_no_strays(checkpoint: Checkpoint) -> None:
    """Only the files of the checkpoint: engines load whatever weights lie about."""
    path = checkpoint.path
    known = {file.name for file in checkpoint.files}
    strays = sorted({file.name for file in path.glob("*.safetensors")} - known)
    if strays:
        raise CorruptCheckpointError(f"{path} has weight files of no use: {strays[:5]}")
