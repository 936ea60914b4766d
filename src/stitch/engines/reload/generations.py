"""Generations: whole checkpoints of one engine, of which exactly one is current.

    DIRECTORY/generations/00000007/     an ordinary Hugging Face directory, and `.stitch.json`
    DIRECTORY/current                   a link to it; what the engine is told to load

A version is written as a new generation: changed files as patched copies, the others under a second
name. No file is ever written that a complete generation holds. It is proven (names, dtypes, shapes,
and the digest of every word as read back) before it counts as complete, and becomes current by one
rename. So whatever moment the process or the machine dies at, `current` leads to the old version or
to the new one, whole; `Generations.open` proves that again and removes what else there is.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stitch.codec import DigestState, UpdateSet
from stitch.engines.reload.directory import (
    check_no_strays,
    check_not_quantised,
    check_plain,
    claimed,
)
from stitch.engines.reload.patching import changes_by_file, copy_file, link_file, write_patched
from stitch.errors import CorruptCheckpointError, EngineError, StitchError, UsageError
from stitch.failpoints import reach
from stitch.tensors import Checkpoint, open_checkpoint, write_checkpoint
from stitch.tensors.durable import replacing_file, sync_directory
from stitch.tensors.reader import Subset
from stitch.tensors.shard_index import INDEX_NAME, SINGLE_NAME
from stitch.types import Schema, VersionRef
from stitch.views import ViewReader

_log = logging.getLogger(__name__)

RECORD = ".stitch.json"
_NAME = re.compile(r"[0-9]{8}")
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A complete checkpoint directory, proven to have these digests; `ref` is its label."""

    path: Path
    ref: VersionRef | None
    digests: DigestState

    @property
    def digest(self) -> str:
        return self.digests.version_digest()


class Generations:
    """The generations of one engine; nobody else writes in `directory` meanwhile."""

    def __init__(self, directory: Path, lock: int, *, threads: int | None) -> None:
        self.directory = directory
        self.link = directory / "current"
        self._home = directory / "generations"
        self._lock = lock
        self._threads = threads
        self._current: Generation | None = None

    @classmethod
    def open(
        cls, directory: Path, base: Path, view: str, *, run: str, threads: int | None = None
    ) -> Generations:
        """The generations in `directory`; the current one is proven, or made from `base`.

        It is made anew, without a label, unless it holds a proven version of `run`. Needs an empty
        or missing directory, or one that was made here. Raises UsageError for unusable directories
        and checkpoints, CorruptCheckpointError for a damaged base, StoreFullError.
        """
        directory = directory.absolute()
        it = cls(directory, claimed(directory), threads=threads)
        try:
            it._home.mkdir(exist_ok=True)
            with open_checkpoint(base) as checkpoint:
                if not base.is_dir():
                    raise UsageError(f"{base} is one file: engines load checkpoint directories")
                check_not_quantised(base)
                reader = ViewReader(checkpoint, view)
                found = it._proven(reader.schema, run)
                if found is None:
                    it._keep_only(it._linked())  # what was left half done takes up room
                    found = it._from_base(checkpoint, reader)
                    it.switch(found)
            it._current = found
            it._keep_only(found.path)
        except OSError as error:
            it.close()
            raise UsageError(f"cannot keep checkpoints in {directory}: {error}") from error
        except BaseException:
            it.close()
            raise
        return it

    @property
    def current(self) -> Generation:
        assert self._current is not None
        return self._current

    @property
    def schema(self) -> Schema:
        return self.current.digests.schema

    def build(self, update: UpdateSet, ref: VersionRef | None) -> Generation:
        """A new generation: the current one after `update`, written, read back and proven.

        Raises EngineError if it cannot be had; then nothing is left of it.
        """
        base = self.current
        try:
            with open_checkpoint(base.path) as checkpoint:
                changes = changes_by_file(checkpoint, update)
                wanted = base.digests.updated(update, checkpoint)
                temp = self._new_folder()
                for file in sorted(base.path.iterdir()):
                    if file in changes:
                        write_patched(file, temp / file.name, changes[file])
                    elif file.name != RECORD:
                        link_file(file, temp / file.name)
            built = self._complete(temp, ref, wanted.schema)
        except EngineError:
            self._keep_only(base.path)
            raise
        except (OSError, StitchError) as error:
            self._keep_only(base.path)
            raise EngineError(f"the checkpoint of {ref} cannot be written: {error}") from error
        if built.digest != wanted.version_digest():
            self.drop(built)
            raise EngineError(
                f"the checkpoint written for {ref} has digest {built.digest}, the version has "
                f"{wanted.version_digest()}: the disk, or the one that it was made from, is bad"
            )
        return built

    def switch(self, generation: Generation) -> None:
        """Make it the current one, durably; raises OSError, nothing changed."""
        temp = self.directory / f".current.{secrets.token_hex(8)}.tmp"
        temp.symlink_to(Path(self._home.name) / generation.path.name)
        try:
            os.replace(temp, self.link)
        except BaseException:
            temp.unlink(missing_ok=True)
            raise
        sync_directory(self.directory)
        self._current = generation
        reach("reload.switched")

    def relabel(self, ref: VersionRef) -> None:
        """Write another label on the current generation."""
        labelled = replace(self.current, ref=ref)
        _write_record(labelled)
        self._current = labelled

    def drop(self, generation: Generation) -> None:
        """Remove a generation that is not current; an engine that maps its files keeps them."""
        assert generation.path != self.current.path
        # Renamed first, so that half of it never looks like one.
        doomed = self._home / f".{generation.path.name}.{secrets.token_hex(8)}.tmp"
        os.rename(generation.path, doomed)
        reach("reload.dropping")
        shutil.rmtree(doomed, ignore_errors=True)

    def prove(self, names: Sequence[str] | None = None) -> DigestState:
        """Digests of the current generation's files, read now, in the order of `names`' schema.

        Raises CorruptCheckpointError or UsageError if they are not to be had.
        """
        with open_checkpoint(self.current.path) as checkpoint:
            if checkpoint.schema != self.schema:
                raise CorruptCheckpointError(f"{self.current.path} holds other tensors than before")
            reader = checkpoint if names is None else Subset(checkpoint, names)
            return DigestState.of(reader, threads=self._threads)

    def close(self) -> None:
        """Let others have the directory."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # --- inside ----------------------------------------------------------------------------------

    def _proven(self, schema: Schema, run: str) -> Generation | None:
        """The current generation, if it is whole, of this schema, and labelled with this run."""
        if not self.link.is_symlink():
            return None
        path = self._linked()
        try:
            if path is None:
                raise CorruptCheckpointError(f"it leads to {os.readlink(self.link)!r}")
            found = self._read(path)
        except (StitchError, OSError, ValueError, KeyError, TypeError) as error:
            _log.warning(
                "event=generation_damaged path=%s error=%r made=anew_from_the_base",
                path or self.link, error,
            )  # fmt: skip
            return None
        if found.digests.schema != schema or found.ref is None or found.ref.run != run:
            _log.info("event=generation_of_another_run path=%s ref=%s", path, found.ref)
            return None
        return found

    def _linked(self) -> Path | None:
        """Where the link leads; None if that is no place of ours."""
        try:
            home, _, name = os.readlink(self.link).partition("/")
        except FileNotFoundError:
            return None
        return self._home / name if home == self._home.name and _NAME.fullmatch(name) else None

    def _read(self, path: Path) -> Generation:
        record = json.loads((path / RECORD).read_bytes())
        if record["format"] != _FORMAT:
            raise CorruptCheckpointError(f"{path / RECORD} has format {record['format']!r}")
        label = record["ref"]
        ref = None if label is None else VersionRef(label["run"], label["version"])
        found = self._measured(path, ref)
        if found.digest != record["digest"]:
            raise CorruptCheckpointError(
                f"{path} has digest {found.digest}, its record says {record['digest']}"
            )
        return found

    def _measured(self, path: Path, ref: VersionRef | None) -> Generation:
        """Check what is there, and every header, and digest every word."""
        check_plain(path)
        with open_checkpoint(path) as checkpoint:
            check_no_strays(checkpoint)
            digests = DigestState.of(checkpoint, threads=self._threads)
        return Generation(path=path, ref=ref, digests=digests)

    def _from_base(self, checkpoint: Checkpoint, reader: ViewReader) -> Generation:
        """A generation with a base's view: its files, or rounded ones."""
        temp = self._new_folder()
        if reader.schema == checkpoint.schema:
            files = [*checkpoint.files, *checkpoint.assets()]
            if not (checkpoint.path / SINGLE_NAME).exists():
                files.append(checkpoint.path / INDEX_NAME)
            for file in files:
                copy_file(file.resolve(), temp / file.name)
        else:
            temp.rmdir()
            write_checkpoint(temp, reader, assets_from=checkpoint)
        return self._complete(temp, None, reader.schema)

    def _complete(self, temp: Path, ref: VersionRef | None, schema: Schema) -> Generation:
        """Prove a folder, write its record and give it its number."""
        measured = self._measured(temp, ref)
        if measured.digests.schema != schema:
            raise CorruptCheckpointError(f"{temp} does not hold the tensors that it should")
        _write_record(measured)
        sync_directory(temp)
        reach("reload.recorded")
        path = self._home / self._next_name()
        os.rename(temp, path)
        sync_directory(self._home)
        reach("reload.built")
        return replace(measured, path=path)

    def _new_folder(self) -> Path:
        temp = self._home / f".{secrets.token_hex(8)}.tmp"
        temp.mkdir()
        return temp

    def _next_name(self) -> str:
        numbers = [int(p.name) for p in self._home.iterdir() if _NAME.fullmatch(p.name)]
        return f"{max(numbers, default=0) + 1:08d}"

    def _keep_only(self, kept: Path | None) -> None:
        for path in self._home.iterdir():
            if path != kept:
                shutil.rmtree(path, ignore_errors=True)
        for path in self.directory.glob(".current.*.tmp"):
            path.unlink(missing_ok=True)


def _write_record(generation: Generation) -> None:
    ref = generation.ref
    record = {
        "format": _FORMAT,
        "ref": None if ref is None else {"run": ref.run, "version": ref.version},
        "digest": generation.digest,
    }
    with replacing_file(generation.path / RECORD) as file:
        file.write(json.dumps(record).encode())
