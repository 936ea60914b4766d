"""The manifests of one run: reading them, finding the newest, and creating the next one."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict

from stitch.board import keys
from stitch.board.heads import Heads
from stitch.board.sequence import last_in_sequence
from stitch.board.stores.creation import Patience, create_record
from stitch.board.stores.store import ObjectStore
from stitch.errors import (
    CorruptRecordError,
    PublishConflictError,
    StoreError,
    UntrustedRecordError,
    VersionNotFoundError,
)
from stitch.records import Manifest
from stitch.types import MAX_VERSION, VersionRef, check_version

log = logging.getLogger("stitch.board")

MAX_MANIFEST_BYTES = 16 * 2**20
CACHE_SIZE = 1024


class Manifests:
    """All that reads or creates `v/<version>/manifest.json` of one run. Thread-safe."""

    def __init__(self, store: ObjectStore, run: str, heads: Heads, patience: Patience) -> None:
        self._store = store
        self._run = run
        self._heads = heads
        self._patience = patience
        self._lock = threading.Lock()
        self._cache: OrderedDict[int, Manifest] = OrderedDict()
        self._newest = 0
        self._damaged: set[int] = set()
        self._refusal: UntrustedRecordError | None = None
        self._told = ""

    def newest(self, after: int | None = None) -> int:
        """The newest published version, 0 if only the base exists.

        One request if nothing follows `after`, or what this object has seen before. A manifest
        that cannot be parsed keeps its place but is never the answer.
        """
        with self._lock:
            known = max(check_version(after or 0), self._newest)
            self._refusal = None
        version = last_in_sequence(self._exists, known, limit=MAX_VERSION, hint=self._heads.version)
        with self._lock:
            while version > known and version in self._damaged:
                version -= 1
            if version > known:
                self._newest = max(version, self._newest)
        return version

    @property
    def refusal(self) -> UntrustedRecordError | None:
        """Why the version after the newest is not taken for one, though it is there."""
        with self._lock:
            return self._refusal

    def get(self, version: int) -> Manifest:
        """The manifest of `version`; one that ought to be visible is waited for, within bounds.

        Raises VersionNotFoundError, or CorruptRecordError if it cannot be parsed.
        """
        manifest = self._load(version)
        if manifest is None and self._ought_to_exist(version):
            for _ in self._patience.tries():
                manifest = self._load(version)
                if manifest is not None:
                    break
        if manifest is None:
            raise VersionNotFoundError(self._not_found(version))
        return manifest

    def _ought_to_exist(self, version: int) -> bool:
        if version < 1:
            return False
        with self._lock:
            newest = self._newest
        return version <= max(newest, self._heads.version() or 0) or version <= self.newest()

    def _not_found(self, version: int) -> str:
        if version == 0:
            return f"version 0 of run {self._run!r} is its base and has no manifest"
        return f"run {self._run!r} has no version {version}; the newest is {self._newest}"

    def _load(self, version: int) -> Manifest | None:
        """The manifest, from the cache or the store; None if the store has none."""
        check_version(version)
        with self._lock:
            if version in self._cache:
                self._cache.move_to_end(version)
                return self._cache[version]
        if version == 0:
            return None
        key = keys.manifest(self._run, version)
        data = self._store.get(key, max_bytes=MAX_MANIFEST_BYTES)
        if data is None:
            return None
        manifest = self._parse(data, key, version)
        self._remember(manifest)
        return manifest

    def _parse(self, data: bytes, key: str, version: int) -> Manifest:
        manifest = Manifest.parse(data, key)
        if manifest.ref != VersionRef(self._run, version):
            raise CorruptRecordError(
                f"{key}: fields run and version say {manifest.ref}, "
                f"wanted {VersionRef(self._run, version)}"
            )
        return manifest

    def _remember(self, manifest: Manifest) -> None:
        with self._lock:
            self._cache[manifest.version] = manifest
            self._cache.move_to_end(manifest.version)
            self._damaged.discard(manifest.version)
            while len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)

    def _exists(self, version: int) -> bool:
        try:
            return self._load(version) is not None
        except UntrustedRecordError as error:
            # Nobody whom we trust published it: for us it is not there, and we say why.
            with self._lock:
                self._refusal = error
                is_news, self._told = str(error) != self._told, str(error)
            if is_news:
                log.warning("event=untrusted_manifest error=%s", error)
            return False
        except CorruptRecordError as error:
            with self._lock:
                first_time = version not in self._damaged
                self._damaged.add(version)
            if first_time:
                log.warning("event=damaged_manifest_ignored error=%s", error)
            return True

    def create(self, manifest: Manifest) -> None:
        """Publish `manifest`: when this returns, it is the version's manifest, durably.

        Raises PublishConflictError if another attempt published the version, and StoreError if
        the outcome is not known; committing the same manifest again then finds out.
        """
        key = keys.manifest(self._run, manifest.version)
        data = manifest.to_json_bytes()
        self._parse(data, key, manifest.version)
        found = create_record(self._store, key, data, self._patience)
        if found is not None and not found.strip(b"\0"):
            self._discard_torn(manifest.version, manifest.attempt)
            found = create_record(self._store, key, data, self._patience)
        if found is not None:
            winner = self._parse(found, key, manifest.version)
            if winner.attempt != manifest.attempt:
                raise PublishConflictError(
                    f"{manifest.ref} was published by {winner.writer!r} at unix time "
                    f"{winner.created_unix_s:.3f} (epoch {winner.epoch}, attempt "
                    f"{winner.attempt}), so {manifest.writer!r} (epoch {manifest.epoch}, attempt "
                    f"{manifest.attempt}) cannot publish it"
                )
        self._remember(manifest)
        with self._lock:
            self._newest = max(self._newest, manifest.version)

    def require(self, version: int) -> None:
        """VersionNotFoundError unless a version that was published is still on the board."""
        key = keys.manifest(self._run, version) if version else keys.run_record(self._run)
        for _ in self._patience.tries():
            if self._store.head(key) is not None:
                return
        raise VersionNotFoundError(
            f"version {version} of run {self._run!r} was on the board at {self._store.url}, but "
            f"{key} is gone: is this still the same board?"
        )

    def make_durable(self, version: int) -> None:
        """Make sure that a manifest that can be read here also survives power loss.

        Its writer may have died between creating it and syncing the folder. Creating it again
        fails, but only after the store made what is there durable.
        """
        manifest = self.get(version)
        key = keys.manifest(self._run, version)
        found = create_record(self._store, key, manifest.to_json_bytes(), self._patience)
        if found is not None and self._parse(found, key, version) != manifest:
            raise StoreError(f"{key} changed while it was read")

    def _discard_torn(self, version: int, attempt: str) -> None:
        """Delete an empty or all-zero manifest, which no reader took for a published version.

        Only the creator of the claim may, so nobody can delete what was created afterwards.
        """
        key = keys.manifest(self._run, version)
        claim = keys.torn_claim(self._run, version)
        if not self._store.put(claim, attempt.encode(), mode="create"):
            raise CorruptRecordError(
                f"{key} is empty or all zero, and {claim} says that a writer was replacing it: "
                "if no publisher is at work, delete both and publish again"
            )
        log.warning("event=torn_manifest_discarded key=%s", key)
        self._store.delete(key)
