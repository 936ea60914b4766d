"""Update sets on their way to the ranks: private files that live for one stage."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from stitch.codec import UpdateSet
from stitch.engines.parts import split_update
from stitch.types import Schema


class StageFiles:
    """Parts of the stage under way, in a directory that only this user can read."""

    def __init__(self, schema: Schema, scratch: Path) -> None:
        self._schema = schema
        self._scratch = scratch
        self._directory: Path | None = None

    async def write(self, stage_id: str, update: UpdateSet) -> AsyncIterator[Path]:
        """Write part after part; at least one. Each is complete when its path is given."""
        self.drop()
        # mkdtemp gives 0700: weights are nobody else's business.
        self._directory = Path(tempfile.mkdtemp(prefix="stitch-stage-", dir=self._scratch))
        for number, part in enumerate(split_update(update)):
            path = self._directory / f"{number:06d}"
            await asyncio.to_thread(self._write_part, path, part)
            yield path

    def _write_part(self, path: Path, part: UpdateSet) -> None:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(part.to_bytes(self._schema))

    def drop(self) -> None:
        """Remove the files; ranks that still map one keep what they mapped."""
        directory, self._directory = self._directory, None
        if directory is not None:
            with contextlib.suppress(OSError):
                shutil.rmtree(directory)


def shared_memory_directory() -> Path:
    """Where such files cost no disk writes: the machine's shared memory, else the temporary one."""
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())
