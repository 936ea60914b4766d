"""Anchors: whole versions as files. The board moves the files and does not look into them.

A file `model-00001-of-00002.safetensors` of a checkpoint directory is stored as
`anchor-<attempt>-model-00001-of-00002.safetensors`, so that two writers of one anchor cannot
meet; fetching takes the prefix off again. A sharded checkpoint's index is stored like a shard.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stitch.board import keys
from stitch.board.stores.creation import Patience, create_record
from stitch.board.stores.directory import sync_path
from stitch.board.stores.store import ObjectStore
from stitch.board.stores.store_errors import translated
from stitch.board.transfers import blobs
from stitch.board.transfers.staging import Staging
from stitch.errors import (
    BaseMismatchError,
    CorruptRecordError,
    UsageError,
)
from stitch.records import AnchorRecord, BlobRef
from stitch.strict_json import load_json
from stitch.types import VersionRef

log = logging.getLogger("stitch.board")

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

INDEX_NAME = "model.safetensors.index.json"
MAX_ANCHOR_BYTES = 16 * 2**20

_STORED_NAME = re.compile(r"anchor-[0-9a-zA-Z]+-(.+)")


def stored_name(name: str, attempt: str) -> str:
    return f"anchor-{attempt}-{name}"


def local_name(stored: str) -> str:
    """Name of an anchor file inside a checkpoint directory; UsageError for anything unfit."""
    found = _STORED_NAME.fullmatch(stored)
    name = keys.segment(found.group(1) if found else stored, "anchor file")
    if name != INDEX_NAME and not name.endswith(".safetensors"):
        raise UsageError(f"anchor file {stored!r} is neither a safetensors file nor their index")
    return name


def checkpoint_files(directory: Path) -> dict[str, Path]:
    """Weight files of a checkpoint directory by their names there, the index first if sharded.

    UsageError unless it holds either an index with its shards or exactly one safetensors file,
    which is called `model.safetensors` here whatever its name.
    """
    index = directory / INDEX_NAME
    if index.is_file():
        return {INDEX_NAME: index} | {name: directory / name for name in _shard_names(index)}
    files = sorted(directory.glob("*.safetensors"))
    if len(files) != 1:
        raise UsageError(
            f"{directory} holds {len(files)} safetensors files and no {INDEX_NAME}, so it is not "
            "clear which of them are the weights"
        )
    return {"model.safetensors": files[0]}


def _shard_names(index: Path) -> list[str]:
    record = load_json(index.read_bytes(), str(index))
    shards = record.get("weight_map") if isinstance(record, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise UsageError(f"{index}: field weight_map is missing or empty")
    return sorted({local_name(str(name)) for name in shards.values()})


def put_anchor_file(
    store: ObjectStore,
    run: str,
    version: int,
    name: str,
    path: Path,
    attempt: str,
    patience: Patience,
) -> BlobRef:
    stored = stored_name(local_name(name), attempt)
    return blobs.put_blob(store, keys.blob(run, version, stored), stored, path, patience)


def new_attempt() -> str:
    return secrets.token_hex(8)


def read_anchor(store: ObjectStore, ref: VersionRef) -> AnchorRecord | None:
    """The anchor of a version, or None. CorruptRecordError if its record is damaged."""
    key = keys.anchor(ref.run, ref.version)
    data = store.get(key, max_bytes=MAX_ANCHOR_BYTES)
    return None if data is None else _parse(data, key, ref)


def _parse(data: bytes, key: str, ref: VersionRef) -> AnchorRecord:
    record = AnchorRecord.parse(data, key)
    if record.ref != ref:
        raise CorruptRecordError(f"{key}: fields run and version say {record.ref}, wanted {ref}")
    try:
        names = [local_name(file.name).lower() for file in record.files]
    except UsageError as error:
        raise CorruptRecordError(f"{key}: field files is wrong: {error}") from None
    if len(set(names)) != len(names):
        raise CorruptRecordError(f"{key}: field files names one checkpoint file twice")
    return record


def commit_anchor(
    store: ObjectStore, record: AnchorRecord, digest: str, patience: Patience
) -> AnchorRecord:
    """Create the anchor's record and return it, or the equivalent one that was there first.

    BaseMismatchError if `record`, or what is there, is not of the version's `digest`.
    """
    _require_digest(record, digest)
    key = keys.anchor(record.run, record.version)
    data = record.to_json_bytes()
    _parse(data, key, record.ref)
    for file in record.files:
        blobs.require_blob(store, keys.blob(record.run, record.version, file.name), file, patience)
    found = create_record(store, key, data, patience)
    if found is None:
        return record
    earlier = _parse(found, key, record.ref)
    _require_digest(earlier, digest)
    return earlier


def _require_digest(record: AnchorRecord, digest: str) -> None:
    if record.digest != digest:
        raise BaseMismatchError(
            f"anchor of {record.ref} has digest {record.digest}, but the version has {digest}"
        )


def list_anchors(store: ObjectStore, run: str) -> list[int]:
    """Versions that have an anchor record, ascending as numbers; stray names are ignored."""
    found = set()
    for info in store.list_objects(keys.versions_folder(run)):
        match info.key.split("/"):
            case [_, "v", folder, "anchor.json"]:
                version = keys.parse_number(folder)
                if version is not None:
                    found.add(version)
    return sorted(found)


def fetch_files(
    store: ObjectStore,
    wanted: list[tuple[str, str, BlobRef]],
    directory: Path,
    progress: Progress | None,
    patience: Patience,
    staging: Path | None = None,
) -> Path:
    """Fetch (key, local name, ref) files into `directory`, which appears whole or not at all.

    Size and BLAKE3 of each are checked while it streams to disk. `directory` must be missing or
    empty. What was fetched before an error or a kill waits in the folder `staging` (default: one
    beside `directory`; the same file system) for the next call. Raises CorruptBlobError naming the
    key, or StoreFullError.
    """
    total_bytes = sum(ref.num_bytes for _, _, ref in wanted)
    done_bytes = 0
    with translated("write", directory.name):
        _check_target(directory)
        directory.parent.mkdir(parents=True, exist_ok=True)
    folder = staging or directory.parent / f".{directory.name}.partial"
    with Staging(folder) as staged:
        for key, _, ref in wanted:
            for num_bytes in staged.fetch(store, key, ref, patience):
                done_bytes += num_bytes
                if progress is not None:
                    progress(done_bytes, total_bytes)
        with _new_directory(directory) as scratch:
            _place(staged, [(name, ref) for _, name, ref in wanted], scratch)
    return directory


def _place(staged: Staging, wanted: list[tuple[str, BlobRef]], directory: Path) -> None:
    """Move what was fetched into `directory`; two files of the same content share it."""
    placed: dict[str, Path] = {}
    for name, ref in wanted:
        if ref.blake3 in placed:
            os.link(placed[ref.blake3], directory / name)
        else:
            staged.take(ref, directory / name)
            placed[ref.blake3] = directory / name


def _check_target(directory: Path) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"{directory} exists and is not an empty directory")


@contextmanager
def _new_directory(directory: Path) -> Iterator[Path]:
    """An unguessable folder beside `directory` that takes its place when the block succeeds."""
    with translated("write", directory.name):
        _check_target(directory)
        scratch = directory.parent / f".{directory.name}-{secrets.token_hex(16)}"
        scratch.mkdir()
        try:
            yield scratch
            sync_path(scratch)
            scratch.rename(directory)
            sync_path(directory.parent)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
