"""From one snapshot to one published version: encode, upload, check the epoch, commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from stitch.board import Run
from stitch.codec import PatchEncoder
from stitch.codec.choice import Decode
from stitch.errors import (
    PublishConflictError,
    RetryableError,
    StaleEpochError,
    StitchError,
    StoreError,
    VersionNotFoundError,
)
from stitch.failpoints import reach
from stitch.mirror import Mirror
from stitch.publish.queue import Published
from stitch.publish.retry import RetryPolicy
from stitch.records import BlobRef, EpochRecord, Manifest
from stitch.tensors import HostWeights
from stitch.types import VersionRef

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Pipeline:
    """Publishes snapshots one after the other; called from one thread.

    `baseline` is the last version whose manifest this pipeline knows to exist. It moves when a
    manifest was created and at no other time, so a failed attempt is made up for by the next one.
    Memory beside baseline and snapshot: a few buckets and two encoded parts.
    """

    def __init__(
        self,
        run: Run,
        baseline: Mirror,
        epoch: EpochRecord,
        *,
        encoding: str = "auto",
        decode: Decode = "any",
        threads: int | None = None,
        retry: RetryPolicy,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        assert baseline.ref is not None
        self.run = run
        self.baseline = baseline
        self.epoch = epoch
        self.encoding = encoding
        self.decode = decode
        self.threads = threads
        self._retry = retry
        self._pause = pause
        self._num_attempts = 0
        self._doubtful: Manifest | None = None

    @property
    def ref(self) -> VersionRef:
        """The version that the next patch starts from."""
        assert self.baseline.ref is not None
        return self.baseline.ref

    @property
    def in_doubt(self) -> bool:
        """Whether the next `publish` may first have to move the baseline's weights in place."""
        return self._doubtful is not None

    def publish(self, snapshot: HostWeights, step: int | None) -> Published:
        """Publish `snapshot` as the version after `ref` and make it the baseline.

        Raises StaleEpochError or PublishConflictError if another publisher took over, what the
        store raises after retries, and whatever encoding raises; the baseline is then unchanged.
        """
        self._settle_doubt()
        self._num_attempts += 1
        attempt = f"{self.epoch.writer}-{self._num_attempts}"
        version = self.ref.version + 1
        encoder = PatchEncoder(
            self.baseline.weights,
            snapshot,
            before=self.baseline.digests,
            encoding=self.encoding,
            decode=self.decode,
            threads=self.threads,
        )
        blobs = self._upload(version, attempt, encoder.parts())
        manifest = Manifest(
            run=self.run.name,
            version=version,
            base_version=self.ref.version,
            digest_before=self.baseline.digest,
            digest_after=encoder.after.version_digest(),
            schema_digest=self.run.schema.digest,
            blobs=blobs,
            stats=encoder.stats,
            step=step,
            created_unix_s=time.time(),
            writer=self.epoch.writer,
            attempt=attempt,
            epoch=self.epoch.epoch,
        )
        self.check_epoch()
        reach("publish.before_manifest")
        self._commit(manifest)
        reach("publish.after_manifest")
        freed = self.baseline.weights
        self.baseline = Mirror(weights=snapshot, digests=encoder.after, ref=manifest.ref)
        self._write_head(version)
        return Published(ref=manifest.ref, stats=encoder.stats, freed=freed)

    def _upload(self, version: int, attempt: str, parts: Iterator[bytes]) -> tuple[BlobRef, ...]:
        """Store the parts, with threads while the next one is encoded; at most two are held."""
        named = ((f"{attempt}-{number}.patch", data) for number, data in enumerate(parts))
        if self.threads == 1:
            return tuple(self._put(version, name, data) for name, data in named)
        blobs: list[BlobRef] = []
        waiting: Future[BlobRef] | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="stitch-upload") as pool:
            for name, data in named:
                if waiting is not None:
                    blobs.append(waiting.result())
                waiting = pool.submit(self._put, version, name, data)
            if waiting is not None:
                blobs.append(waiting.result())
        return tuple(blobs)

    def _put(self, version: int, name: str, data: bytes) -> BlobRef:
        reach("publish.encoded")
        blob = self._try(f"put {name}", lambda: self.run.put_blob(version, name, data))
        reach("publish.blob")
        return blob

    def check_epoch(self) -> None:
        """Raise StaleEpochError if a newer epoch than this publisher's has begun."""
        mine = self.epoch.epoch
        newest = self._try("read epoch", lambda: self.run.board.current_epoch(after=mine))
        if newest is not None and newest.epoch > mine:
            raise StaleEpochError(
                f"run {self.run.name!r}: this publisher holds epoch {mine}, but {newest.writer} "
                f"began epoch {newest.epoch} for run {newest.run!r}; it owns the board now"
            )

    def _commit(self, manifest: Manifest) -> None:
        """Create the manifest, or find out that it exists; never return or raise on a guess."""
        try:
            self._try(f"commit {manifest.ref}", lambda: self.run.commit(manifest))
        except RetryableError as error:
            # The reply may have been lost after the manifest was created.
            self._doubtful = manifest
            if not self._look_up(manifest, error):
                raise
        self._doubtful = None

    def _look_up(self, manifest: Manifest, reason: BaseException) -> bool:
        """Whether `manifest` exists. Raises PublishConflictError if another one took its place."""
        try:
            found = self._try(
                f"read {manifest.ref}", lambda: self._manifest_or_none(manifest.version)
            )
        except RetryableError as error:
            raise StoreError(
                f"whether {manifest.ref} was published is not known: committing failed ({reason}) "
                f"and so did reading back ({error}); the next publish finds out before it encodes"
            ) from error
        if found is not None and found.attempt != manifest.attempt:
            raise PublishConflictError(
                f"{manifest.ref} was published by {found.writer} (attempt {found.attempt}), "
                f"not by this publisher (attempt {manifest.attempt})"
            )
        return found is not None

    def _manifest_or_none(self, version: int) -> Manifest | None:
        try:
            return self.run.manifest(version)
        except VersionNotFoundError:
            return None

    def _settle_doubt(self) -> None:
        """Find out what became of a commit without an answer, and follow it if it happened."""
        manifest = self._doubtful
        if manifest is None:
            return
        if self._look_up(manifest, StoreError("an earlier attempt had no answer")):
            log.warning("event=late_commit_found version=%s", manifest.ref)
            self._try(f"read back {manifest.ref}", lambda: self.baseline.step(self.run, manifest))
        self._doubtful = None

    def _write_head(self, version: int) -> None:
        try:
            self.run.write_head(version)
        except StitchError as error:  # a hint; the version is published
            log.warning("event=head_not_written version=%d error=%s", version, error)
        reach("publish.head")

    def _try(self, what: str, call: Callable[[], Result]) -> Result:
        return self._retry.run(what, call, pause=self._pause)
