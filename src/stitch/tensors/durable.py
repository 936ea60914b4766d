"""Files and directories that appear whole or not at all, and survive a power failure.

Everything is first written under an unguessable name beside its target, created exclusively (no
planted link is followed) and private, made durable, and then renamed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from stitch.errors import StoreFullError, UsageError
from stitch.failpoints import reach

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def replacing_file(path: Path) -> Iterator[BinaryIO]:
    """A file that takes `path`'s place when the block ends; on an error `path` stays as it was.

    Raises StoreFullError when the disk is full and UsageError when the folder is unsuitable.
    """
    temp = path.parent / _temp_name(path.name)
    with explaining(path):
        fd = os.open(
            temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            with open(fd, "wb", buffering=0) as file:
                yield file
                os.fchmod(fd, 0o666 & ~_umask())
                os.fsync(fd)
            reach("tensors.file.written")
            os.replace(temp, path)
        except BaseException:
            temp.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)
        reach("tensors.file.renamed")


@contextlib.contextmanager
def replacing_directory(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder to fill that takes `path`'s place when the block ends; on an error nothing changes.

    An existing folder that is not empty raises UsageError unless `overwrite`; then it is exchanged
    in one step and removed. Files put into the folder must be durable already.
    """
    path = path.resolve()
    check_replaceable(path, overwrite=overwrite)
    temp = path.parent / _temp_name(path.name)
    with explaining(path):
        temp.mkdir(mode=0o700, parents=False)
        try:
            yield temp
            temp.chmod(0o777 & ~_umask())
            sync_directory(temp)
            reach("tensors.directory.written")
            check_replaceable(path, overwrite=overwrite)
            _move_directory(temp, path)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            raise
        sync_directory(path.parent)
        reach("tensors.directory.renamed")
        # After an exchange this is the old content.
        shutil.rmtree(temp, ignore_errors=True)


def check_replaceable(path: Path, *, overwrite: bool) -> None:
    """Raise UsageError unless a directory may be put at `path`."""
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise UsageError(f"{path} exists and is not a directory")
    if not overwrite and any(path.iterdir()):
        raise UsageError(f"{path} exists and is not empty")


def sync_directory(path: Path) -> None:
    """Make the names inside a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def explaining(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals into errors that name `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFullError(f"cannot write {path}: {error.strerror}") from error
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def _move_directory(source: Path, target: Path) -> None:
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        _exchange(source, target)


def _exchange(source: Path, target: Path) -> None:
    """Swap two directories in one step; Linux only, and not on every file system."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = (os.fsencode(source), os.fsencode(target))
    if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(code, os.strerror(code))
        aside = target.parent / _temp_name(target.name)
        os.rename(target, aside)
        os.rename(source, target)
        os.rename(aside, source)


def _temp_name(name: str) -> str:
    return f".{name[:100]}.{secrets.token_hex(8)}.tmp"


def _umask() -> int:
    """The process's umask, read without setting it (setting is not safe among threads)."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        status = ""
    match = re.search(r"^Umask:\s*([0-7]+)", status, re.MULTILINE)
    return int(match[1], 8) if match else 0o077
