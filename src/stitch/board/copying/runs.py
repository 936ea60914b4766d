"""Copying one run: what its record names, then version by version, manifests last and in order."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from stitch.board import keys
from stitch.board.copying.extras import Extras
from stitch.board.copying.objects import NUM_AHEAD, Carrier, Copied
from stitch.board.copying.removed import RemovedPatches
from stitch.board.log import Run
from stitch.errors import (
    CopyConflictError,
    CorruptBlobError,
    CorruptRecordError,
    RunNotFoundError,
)
from stitch.failpoints import reach
from stitch.records import Manifest, RunRecord
from stitch.types import VersionRef

if TYPE_CHECKING:
    from stitch.board.board import Board

log = logging.getLogger("stitch.board")

HEAD_EVERY = 256
"""Versions after which readers of the target get a hint, while many are copied."""


class RunCopier:
    """Copies one run. Used by one thread; `stop()` is asked between versions.

    The target's run is looked at anew with every copy: another copier may be at work there.
    """

    def __init__(
        self, source: Run, target: Board, carrier: Carrier, stop: Callable[[], bool]
    ) -> None:
        self._source = source
        self._board = target
        self._carrier = carrier
        self._stop = stop
        self._target: Run | None = None
        self._at = 0
        self._digest = source.record.base_digest
        self._removed = RemovedPatches(source, target)
        self._extras = Extras(source, target, carrier)

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def at(self) -> int:
        """The newest version that is known to be on the target."""
        return self._at

    def has_next(self) -> bool:
        """Whether the source has a version that the target lacks; one request if not."""
        return self._source.newest(self._at) > self._at

    def copy(self, *, extras: bool = True) -> Copied:
        """Bring over all that the target lacks, with `extras` merged patches and anchors, too.

        Raises CopyConflictError, and what the stores raise.
        """
        done = Copied()
        before = self._carrier.written_bytes
        if self._target is None:
            done.runs = self._begin()
        done.versions = self._copy_versions()
        if extras and not self._stop():
            self._extras.copy(self._at, done)
        done.num_bytes = self._carrier.written_bytes - before
        done.newest[self.name] = self._at
        return done

    # --- the run's record ----------------------------------------------------------------------

    def _begin(self) -> int:
        """Have the run on the target; how many were made (0 or 1). What both have must be equal."""
        key = keys.run_record(self.name)
        data = self._carrier.expected_record(key)
        record = RunRecord.parse(data, key)
        try:
            self._board.open_run(self.name)
            is_new = False
        except RunNotFoundError:
            is_new = True
            self._board.check_store()
            self._carrier.expect(record.assets)
            for ref in record.assets:
                self._carrier.carry(keys.asset(self.name, ref.name, ref.blake3), ref)
            schema = keys.schema(self.name, record.schema_digest)
            self._carrier.create(schema, self._carrier.expected_record(schema))
        self._carrier.create(key, data)
        self._target = self._board.open_run(self.name)
        self._take_up(self._target.newest())
        return int(is_new)

    def _take_up(self, version: int) -> None:
        """Go on from the target's newest version, which must be the source's, byte for byte."""
        if version > self._at:
            key = keys.manifest(self.name, version)
            data = self._carrier.record(key)
            if data is None:
                raise CopyConflictError(
                    f"run {self.name!r} has version {version} on {self._board.url}, but not on "
                    f"{self._source.board.url}: somebody else publishes there"
                )
            self._carrier.create(key, data)  # and so it is durable there
            self._at, self._digest = version, Manifest.parse(data, key).digest_after

    # --- versions ------------------------------------------------------------------------------

    def _copy_versions(self) -> int:
        """Copy what is newer than on the target; how many versions were created there."""
        assert self._target is not None
        newest = self._source.newest(self._at)
        if newest == self._at:
            return 0
        self._take_up(min(newest, self._target.newest(self._at)))
        first = self._at
        with ThreadPoolExecutor(NUM_AHEAD, thread_name_prefix="stitch-copy") as pool:
            waiting: deque[tuple[int, Future[bytes]]] = deque()
            try:
                for version in self._wanted(newest):
                    waiting.append((version, pool.submit(self._carry_version, version)))
                    if len(waiting) == NUM_AHEAD:
                        self._publish(*waiting.popleft())
                while waiting and not self._stop():
                    self._publish(*waiting.popleft())
            finally:
                for _, future in waiting:
                    future.cancel()
                if self._at > first:
                    self._target.write_head(self._at)
        return self._at - first

    def _wanted(self, newest: int) -> Iterator[int]:
        for version in range(self._at + 1, newest + 1):
            if self._stop():
                return
            yield version

    def _carry_version(self, version: int) -> bytes:
        """Bring a version's blobs over; its manifest as it is on the source."""
        key = keys.manifest(self.name, version)
        data = self._carrier.expected_record(key)
        manifest = Manifest.parse(data, key)
        if manifest.ref != VersionRef(self.name, version):
            raise CorruptRecordError(f"{key}: fields run and version say {manifest.ref}")
        if self._removed.covers(version):
            return data
        self._carrier.expect(manifest.blobs)
        try:
            for ref in manifest.blobs:
                self._carrier.carry(keys.blob(self.name, version, ref.name), ref)
        except CorruptBlobError:
            if not self._removed.covers(version, look_again=True):
                raise
        return data

    def _publish(self, version: int, carried: Future[bytes]) -> None:
        assert self._target is not None
        data = carried.result()
        key = keys.manifest(self.name, version)
        manifest = Manifest.parse(data, key)
        if manifest.digest_before != self._digest:
            raise CorruptRecordError(
                f"{key}: field digest_before is {manifest.digest_before}, but version "
                f"{version - 1} ends in {self._digest}"
            )
        self._carrier.create(key, data)
        self._at, self._digest = version, manifest.digest_after
        log.info("event=copied run=%s version=%d", self.name, version)
        reach("copy.version.done")
        if version % HEAD_EVERY == 0:
            self._target.write_head(version)
