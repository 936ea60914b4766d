"""A directory as an object store whose writes survive power loss.

obstore's local store makes writes atomic but not durable: it never syncs. Here an object's bytes
go through obstore to a temporary key that nobody can guess, the file is synced, obstore links it
(create) or renames it (overwrite) to its key, and the folder is synced, after any folder that
this process has not yet seen synced into its parent. Because a put returns only after the last
step, everything put before a manifest is on the disk before the manifest is.
See docs/protocol.md, "Durability on a directory".
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import obstore
from obstore.exceptions import AlreadyExistsError
from obstore.store import LocalStore

from stitch.board.keys import TEMPORARY_FOLDER, kind_of
from stitch.board.stores.store import ObjectInfo, ObstoreStore, PutMode, operation
from stitch.board.stores.store_errors import store_error, translated
from stitch.board.stores.uploads import UPLOAD_CHUNK_BYTES, UPLOAD_CONCURRENCY
from stitch.errors import StoreError, StoreUnsuitableError
from stitch.failpoints import reach

log = logging.getLogger("stitch.board")

PUT_ATTEMPTS = 3
"""Tries of one put whose temporary file somebody else swept away."""


class DirectoryStore(ObstoreStore):
    """An ObjectStore in `root`, which must be an existing directory."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        with translated("open", "the board's directory"):
            backend = LocalStore(self._root)
        super().__init__(backend, self._root.as_uri())
        self._identity = _identity(self._root)
        self._synced: set[Path] = {self._root}
        self._synced_lock = threading.Lock()

    @property
    def root(self) -> Path:
        return self._root

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        found = super().get(key, max_bytes=max_bytes)
        if found is None:
            self._check_root()
        return found

    def get_range(self, key: str, start: int, num_bytes: int) -> bytes | None:
        found = super().get_range(key, start, num_bytes)
        if found is None:
            self._check_root()
        return found

    def head(self, key: str) -> ObjectInfo | None:
        found = super().head(key)
        if found is None:
            self._check_root()
        return found

    def _check_root(self) -> None:
        """Raise StoreError if nothing can be said to be absent: the directory itself is gone.

        An unmounted file system leaves an empty directory behind, in which no version is newer.
        """
        with operation("look into", "the board's directory"):
            now = _identity(self._root)
            if now == self._identity:
                return
            with os.scandir(self._root) as entries:
                is_empty = next(entries, None) is None
        if is_empty:
            raise StoreError(
                "the board's directory is another one than before, and empty; is it unmounted?"
            )
        self._identity = now  # mounted again

    def put(self, key: str, source: bytes | Path, *, mode: PutMode) -> bool:
        for _ in range(PUT_ATTEMPTS):
            with operation("write", key):
                try:
                    return self._put_once(key, source, mode)
                except FileNotFoundError as error:
                    if isinstance(source, Path) and not source.exists():
                        raise store_error(error, f"write {key} from", source.name) from None
        raise StoreError(
            f"cannot write {key}: folders or files vanished in {PUT_ATTEMPTS} attempts"
        )

    def _put_once(self, key: str, source: bytes | Path, mode: PutMode) -> bool:
        kind = kind_of(key)
        durable = kind != "heartbeat"  # stale within seconds, and replaced by the next one
        folder = (self._root / key).parent
        self._make_folder(folder, durable)
        with self._temporary(source) as temporary:
            if durable:
                sync_path(self._root / temporary)
            reach(f"board.{kind}.temp")
            try:
                obstore.rename(self._backend, temporary, key, overwrite=mode == "overwrite")
                created = True
                reach(f"board.{kind}.created")
            except AlreadyExistsError:
                created = False
        if durable:
            # Also when the key was taken: its writer may have died before it came to this.
            sync_path(folder)
        return created

    @contextmanager
    def _temporary(self, source: bytes | Path) -> Iterator[str]:
        """A temporary key that holds `source`, gone at the end."""
        key = f"{TEMPORARY_FOLDER}/{secrets.token_hex(16)}"
        try:
            obstore.put(
                self._backend,
                key,
                source,
                chunk_size=UPLOAD_CHUNK_BYTES,
                max_concurrency=UPLOAD_CONCURRENCY,
            )
            yield key
        finally:
            with suppress(OSError):
                (self._root / key).unlink()

    def _make_folder(self, folder: Path, durable: bool) -> None:
        """Make `folder` and its parents below the root, each entry synced into its parent."""
        for path in reversed([folder, *folder.parents]):
            if not path.is_relative_to(self._root) or path == self._root:
                continue
            made = _make(path)
            with self._synced_lock:
                known = path in self._synced and not made
            if durable and not known:
                sync_path(path.parent)
                with self._synced_lock:
                    self._synced.add(path)

    def sweep_temporaries(self, older_than_s: float) -> int:
        """Delete temporary files that killed writers left, and return how many.

        Age is judged by the file system's clock alone. A temporary that is in use after all is
        written again by its writer.
        """
        folder = self._root / TEMPORARY_FOLDER
        num_deleted = 0
        with translated("sweep", TEMPORARY_FOLDER):
            if not folder.is_dir():
                return 0
            now_unix_s = self._file_system_clock(folder)
            for path in folder.iterdir():
                with suppress(FileNotFoundError):
                    if now_unix_s - path.lstat().st_mtime >= older_than_s:
                        path.unlink()
                        num_deleted += 1
        if num_deleted:
            log.info("event=temporaries_swept num_deleted=%d", num_deleted)
        return num_deleted

    def _file_system_clock(self, folder: Path) -> float:
        probe = folder / f"clock-{secrets.token_hex(16)}"
        descriptor = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, b"x")
            return os.fstat(descriptor).st_mtime
        finally:
            os.close(descriptor)
            probe.unlink(missing_ok=True)


def open_directory(root: Path, *, create: bool) -> DirectoryStore:
    """The store in `root`, which is made (and synced into its parent) if `create` is set."""
    with translated("open", "the board's directory"):
        missing = [path for path in (root, *root.parents) if not path.exists()]
        if missing and not create:
            raise StoreUnsuitableError(f"there is no directory {root}, and it was not to be made")
        for path in reversed(missing):
            _make(path)
            sync_path(path.parent)
        if not root.is_dir():
            raise StoreUnsuitableError(f"{root} is not a directory")
    return DirectoryStore(root)


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _make(path: Path) -> bool:
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True


def sync_path(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
        # Some network file systems cannot sync folders; they make entries durable themselves.
        log.debug("event=folder_sync_unsupported")
    finally:
        os.close(descriptor)
