"""Merged patches of one run: records beside the manifests, read, created and remembered."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from stitch.board import keys, spans
from stitch.board.stores.creation import Patience, create_record
from stitch.board.stores.store import ObjectStore
from stitch.board.transfers import blobs
from stitch.errors import BaseMismatchError, CorruptRecordError, SchemaMismatchError, UsageError
from stitch.records import MergedPatch, RunRecord

MAX_MERGED_BYTES = 16 * 2**20
CACHE_SIZE = 1024


class MergedPatches:
    """All that reads or creates `v/<version>/from-<version>.json` of one run. Thread-safe.

    `digest` says which digest a version has. A record is believed only if it leads from and to the
    digests that the manifests of its ends state.
    """

    def __init__(
        self,
        store: ObjectStore,
        record: RunRecord,
        digest: Callable[[int], str],
        patience: Patience,
    ) -> None:
        self._store = store
        self._record = record
        self._digest = digest
        self._patience = patience
        self._lock = threading.Lock()
        self._cache: OrderedDict[spans.Span, MergedPatch] = OrderedDict()

    def get(self, start: int, version: int) -> MergedPatch | None:
        """The merged patch from `start` to `version`, None if there is none (not remembered).

        Raises CorruptRecordError for a damaged record or one that leads elsewhere,
        VersionNotFoundError if the manifest of one of its ends is missing.
        """
        with self._lock:
            found = self._cache.get((start, version))
        if found is not None:
            return found
        key = keys.merged(self._record.run, start, version)
        data = self._store.get(key, max_bytes=MAX_MERGED_BYTES)
        if data is None:
            return None
        merged = self._parse(data, key, start, version)
        self._remember(merged)
        return merged

    def _parse(self, data: bytes, key: str, start: int, version: int) -> MergedPatch:
        merged = MergedPatch.parse(data, key)
        if (merged.run, merged.base_version, merged.version) != (self._record.run, start, version):
            raise CorruptRecordError(
                f"{key}: fields run, base_version and version say {merged.run}, "
                f"{merged.base_version} and {merged.version}"
            )
        self._check(merged, CorruptRecordError, key)
        return merged

    def _check(
        self, merged: MergedPatch, kind: type[CorruptRecordError | BaseMismatchError], what: str
    ) -> None:
        for version, field, digest in (
            (merged.base_version, "digest_before", merged.digest_before),
            (merged.version, "digest_after", merged.digest_after),
        ):
            wanted = self._digest(version)
            if digest != wanted:
                raise kind(f"{what}: field {field} is {digest}, version {version} has {wanted}")

    def _remember(self, merged: MergedPatch) -> None:
        with self._lock:
            self._cache[merged.base_version, merged.version] = merged
            while len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)

    def forget(self, start: int, version: int) -> None:
        """Ask the store again next time: the record may be gone."""
        with self._lock:
            self._cache.pop((start, version), None)

    def create(self, merged: MergedPatch) -> MergedPatch:
        """Create the record after its blobs; return it, or the one that was there first.

        BaseMismatchError if it does not lead between the two versions, UsageError if no reader
        would look for it, CorruptBlobError if a blob is missing or short.
        """
        run, start, version = merged.run, merged.base_version, merged.version
        if run != self._record.run or not spans.is_span(start, version):
            raise UsageError(
                f"a merged patch from {start} to {version} of run {run!r} cannot go to run "
                f"{self._record.run!r}: its length must be a power of two, at least "
                f"{spans.MIN_SPAN}, that divides {start}"
            )
        if merged.schema_digest != self._record.schema_digest:
            raise SchemaMismatchError(
                f"the merged patch from {start} to {merged.ref} has schema "
                f"{merged.schema_digest}, its run has {self._record.schema_digest}"
            )
        self._check(merged, BaseMismatchError, f"the merged patch from {start} to {merged.ref}")
        key = keys.merged(run, start, version)
        data = merged.to_json_bytes()
        self._parse(data, key, start, version)
        for ref in merged.blobs:
            blobs.require_blob(self._store, keys.blob(run, version, ref.name), ref, self._patience)
        found = create_record(self._store, key, data, self._patience)
        if found is not None:
            merged = self._parse(found, key, start, version)
        self._remember(merged)
        return merged


def list_merged(store: ObjectStore, run: str) -> list[spans.Span]:
    """(from, to) of all records of merged patches, ascending; stray names are ignored."""
    found = []
    for info in store.list_objects(keys.versions_folder(run)):
        match info.key.split("/"):
            case [_, "v", folder, name]:
                start, stop = keys.parse_merged(name), keys.parse_number(folder)
                if start is not None and stop is not None and spans.is_span(start, stop):
                    found.append((start, stop))
    return sorted(found)
