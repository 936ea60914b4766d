"""Copying single objects: blobs proven on the way, records by create-if-absent."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from stitch.board.stores.creation import MAX_RECORD_BYTES, create_record
from stitch.board.transfers import blobs
from stitch.board.transfers.staging import Staging, staging_folder
from stitch.errors import (
    CopyConflictError,
    CorruptBlobError,
    RetryableError,
    StoreError,
    StoreFullError,
)
from stitch.failpoints import reach
from stitch.records import BlobRef

if TYPE_CHECKING:
    from stitch.board.board import Board

log = logging.getLogger("stitch.board")

IN_MEMORY_BYTES = 16 * 2**20
"""Larger blobs go through the scratch directory, where a copy that ends early is gone on with."""

NUM_AHEAD = 4
"""Versions, or files of an anchor, that are on their way at the same time."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes known to be needed)."""


class CopyStoppedError(RetryableError):
    """The copy was told to stop; the next one goes on."""


@dataclass(kw_only=True)
class Copied:
    """What was written to the target. Counts things that were not there before."""

    runs: int = 0
    versions: int = 0
    merged: int = 0
    anchors: int = 0
    epochs: int = 0
    num_bytes: int = 0
    """Of blobs."""
    newest: dict[str, int] = field(default_factory=dict)
    """Run -> its newest version on the target."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Record of a merged patch or anchor -> why it was not copied; the next round tries again."""

    def add(self, other: Copied) -> None:
        for name in ("runs", "versions", "merged", "anchors", "epochs", "num_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.newest |= other.newest
        self.left_out |= other.left_out

    @property
    def is_news(self) -> bool:
        return any((self.runs, self.versions, self.merged, self.anchors, self.epochs))


class Carrier:
    """Moves objects from a source board's store to a target's. Thread-safe."""

    def __init__(
        self,
        source: Board,
        target: Board,
        *,
        scratch: Path | None = None,
        progress: Progress | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stop = stop
        self._source = source
        self._target = target
        self._staging = staging_folder(scratch)
        self._progress = progress
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._wanted_bytes = 0
        self.written_bytes = 0

    def record(self, key: str) -> bytes | None:
        """The bytes of a record on the source; None if it is not there (yet)."""
        return self._source.store.get(key, max_bytes=MAX_RECORD_BYTES)

    def expected_record(self, key: str) -> bytes:
        """The bytes of a record that is known to exist; one that stays invisible is waited for."""
        for _ in self._source.patience.tries():
            data = self.record(key)
            if data is not None:
                return data
        raise StoreError(f"{key} was on the source, but cannot be read there now")

    def create(self, key: str, data: bytes) -> None:
        """Create the record on the target; CopyConflictError if another one is there."""
        if self.offer(key, data) is not None:
            raise CopyConflictError(
                f"{key} on {self._target.url} is not the one on {self._source.url}: somebody else "
                "wrote there, and nothing was overwritten; copy to a board of its own"
            )

    def offer(self, key: str, data: bytes) -> bytes | None:
        """Create the record on the target; None if it holds `data` now, else what was there."""
        reach("copy.record")
        return create_record(self._target.store, key, data, self._target.patience)

    def expect(self, refs: tuple[BlobRef, ...]) -> None:
        """Count these blobs to what is needed; each of them has to be carried then."""
        with self._lock:
            self._wanted_bytes += sum(ref.num_bytes for ref in refs)

    def carry(self, key: str, ref: BlobRef) -> None:
        """Have the blob on the target, proven by size and BLAKE3 on its way.

        Raises CorruptBlobError if the source does not have it, StoreFullError and StoreError.
        """
        if ref.num_bytes > IN_MEMORY_BYTES:
            self._carry_large(key, ref)
        else:
            self._put(key, ref, self._read(key, ref))
        reach("copy.blob.done")

    def _read(self, key: str, ref: BlobRef) -> bytes:
        data = blobs.read_blob(self._source.store, key, ref, self._source.patience)
        self._advance(ref.num_bytes)
        return data

    def _carry_large(self, key: str, ref: BlobRef) -> None:
        if self._target.store.head(key) is not None and self._is_right(key, ref):
            self._advance(ref.num_bytes)
            return
        with Staging(self._staging) as staging:
            fetched = staging.fetch(self._source.store, key, ref, self._source.patience)
            for num_bytes in fetched:
                self._advance(num_bytes)
                if self._stop():
                    raise CopyStoppedError(f"stopped while {key} was copied")
            self._put(key, ref, staging.path(ref))
            staging.drop(ref)

    def _put(self, key: str, ref: BlobRef, source: bytes | Path) -> None:
        """Create the blob. What else lies at a key that only this content can have is replaced."""
        store = self._target.store
        created = self._tried(lambda: store.put(key, source, mode="unique"))
        if not created and not self._is_right(key, ref):
            log.warning("event=copied_blob_replaced key=%s", key)
            self._tried(lambda: store.put(key, source, mode="overwrite"))
            created = True
        with self._lock:
            self.written_bytes += ref.num_bytes if created else 0

    def _is_right(self, key: str, ref: BlobRef) -> bool:
        """Whether the target holds this blob; it is read there, in pieces."""
        try:
            blobs.check_blob(self._target.store, key, ref, self._target.patience)
            return True
        except CorruptBlobError as error:
            log.warning("event=copied_blob_wrong error=%s", error)
            return False

    def _tried(self, put: Callable[[], bool]) -> bool:
        problem: StoreError | None = None
        for _ in self._target.patience.tries():
            try:
                return put()
            except StoreFullError:
                raise
            except StoreError as error:
                problem = error
        assert problem is not None
        raise problem

    def _advance(self, num_bytes: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes
            done, wanted = self._done_bytes, self._wanted_bytes
        if self._progress is not None:
            self._progress(done, max(done, wanted))
