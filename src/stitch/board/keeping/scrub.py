"""Checking everything that a run has on its board, by streaming; see `stitch fsck`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stitch.board import keys
from stitch.board.keeping.inventory import Inventory
from stitch.board.keeping.retired import Retention
from stitch.board.spans import Span
from stitch.board.stores.creation import Patience
from stitch.board.transfers import blobs
from stitch.errors import (
    CorruptBlobError,
    CorruptRecordError,
    UnsupportedFormatError,
    VersionNotFoundError,
)
from stitch.records import BlobRef

if TYPE_CHECKING:
    from stitch.board.log import Run

_UNREADABLE = (VersionNotFoundError, CorruptRecordError, UnsupportedFormatError)
_TWICE = Patience(num_tries=2)
DEFAULT_THREADS = 4


@dataclass(frozen=True, kw_only=True)
class Reached:
    """Versions `first` to `last`, and where a route to each of them starts that is intact."""

    first: int
    last: int
    from_base: bool
    from_anchor: int | None
    """The newest anchor from which they are reached."""

    @property
    def is_lost(self) -> bool:
        return not self.from_base and self.from_anchor is None


@dataclass(kw_only=True)
class Scrubbed:
    """What was found. Keys are those of the store."""

    newest: int
    num_objects: int = 0
    """Records and blobs that were read."""
    num_bytes: int = 0
    """Of blobs that are as they should be."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Key -> what is wrong with it."""
    removed: list[int] = field(default_factory=list)
    """Versions whose patches retention removed."""
    unnamed: list[str] = field(default_factory=list)
    """Blobs that no record names: of writers at work, or that died."""
    reached: list[Reached] = field(default_factory=list)

    @property
    def lost(self) -> list[tuple[int, int]]:
        """Ranges of versions to which no intact route leads from the base or an anchor."""
        return [(part.first, part.last) for part in self.reached if part.is_lost]


Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes to read)."""


def scrub(
    run: Run, *, threads: int = DEFAULT_THREADS, progress: Progress | None = None
) -> Scrubbed:
    """Read every record and blob of a run and check it against what names it.

    Memory: the listing, and a few pieces of blobs for each thread. Raises StoreError if the store
    fails; damage is not an error but a finding.
    """
    return _Scrubber(run).scrub(threads, progress)


@dataclass(frozen=True)
class _Blob:
    key: str
    ref: BlobRef
    step: str
    """What cannot be taken if it is damaged."""


class _Scrubber:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._retention: Retention | None = run.retention()
        self._inventory = Inventory.of(run)
        self._found = Scrubbed(newest=run.newest())
        self._bad_steps: set[str] = set()
        self._spans: list[Span] = []
        self._anchors: list[int] = []
        self._lock = threading.Lock()

    def scrub(self, threads: int, progress: Progress | None) -> Scrubbed:
        wanted = [*self._assets(), *self._patches(), *self._merged(), *self._anchored()]
        named = {blob.key for blob in wanted}
        self._found.unnamed = sorted(
            f"{self._run.name}/{key}"
            for key in self._inventory.deletable()
            if not key.endswith(".json") and f"{self._run.name}/{key}" not in named
        )
        self._read(wanted, threads, progress)
        self._found.reached = list(self._reach())
        return self._found

    # --- records -------------------------------------------------------------------------------

    def _assets(self) -> Iterator[_Blob]:
        run = self._run
        try:
            run.schema  # noqa: B018 - reading it checks it
            self._found.num_objects += 1
        except _UNREADABLE as error:
            self._damage(keys.schema(run.name, run.record.schema_digest), str(error))
        for ref in run.record.assets:
            yield _Blob(keys.asset(run.name, ref.name, ref.blake3), ref, "")

    def _patches(self) -> Iterator[_Blob]:
        before = self._run.record.base_digest
        for version in range(1, self._found.newest + 1):
            key, step = keys.manifest(self._run.name, version), keys.patch_step(version)
            try:
                manifest = self._run.manifest(version)
            except _UNREADABLE as error:
                self._damage(key, str(error), step)
                before = ""
                continue
            self._found.num_objects += 1
            if before and manifest.digest_before != before:
                problem = f"digest_before is {manifest.digest_before}, version {version - 1} has "
                self._damage(key, problem + before, step)
            before = manifest.digest_after
            names = [ref.name for ref in manifest.blobs]
            is_gone = self._retention is not None and not self._retention.has_patch(version)
            if is_gone and not all(self._inventory.has(version, name) for name in names):
                self._found.removed.append(version)
                self._bad_steps.add(step)
                continue
            for ref in manifest.blobs:
                yield _Blob(keys.blob(self._run.name, version, ref.name), ref, step)

    def _merged(self) -> Iterator[_Blob]:
        for start, version in self._run.merged_spans():
            step = keys.merged_step(start, version)
            try:
                merged = self._run.merged(start, version)
            except _UNREADABLE as error:
                self._damage(keys.merged(self._run.name, start, version), str(error), step)
                continue
            if merged is None:
                continue  # deleted since it was listed
            self._found.num_objects += 1
            self._spans.append((start, version))
            for ref in merged.blobs:
                yield _Blob(keys.blob(self._run.name, version, ref.name), ref, step)

    def _anchored(self) -> Iterator[_Blob]:
        for version in self._run.anchors():
            key, step = keys.anchor(self._run.name, version), keys.anchor_step(version)
            try:
                anchor = self._run.anchor(version)
                digest = self._run.digest(version)
            except _UNREADABLE as error:
                self._damage(key, str(error), step)
                continue
            if anchor is None:
                continue
            self._found.num_objects += 1
            self._anchors.append(version)
            if anchor.digest != digest:
                self._damage(key, f"digest is {anchor.digest}, the version has {digest}", step)
            for ref in anchor.files:
                yield _Blob(keys.blob(self._run.name, version, ref.name), ref, step)

    def _damage(self, key: str, problem: str, step: str = "") -> None:
        with self._lock:
            self._found.damaged[key] = problem
            if step:
                self._bad_steps.add(step)

    # --- blobs ---------------------------------------------------------------------------------

    def _read(self, wanted: list[_Blob], threads: int, progress: Progress | None) -> None:
        total_bytes = sum(blob.ref.num_bytes for blob in wanted)
        done_bytes = 0
        with ThreadPoolExecutor(threads, thread_name_prefix="stitch-scrub") as pool:
            try:
                for blob in pool.map(self._check, wanted):
                    done_bytes += blob.ref.num_bytes
                    if progress is not None:
                        progress(done_bytes, total_bytes)
            finally:
                pool.shutdown(cancel_futures=True)

    def _check(self, blob: _Blob) -> _Blob:
        try:
            blobs.check_blob(self._run.board.store, blob.key, blob.ref, _TWICE)
            with self._lock:
                self._found.num_objects += 1
                self._found.num_bytes += blob.ref.num_bytes
        except CorruptBlobError as error:
            self._damage(blob.key, str(error), blob.step)
        return blob

    # --- routes --------------------------------------------------------------------------------

    def _reach(self) -> Iterator[Reached]:
        """Stretches of versions that are reached from the same starts, by steps that are whole."""
        ways: dict[int, list[int]] = {}
        for start, version in self._spans:
            if keys.merged_step(start, version) not in self._bad_steps:
                ways.setdefault(version, []).append(start)
        anchors = {v for v in self._anchors if keys.anchor_step(v) not in self._bad_steps}
        base = [True]
        anchored: list[int | None] = [0 if 0 in anchors else None]
        for version in range(1, self._found.newest + 1):
            froms = list(ways.get(version, []))
            if keys.patch_step(version) not in self._bad_steps:
                froms.append(version - 1)
            base.append(any(base[start] for start in froms))
            newest = max((a for s in froms if (a := anchored[s]) is not None), default=None)
            anchored.append(version if version in anchors else newest)
        return _stretches(base, anchored)


def _stretches(base: list[bool], anchored: list[int | None]) -> Iterator[Reached]:
    first = 0
    for version in range(1, len(base) + 1):
        if version == len(base) or (base[version], anchored[version]) != (
            base[first],
            anchored[first],
        ):
            yield Reached(
                first=first, last=version - 1, from_base=base[first], from_anchor=anchored[first]
            )
            first = version
