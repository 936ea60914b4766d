"""A folder of blobs that the processes of one host share, so that each is fetched once.

Entries are named after their BLAKE3 and never changed. Whoever has one open reads on when it is
evicted, for it is only unlinked then; so nobody counts readers. One process at a time fills an
entry, appending to a file that it has locked: the system takes the lock back when it is killed, and
the next one goes on with what is there. An entry is hashed whenever it is opened.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from stitch.board.stores.store_errors import translated
from stitch.board.transfers.staging import check_private, is_at
from stitch.errors import UsageError
from stitch.failpoints import reach
from stitch.records import BlobRef

log = logging.getLogger("stitch.board")

READ_BYTES = 4 * 2**20

_ENTRY = re.compile(r"[0-9a-f]{64}\.blob", re.ASCII)
_PARTIAL = re.compile(r"[0-9a-f]{64}-([0-9]{1,18})\.partial", re.ASCII)


class BlobCache:
    """The cache in `folder`, which is made for its owner alone and refused if it is not.

    Thread-safe, and shared by any number of processes of one user on one host. `max_bytes` bounds
    entries and those being filled together; what is evicted while it is read frees its space later.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        if max_bytes < 1:
            raise UsageError(f"max_bytes of a cache must be above 0, got {max_bytes}")
        self._folder = folder.expanduser().absolute()
        self.max_bytes = max_bytes
        with translated("use", f"the cache {folder.name}"):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(self._folder, "the cache", "another directory")

    def open(self, ref: BlobRef) -> BinaryIO | None:
        """The blob, proven, at its beginning; None if it is not here. OSError if that is not known.

        A damaged entry is deleted.
        """
        path = self._entry(ref)
        try:
            file = _open(path, os.O_RDONLY, "rb")
        except FileNotFoundError:
            return None
        try:
            if _is_right(file, ref):
                found = os.fstat(file.fileno())
                os.utime(path, ns=(time.time_ns(), found.st_mtime_ns))  # used now
                return file
            log.warning("event=cache_entry_damaged name=%s", path.name)
            if is_at(file, path):
                path.unlink(missing_ok=True)
        except FileNotFoundError:  # evicted meanwhile; what is open can be read
            return file
        except BaseException:
            file.close()
            raise
        file.close()
        return None

    def begin(self, ref: BlobRef) -> Filling | None:
        """The right to fill the entry of `ref`; None while another one has it.

        OSError if the folder cannot be used, or is full of what is being filled.
        """
        path = self._folder / f"{ref.blake3}-{ref.num_bytes}.partial"
        file = _open(path, os.O_RDWR | os.O_CREAT, "r+b")
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not is_at(file, path):  # finished, or evicted, since it was opened
                file.close()
                return None
            filling = Filling(file, path, self._entry(ref), ref)
        except BlockingIOError:
            file.close()
            return None
        except BaseException:
            file.close()
            raise
        if not self._make_room():
            filling.discard()
            raise OSError("the cache is full of what is being fetched")
        return filling

    def filled_bytes(self, ref: BlobRef) -> int:
        """How far the one who fills this entry has come; 0 if nobody has begun."""
        path = self._folder / f"{ref.blake3}-{ref.num_bytes}.partial"
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return 0

    def _entry(self, ref: BlobRef) -> Path:
        return self._folder / f"{ref.blake3}.blob"

    # --- room ----------------------------------------------------------------------------------

    def _make_room(self) -> bool:
        """Evict what was used longest ago until all fits, files being filled at their full size.

        Everyone makes its own file before it looks, so two at once both see both.
        """
        files = sorted(self._files(), key=lambda file: file.used_ns)
        total_bytes = sum(file.num_bytes for file in files)
        for file in files:
            if total_bytes <= self.max_bytes:
                break
            if _evict(file):
                total_bytes -= file.num_bytes
        return total_bytes <= self.max_bytes

    def _files(self) -> Iterator[_File]:
        with os.scandir(self._folder) as entries:
            for entry in entries:
                partial = _PARTIAL.fullmatch(entry.name)
                if partial is None and not _ENTRY.fullmatch(entry.name):
                    continue
                with suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    yield _File(
                        path=Path(entry.path),
                        num_bytes=int(partial.group(1)) if partial else found.st_size,
                        used_ns=found.st_mtime_ns if partial else found.st_atime_ns,
                        is_partial=partial is not None,
                    )


@dataclass(frozen=True, kw_only=True)
class _File:
    path: Path
    num_bytes: int
    used_ns: int
    is_partial: bool


class Filling:
    """An entry being filled by this process, at its end: `write` all that is missing, `finish`.

    What cannot be written (a full disk) discards it; writing and finishing then do nothing.
    """

    def __init__(self, file: BinaryIO, path: Path, entry: Path, ref: BlobRef) -> None:
        self._file: BinaryIO | None = file
        self._path = path
        self._entry = entry
        if os.fstat(file.fileno()).st_size > ref.num_bytes:
            file.truncate(0)
        self.num_bytes = file.seek(0, os.SEEK_END)
        """How much was there when it was begun."""

    @property
    def is_alive(self) -> bool:
        return self._file is not None

    def begun(self) -> Iterator[bytes]:
        """What is there, in pieces; leaves it at its end."""
        assert self._file is not None
        self._file.seek(0)
        yield from pieces_of(self._file)

    def write(self, piece: bytes) -> None:
        if self._file is None:
            return
        try:
            left = memoryview(piece)
            while left:
                left = left[os.write(self._file.fileno(), left) :]
            reach("cache.written")
        except OSError as error:
            log.warning("event=cache_not_written name=%s error=%s", self._path.name, error.strerror)
            self.discard()

    def restart(self) -> None:
        """Throw away what is there, and go on."""
        assert self._file is not None
        self._file.seek(0)
        self._file.truncate(0)

    def finish(self) -> None:
        """Make it an entry, whose content was proven by the caller."""
        if self._file is None:
            return
        try:
            os.rename(self._path, self._entry)
            reach("cache.filled")
        except OSError as error:
            log.warning("event=cache_not_written name=%s error=%s", self._path.name, error.strerror)
            self.discard()
            return
        self._file.close()
        self._file = None

    def discard(self) -> None:
        """Delete what is there."""
        if self._file is not None:
            with suppress(OSError):
                self._path.unlink()
            self._file.close()
        self._file = None

    def close(self) -> None:
        """Let go of it; the next one goes on with what was written, if anything was."""
        if self._file is not None:
            if os.fstat(self._file.fileno()).st_size == 0:
                self._path.unlink(missing_ok=True)
            self._file.close()
        self._file = None


def _is_right(file: BinaryIO, ref: BlobRef) -> bool:
    """Whether a file holds the blob; leaves it at its beginning."""
    if os.fstat(file.fileno()).st_size != ref.num_bytes:
        return False
    hasher = blake3()
    for piece in pieces_of(file):
        hasher.update(piece)
    file.seek(0)
    return hasher.hexdigest() == ref.blake3


def _evict(file: _File) -> bool:
    """Delete a file, unless it is being filled."""
    try:
        if not file.is_partial:
            file.path.unlink()
            return True
        with _open(file.path, os.O_RDWR, "r+b") as partial:
            fcntl.flock(partial.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(partial, file.path):
                file.path.unlink()
            return True
    except FileNotFoundError:
        return True  # evicted by another, or finished: then it counts again next time
    except OSError:
        return False


def _open(path: Path, flags: int, mode: str) -> BinaryIO:
    """Without following links; unbuffered."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, mode, buffering=0)  # type: ignore[return-value]


def pieces_of(file: BinaryIO) -> Iterator[bytes]:
    """The file's bytes from where it stands."""
    while piece := file.read(READ_BYTES):
        yield piece
