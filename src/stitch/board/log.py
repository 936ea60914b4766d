"""One run's log on a board: an append-only sequence of versions. See docs/protocol.md."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stitch.board import anchors, heartbeats, keys
from stitch.board.anchor_list import read_anchor_list, write_anchor_list
from stitch.board.anchors import Progress
from stitch.board.heads import Heads
from stitch.board.keeping.retired import Retention, read_retention
from stitch.board.manifests import Manifests
from stitch.board.merged import MergedPatches, list_merged
from stitch.board.schemas import read_schema
from stitch.board.transfers import blobs
from stitch.board.transfers.staging import Staging
from stitch.errors import (
    BaseMismatchError,
    SchemaMismatchError,
    StoreError,
    UntrustedRecordError,
    UsageError,
    VersionNotFoundError,
)
from stitch.failpoints import reach
from stitch.records import AnchorRecord, BlobRef, Heartbeat, Manifest, MergedPatch, RunRecord
from stitch.types import Schema, VersionRef

if TYPE_CHECKING:
    from stitch.board.board import Board

log = logging.getLogger("stitch.board")


class Run:
    """One run of a board. Thread-safe. Made by Board.create_run and Board.open_run."""

    def __init__(self, board: Board, record: RunRecord) -> None:
        self.board = board
        self.name = record.run
        self.record = record
        self._store = board.store
        self._patience = board.patience
        self._heads = Heads(board.store, record.run)
        self._manifests = Manifests(board.store, record.run, self._heads, board.patience)
        self._merged = MergedPatches(board.store, record, self.digest, board.patience)
        self._schema: Schema | None = None
        self._schema_lock = threading.Lock()
        self._durable_version = 0

    def __repr__(self) -> str:
        return f"Run({self.name!r} on {self.board.url!r})"

    @property
    def schema(self) -> Schema:
        """The tensors of the run's view; fetched on first use, its digest checked."""
        with self._schema_lock:
            if self._schema is None:
                self._schema = read_schema(self._store, self.name, self.record.schema_digest)
            return self._schema

    # --- versions --------------------------------------------------------------------------

    def newest(self, after: int | None = None) -> int:
        """The newest published version; 0 if there is only the base.

        `after` must be a version that the caller knows to be published; asking again while
        nothing follows it costs one request.
        """
        return self._manifests.newest(after)

    @property
    def refusal(self) -> UntrustedRecordError | None:
        """Why what lies after the newest version is not one: nobody who is trusted signed it."""
        return self._manifests.refusal

    def manifest(self, version: int) -> Manifest:
        """The manifest of a published version (cached).

        Raises VersionNotFoundError, or CorruptRecordError naming key and field.
        """
        return self._manifests.get(version)

    def manifests(self, start: int, stop: int) -> Iterator[Manifest]:
        """Manifests of versions `start` (inclusive) to `stop` (exclusive), in order."""
        return (self.manifest(version) for version in range(start, stop))

    def digest(self, version: int) -> str:
        """The version digest of a published version or, for 0, of the base."""
        return self.manifest(version).digest_after if version else self.record.base_digest

    def commit(self, manifest: Manifest) -> None:
        """Publish a version: create its manifest, after checking what it rests on.

        When this returns, the version is visible and durable, and so are the one before it and
        its blobs. Raises
        - PublishConflictError: another attempt has published this version;
        - VersionNotFoundError: the version before it is not published, so it would leave a gap, or
          it is no longer there (a volume that is not mounted any more looks like an empty board);
        - BaseMismatchError: it does not start from what the version before it ends in;
        - CorruptBlobError: a blob is missing or short;
        - StoreError: the outcome is not known; committing the same manifest again finds out.
        """
        self._check_start(manifest)
        for ref in manifest.blobs:
            key = keys.blob(self.name, manifest.version, ref.name)
            blobs.require_blob(self._store, key, ref, self._patience)
        self._manifests.create(manifest)
        self._durable_version = max(self._durable_version, manifest.version)

    def _check_start(self, manifest: Manifest) -> None:
        before = manifest.version - 1
        if manifest.run != self.name:
            raise UsageError(f"a manifest of run {manifest.run!r} cannot go to run {self.name!r}")
        if manifest.schema_digest != self.record.schema_digest:
            raise SchemaMismatchError(
                f"{manifest.ref} has schema {manifest.schema_digest}, "
                f"its run has {self.record.schema_digest}"
            )
        try:
            digest = self.digest(before)
        except VersionNotFoundError as error:
            raise VersionNotFoundError(f"{manifest.ref} would leave a gap: {error}") from error
        if manifest.digest_before != digest:
            raise BaseMismatchError(
                f"{manifest.ref} starts from digest {manifest.digest_before}, but version "
                f"{before} is {digest}: diff against version {before} and publish again"
            )
        if before > self._durable_version:
            self._manifests.make_durable(before)
            self._durable_version = before
        else:
            self._manifests.require(before)

    def write_head(self, version: int) -> None:
        """Hint at the newest version; best effort, never a StoreError."""
        self._heads.write(version)

    # --- merged patches --------------------------------------------------------------------

    def merged(self, start: int, version: int) -> MergedPatch | None:
        """The merged patch from `start` to `version` (cached); None if there is none.

        CorruptRecordError if it is damaged, or leads between other digests than the versions have.
        """
        return self._merged.get(start, version)

    def merged_spans(self) -> list[tuple[int, int]]:
        """(from, to) of all merged patches, by listing: one that is missing here may exist."""
        return list_merged(self._store, self.name)

    def forget_merged(self, start: int, version: int) -> None:
        """Look at the board again when this merged patch is asked for next; it may be gone."""
        self._merged.forget(start, version)

    def commit_merged(self, merged: MergedPatch) -> MergedPatch:
        """Create a merged patch's record after its blobs; returns the one that is in force."""
        return self._merged.create(merged)

    def retention(self) -> Retention | None:
        """What retention has removed or is about to remove; a hint, asked for each time."""
        return read_retention(self._store, self.name)

    # --- blobs -----------------------------------------------------------------------------

    def put_blob(self, version: int, name: str, data: bytes) -> BlobRef:
        """Store one patch file of a version to come, or of a merged patch to a version, durably.

        `name` must be unique to this attempt to publish. PublishConflictError if it is taken by
        other content.
        """
        key = keys.blob(self.name, version, name)
        ref = blobs.put_blob(self._store, key, name, data, self._patience)
        reach("board.blob.done")
        return ref

    def read_blob(self, version: int, ref: BlobRef) -> bytes:
        """The blob's bytes, proven by size and BLAKE3; CorruptBlobError names the key."""
        key = keys.blob(self.name, version, ref.name)
        return blobs.read_blob(self._store, key, ref, self._patience)

    def has_blobs(self, version: int) -> bool:
        """Whether the patch files of a version are there; nothing is read or waited for."""
        names = [ref.name for ref in self.manifest(version).blobs]
        return all(self._store.head(keys.blob(self.name, version, name)) for name in names)

    def delete_unnamed_blob(self, version: int, ref: BlobRef) -> None:
        """Delete a blob that the caller wrote and that no record names, nor will."""
        self._store.delete(keys.blob(self.name, version, ref.name))

    def stage_blob(self, staging: Staging, version: int, ref: BlobRef) -> Iterator[int]:
        """Bring the blob into `staging`, going on with what is there; yields bytes gained."""
        key = keys.blob(self.name, version, ref.name)
        return staging.fetch(self._store, key, ref, self._patience)

    def put_asset(self, name: str, data: bytes) -> BlobRef:
        """Store a small file; only those named in the run's record belong to its checkpoints."""
        return self.board.put_asset(self.name, name, data)

    def read_asset(self, ref: BlobRef) -> bytes:
        """The asset's bytes, proven by size and BLAKE3."""
        key = keys.asset(self.name, ref.name, ref.blake3)
        return blobs.read_blob(self._store, key, ref, self._patience)

    # --- heartbeats ------------------------------------------------------------------------

    def put_heartbeat(self, beat: Heartbeat) -> None:
        heartbeats.put_heartbeat(self._store, self.name, beat)

    def heartbeats(self) -> list[Heartbeat]:
        """The last heartbeat of every replica, sorted by id; unreadable ones are left out."""
        return heartbeats.heartbeats(self._store, self.name)

    def delete_heartbeat(self, replica: str) -> None:
        heartbeats.delete_heartbeat(self._store, self.name, replica)

    # --- anchors ---------------------------------------------------------------------------

    def anchors(self) -> list[int]:
        """Versions stored whole, ascending, by listing."""
        return anchors.list_anchors(self._store, self.name)

    def hinted_anchors(self) -> list[int] | None:
        """The same from a hint, in one request: some may be missing, or gone. None: no hint."""
        return read_anchor_list(self._store, self.name)

    def hint_at_anchors(self) -> None:
        """List the anchors for those who read the hint; best effort."""
        try:
            write_anchor_list(self._store, self.name, self.anchors())
        except StoreError as error:
            log.warning("event=anchor_list_not_written run=%s error=%s", self.name, error)

    def anchor(self, version: int) -> AnchorRecord | None:
        """The anchor of a version, None if it has none; CorruptRecordError if it is damaged."""
        return anchors.read_anchor(self._store, VersionRef(self.name, version))

    def write_anchor(
        self,
        version: int,
        directory: Path,
        *,
        writer: str,
        progress: Progress | None = None,
    ) -> AnchorRecord:
        """Store a checkpoint directory that holds `version`, and return its anchor's record.

        The caller answers for the content. If the version has an anchor already, that one stays
        and is returned. `progress` gets (bytes done, bytes in all).
        """
        digest = self.digest(version)
        files = anchors.checkpoint_files(directory)
        total_bytes = sum(path.stat().st_size for path in files.values())
        attempt = anchors.new_attempt()
        refs: list[BlobRef] = []
        for name, path in files.items():
            refs.append(self.put_anchor_file(version, name, path, attempt=attempt))
            if progress is not None:
                progress(sum(ref.num_bytes for ref in refs), total_bytes)
        record = AnchorRecord(
            run=self.name,
            version=version,
            digest=digest,
            schema_digest=self.record.schema_digest,
            files=tuple(refs),
            num_bytes=sum(ref.num_bytes for ref in refs),
            created_unix_s=time.time(),
            writer=writer,
        )
        return self.commit_anchor(record)

    def put_anchor_file(
        self, version: int, name: str, path: Path, *, attempt: str | None = None
    ) -> BlobRef:
        """Store one file of a checkpoint directory by streaming it."""
        return anchors.put_anchor_file(
            self._store,
            self.name,
            version,
            name,
            path,
            attempt or anchors.new_attempt(),
            self._patience,
        )

    def commit_anchor(self, record: AnchorRecord) -> AnchorRecord:
        """Create the anchor's record after its files; returns the one that is in force."""
        digest = self.digest(record.version)
        found = anchors.commit_anchor(self._store, record, digest, self._patience)
        reach("board.anchor.done")
        self.hint_at_anchors()
        return found

    def fetch_anchor(
        self,
        record: AnchorRecord,
        directory: Path,
        progress: Progress | None = None,
        *,
        staging: Path | None = None,
    ) -> Path:
        """Fetch an anchor and the run's assets as an ordinary checkpoint directory.

        `directory` must be missing or empty and appears whole or not at all. Returns it. What an
        error or a kill interrupts waits in the folder `staging` (default: one beside `directory`,
        and always in its file system) for the next call.
        """
        weights = [
            (keys.blob(self.name, record.version, ref.name), anchors.local_name(ref.name), ref)
            for ref in record.files
        ]
        taken = {name.lower() for _, name, _ in weights}
        assets = [
            (keys.asset(self.name, ref.name, ref.blake3), ref.name, ref)
            for ref in self.record.assets
            if ref.name.lower() not in taken
        ]
        return anchors.fetch_files(
            self._store, weights + assets, directory, progress, self._patience, staging
        )
