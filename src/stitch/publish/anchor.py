"""Anchors: versions stored whole, from which a reader can start without the base."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from stitch.board import Run
from stitch.codec import DigestState
from stitch.errors import BaseMismatchError
from stitch.records import AnchorRecord, BlobRef
from stitch.tensors import WeightReader, write_safetensors
from stitch.tensors.reader import Progress
from stitch.tensors.shard_index import INDEX_NAME, SINGLE_NAME, build_shard_index

MAX_SHARD_BYTES = 2 << 30
"""Scratch space that writing an anchor needs, unless one tensor is larger."""


def write_anchor(
    run: Run,
    reader: WeightReader,
    version: int,
    *,
    scratch: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    writer: str = "anchor",
    progress: Progress | None = None,
) -> AnchorRecord:
    """Store `version` of `run` whole, from weights that must be exactly that version.

    The shards are written to `scratch` (default: the system's temporary directory) and uploaded
    one at a time; other memory is a few chunks. An anchor that exists already is returned as it is.
    Raises BaseMismatchError if `reader` holds other weights, VersionNotFoundError, what the reader
    and the store raise; the board then holds no part that any reader would look at.
    """
    if (existing := run.anchor(version)) is not None:
        return existing
    found, wanted = DigestState.of(reader).version_digest(), run.digest(version)
    if found != wanted:
        raise BaseMismatchError(
            f"cannot anchor version {version} of run {run.name!r}: its digest is {wanted}, the "
            f"weights at hand have {found}; reproduce the version first"
        )
    if scratch is not None:
        scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="stitch-anchor-", dir=scratch) as directory:
        writing = _AnchorWriter(run, reader, version, Path(directory))
        files = writing.put_all(_plan_shards(reader, max_shard_bytes), progress)
    record = AnchorRecord(
        run=run.name,
        version=version,
        digest=found,
        schema_digest=reader.schema.digest,
        files=files,
        num_bytes=sum(file.num_bytes for file in files),
        created_unix_s=time.time(),
        writer=writer,
    )
    return run.commit_anchor(record)


class _AnchorWriter:
    """Puts one anchor's files, holding one of them on disk at a time."""

    def __init__(self, run: Run, reader: WeightReader, version: int, directory: Path) -> None:
        self._run = run
        self._reader = reader
        self._version = version
        self._directory = directory
        self._attempt = secrets.token_hex(8)

    def put_all(
        self, shards: Sequence[Sequence[str]], progress: Progress | None
    ) -> tuple[BlobRef, ...]:
        """Store all shards and, if there are several, their index, which is listed first."""
        files = []
        homes: dict[str, str] = {}
        done_bytes = 0
        for name, tensors in zip(_file_names(len(shards)), shards, strict=True):
            path = self._directory / name
            write_safetensors(path, self._reader, names=tensors)
            files.append(self._put(path))
            homes |= dict.fromkeys(tensors, name)
            done_bytes += sum(self._reader.schema[tensor].num_bytes for tensor in tensors)
            if progress is not None:
                progress(done_bytes, self._reader.schema.num_bytes)
        if len(shards) > 1:
            path = self._directory / INDEX_NAME
            path.write_bytes(build_shard_index(homes, self._reader.schema.num_bytes))
            files.insert(0, self._put(path))
        return tuple(files)

    def _put(self, path: Path) -> BlobRef:
        ref = self._run.put_anchor_file(self._version, path.name, path, attempt=self._attempt)
        path.unlink()
        return ref


def _plan_shards(reader: WeightReader, max_shard_bytes: int) -> list[list[str]]:
    """Tensor names per shard: in schema order, a new shard where the next would not fit."""
    shards: list[list[str]] = [[]]
    room_bytes = max_shard_bytes
    for spec in reader.schema.tensors:
        if spec.num_bytes > room_bytes and shards[-1]:
            shards.append([])
            room_bytes = max_shard_bytes
        shards[-1].append(spec.name)
        room_bytes -= spec.num_bytes
    return shards


def _file_names(count: int) -> Iterator[str]:
    if count == 1:
        yield SINGLE_NAME
        return
    for number in range(1, count + 1):
        yield f"model-{number:05}-of-{count:05}.safetensors"
