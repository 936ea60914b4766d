"""What the front of every plugin does at start: log, read the checkpoint's schema, learn."""

from __future__ import annotations

import logging
from pathlib import Path

from stitch.engines.group.engine import GroupEngine, GroupTraits
from stitch.engines.group.staging import shared_memory_directory
from stitch.engines.group.workers import Workers
from stitch.engines.ranks.port import check
from stitch.errors import SchemaMismatchError, UsageError
from stitch.tensors import open_checkpoint
from stitch.types import Schema
from stitch.views import ViewReader


async def start_front(
    workers: Workers, directory: Path, view: str, traits: GroupTraits
) -> tuple[GroupEngine, Schema]:
    """Have every rank open the checkpoint that it serves and learn; before requests are taken.

    Raises UsageError for what cannot be served, and whatever the ranks report.
    """
    schema = schema_of(directory, view)
    opened = await workers.call("open", str(directory), view)
    check(opened)
    if any(answer["schema_digest"] != schema.digest for answer in opened):
        raise SchemaMismatchError(f"the ranks read other tensors from {directory}")
    scratch = shared_memory_directory()
    return await GroupEngine.learned(workers, schema, traits, scratch=scratch), schema


def schema_of(directory: Path, view: str) -> Schema:
    if not directory.is_dir():
        raise UsageError(
            f"serve a local checkpoint directory: {directory} is none, and its tensors must be read"
        )
    with open_checkpoint(directory) as checkpoint:
        return ViewReader(checkpoint, view).schema


def log_to_stderr() -> None:
    """Engines set up their own loggers only."""
    log = logging.getLogger("stitch")
    log.setLevel(logging.INFO)
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
        log.addHandler(handler)
