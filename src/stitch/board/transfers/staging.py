"""Half-fetched blobs on disk, which the next process goes on with.

A blob is appended to a file that is named after its BLAKE3, so what is there is a beginning of it,
however its writer ended. Going on reads that beginning again for the hash; if power loss spoilt it,
the hash tells, and the blob is fetched anew. Nothing leaves the folder before its hash is right.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypeVar

from blake3 import blake3

from stitch.board.stores.creation import Patience
from stitch.board.stores.store import ObjectStore
from stitch.board.stores.store_errors import translated
from stitch.board.transfers import blobs
from stitch.errors import StoreFullError, StoreUnsuitableError
from stitch.failpoints import reach
from stitch.records import BlobRef

log = logging.getLogger("stitch.board")

KEEP_S = 24 * 3600.0
"""Beginnings that nobody went on with for so long are deleted by the next user of the folder."""

FOLDER_TRIES = 10
"""How often the folder is made again while others remove it."""

_READ_BYTES = 4 * 2**20

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _Staged:
    """A file that this process holds the lock of."""

    path: Path
    file: BinaryIO
    is_private: bool
    """Not to be found by the next process: another one holds the proper name."""


class Staging:
    """A folder of half-fetched blobs, used by one thread: `with Staging(folder) as staging`.

    The folder is made with access for its owner alone, and refused if it is not. Several processes
    may use one folder; each blob is appended to by one of them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, _Staged] = {}

    def __enter__(self) -> Self:
        with translated("use", f"the staging folder {self._folder.name}"):
            self._in_folder(self._sweep)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let go of all files. What was not taken stays for the next try, unless space ran out."""
        for staged in self._held.values():
            is_empty = os.fstat(staged.file.fileno()).st_size == 0
            if staged.is_private or is_empty or isinstance(error, StoreFullError):
                staged.path.unlink(missing_ok=True)
            staged.file.close()
        self._held.clear()
        with suppress(OSError):
            self._folder.rmdir()  # if it is empty

    def fetch(
        self, store: ObjectStore, key: str, ref: BlobRef, patience: Patience
    ) -> Iterator[int]:
        """Bring the blob into the folder, yielding how many bytes were gained (lost, if negative).

        CorruptBlobError, naming the key, if the store holds another blob; StoreFullError.
        """
        with translated("stage", key):
            file = self._hold(ref).file
            start, found = yield from self._append(file, store, key, ref, patience)
            if start and found != ref.blake3:
                log.warning("event=staged_blob_spoilt key=%s start=%d", key, start)
                yield -ref.num_bytes
                _, found = yield from self._append(file, store, key, ref, patience)
            blobs.check_hash(key, found, ref)

    def _append(
        self, file: BinaryIO, store: ObjectStore, key: str, ref: BlobRef, patience: Patience
    ) -> Generator[int, None, tuple[int, str]]:
        """Go on at the file's end; returns where that was, and the BLAKE3 of the whole.

        Nothing stays in the file if that is not the blob's.
        """
        hasher = blake3()
        start = _hash_beginning(file, hasher, ref.num_bytes)
        if start:
            log.info("event=fetch_resumed key=%s start=%d num_bytes=%d", key, start, ref.num_bytes)
        yield start
        if start < ref.num_bytes:
            with closing(blobs.open_blob(store, key, ref, patience, start)) as pieces:
                for piece in pieces:
                    hasher.update(piece)
                    file.write(piece)
                    reach("board.staged")
                    yield len(piece)
        file.flush()
        found = hasher.hexdigest()
        if found == ref.blake3:
            os.fsync(file.fileno())
        else:
            file.truncate(0)
        return start, found

    def read(self, ref: BlobRef) -> bytes:
        """The bytes of a blob that was fetched."""
        with translated("read", f"the staged blob {ref.name}"):
            file = self._held[ref.blake3].file
            file.seek(0)
            return file.read()

    def path(self, ref: BlobRef) -> Path:
        """Where a blob that was fetched lies, until it is taken or dropped."""
        return self._held[ref.blake3].path

    def take(self, ref: BlobRef, target: Path) -> None:
        """Move a blob that was fetched to `target`, in the same file system."""
        with translated("move", f"the staged blob {ref.name}"):
            staged = self._held.pop(ref.blake3)
            os.rename(staged.path, target)
            staged.file.close()

    def drop(self, ref: BlobRef) -> None:
        """Delete a blob that is not needed any more."""
        staged = self._held.pop(ref.blake3)
        staged.path.unlink(missing_ok=True)
        staged.file.close()

    def _in_folder(self, use: Callable[[], T]) -> T:
        """Make the folder and use it; again if another user, who found it empty, removed it."""
        num_removed = 0
        while True:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                check_private(self._folder, "the staging folder", "another scratch directory")
                return use()
            except (FileNotFoundError, FileExistsError):
                num_removed += 1
                if num_removed == FOLDER_TRIES:
                    raise

    def _hold(self, ref: BlobRef) -> _Staged:
        found = self._held.get(ref.blake3)
        if found is None:
            found = self._lock(ref)
            self._held[ref.blake3] = found
        return found

    def _lock(self, ref: BlobRef) -> _Staged:
        path = self._folder / f"{ref.blake3}.partial"
        file = self._open(path)
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(file, path):
                return _Staged(path=path, file=file, is_private=False)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.ENOLCK, errno.ENOTSUP):
                file.close()
                raise
        # Another process is at it, or has just moved it to where it belongs.
        file.close()
        path = self._folder / f"{ref.blake3}.{secrets.token_hex(8)}.partial"
        return _Staged(path=path, file=self._open(path), is_private=True)

    def _open(self, path: Path) -> BinaryIO:
        return self._in_folder(lambda: _open(path))

    def _sweep(self) -> None:
        """Delete beginnings that nobody holds or came back for, by the file system's clock."""
        os.utime(self._folder)
        now_unix_s = self._folder.stat().st_mtime
        for path in self._folder.glob("*.partial"):
            with suppress(OSError):
                if now_unix_s - path.lstat().st_mtime < KEEP_S:
                    continue
                with _open(path) as file:
                    fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


def staging_folder(scratch: Path | None) -> Path:
    """Where half-fetched blobs wait: below `scratch`, or this user's own in the system's folder for
    temporary files."""
    if scratch is not None:
        return scratch / "stitch-staging"
    return Path(tempfile.gettempdir()) / f"stitch-staging-{os.geteuid()}"


def check_private(folder: Path, what: str, instead: str) -> None:
    """StoreUnsuitableError unless `folder` is this user's own, and nobody else may write to it."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise StoreUnsuitableError(f"{what} {folder} is not a folder of this user; give {instead}")
    if found.st_mode & 0o022:
        raise StoreUnsuitableError(
            f"others may write to {what} {folder}; take that right away (chmod go-w) or give "
            f"{instead}"
        )


def _open(path: Path) -> BinaryIO:
    """For reading and appending; made if missing, with the usual rights: the folder is private.

    Links are not followed.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "r+b")


def is_at(file: BinaryIO, path: Path) -> bool:
    """Whether `path` still leads to the open file."""
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    here = os.fstat(file.fileno())
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _hash_beginning(file: BinaryIO, hasher: blake3, num_bytes: int) -> int:
    """Feed what the file holds to `hasher`; it is left at its end. Returns how many bytes."""
    if os.fstat(file.fileno()).st_size > num_bytes:
        file.truncate(0)
    file.seek(0)
    start = 0
    while chunk := file.read(_READ_BYTES):
        hasher.update(chunk)
        start += len(chunk)
    return start
