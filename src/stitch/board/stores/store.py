"""The port to an object store, and its implementation over obstore.

Errors of the store are translated here (see `store_errors`): no message of ours carries an
address, a credential, a query string or obstore's own dump of an error.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import MemoryStore
from obstore.store import ObjectStore as Backend

from stitch.board.stores.store_errors import (
    ObjectTooLargeError,
    check_absence,
    http_status,
    translated,
)
from stitch.board.stores.uploads import UPLOAD_CHUNK_BYTES, check_upload, upload_in_parts
from stitch.errors import StoreUnsuitableError

PutMode = Literal["create", "overwrite", "unique"]


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """What a store says about an object. Times are by the store's clock."""

    key: str
    num_bytes: int
    modified_unix_s: float | None = None


class ObjectStore(Protocol):
    """A flat map from keys to immutable bytes. All methods may be called from any thread.

    Every method raises StoreError (retryable), StoreFullError or StoreUnsuitableError; the last
    one in a process that was forked after obstore was used, whose threads did not come along.
    """

    @property
    def url(self) -> str:
        """Where the store is, without credentials."""
        ...

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        """The object's bytes, or None if there is no such object.

        ObjectTooLargeError, before anything is read, if it is larger than `max_bytes`.
        """
        ...

    def get_range(self, key: str, start: int, num_bytes: int) -> bytes | None:
        """Bytes [start, start + num_bytes), cut short at the object's end; None if absent."""
        ...

    def head(self, key: str) -> ObjectInfo | None:
        """Size of the object, or None if there is no such object."""
        ...

    def put(self, key: str, source: bytes | Path, *, mode: PutMode) -> bool:
        """Write the object whole or not at all, from memory or from a file.

        "create" is decided by the store: of racing writers one wins. "unique" is for keys that
        nobody else writes; large objects then go up in parallel parts, and only a key that was
        taken before is sure to be noticed. "overwrite" replaces what is there.

        True: it is visible to every reader from now on and as durable as the store makes things.
        False: the mode is not "overwrite" and the key was taken; what holds it is visible and
        durable. After StoreError it may be there or not.
        """
        ...

    def list_objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects under the folder `prefix`, in no particular order."""
        ...

    def list_folders(self, prefix: str) -> list[str]:
        """Names of the folders directly under the folder `prefix` ("" for the root)."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; nothing happens if there is none."""
        ...


class StoreOver:
    """An ObjectStore that does as `inner` does, to be changed in part."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner

    @property
    def url(self) -> str:
        return self._inner.url

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        return self._inner.get(key, max_bytes=max_bytes)

    def get_range(self, key: str, start: int, num_bytes: int) -> bytes | None:
        return self._inner.get_range(key, start, num_bytes)

    def head(self, key: str) -> ObjectInfo | None:
        return self._inner.head(key)

    def put(self, key: str, source: bytes | Path, *, mode: PutMode) -> bool:
        return self._inner.put(key, source, mode=mode)

    def list_objects(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._inner.list_objects(prefix)

    def list_folders(self, prefix: str) -> list[str]:
        return self._inner.list_folders(prefix)

    def delete(self, key: str) -> None:
        self._inner.delete(key)


_used = False
_lost_by_fork = False


def _after_fork() -> None:
    global _lost_by_fork
    _lost_by_fork = _lost_by_fork or _used


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def operation(verb: str, key: str) -> Iterator[None]:
    """Around every use of obstore: refuses where it would hang for ever, translates its errors."""
    global _used
    if _lost_by_fork:
        raise StoreUnsuitableError(
            f"cannot {verb} {key}: this process was forked from one that had used a board, and the "
            "store's threads stayed there; start it with the 'spawn' method, or fork earlier"
        )
    _used = True
    with translated(verb, key):
        yield


class ObstoreStore:
    """An ObjectStore over any obstore backend."""

    def __init__(self, backend: Backend, url: str) -> None:
        self._backend = backend
        self._url = url

    @property
    def url(self) -> str:
        return self._url

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        with operation("read", key):
            try:
                found = obstore.get(self._backend, key)
            except FileNotFoundError as error:
                check_absence(error, "read", key)
                return None
            if found.meta["size"] > max_bytes:
                raise ObjectTooLargeError(
                    f"{key} has {found.meta['size']} bytes, wanted at most {max_bytes}"
                )
            return bytes(found.bytes())

    def get_range(self, key: str, start: int, num_bytes: int) -> bytes | None:
        with operation("read", key):
            try:
                if num_bytes <= 0:
                    return None if self.head(key) is None else b""
                found = obstore.get(
                    self._backend, key, options={"range": (start, start + num_bytes)}
                )
                return bytes(found.bytes())
            except FileNotFoundError as error:
                check_absence(error, "read", key)
                return None
            except BaseError as error:
                # No byte of the object is in the range: stores answer that with an error.
                if http_status(error) not in (None, 416):
                    raise
                info = self.head(key)
                if info is not None and start < info.num_bytes:
                    raise
                return None if info is None else b""

    def head(self, key: str) -> ObjectInfo | None:
        with operation("look up", key):
            try:
                meta = obstore.head(self._backend, key)
            except FileNotFoundError as error:
                check_absence(error, "look up", key)
                return None
            return _info(key, meta)

    def put(self, key: str, source: bytes | Path, *, mode: PutMode) -> bool:
        with operation("write", key):
            if mode != "create" and _size(source) > UPLOAD_CHUNK_BYTES:
                return self._put_parts(key, source, mode)
            once: Literal["create", "overwrite"] = "overwrite" if mode == "overwrite" else "create"
            try:
                # One request, which the store decides on.
                obstore.put(self._backend, key, source, mode=once, use_multipart=False)
            except AlreadyExistsError:
                return False
            return True

    def _put_parts(self, key: str, source: bytes | Path, mode: PutMode) -> bool:
        if mode == "unique" and self.head(key) is not None:
            return False
        try:
            upload_in_parts(self._backend, key, source)
        except BaseError:
            # The reply to the last request may have been lost; asked again, stores deny to know
            # the upload. Under a unique key, what is there and passes the check is ours.
            if mode != "unique" or self.head(key) is None:
                raise
        check_upload(self, key, source)
        return True

    def list_objects(self, prefix: str) -> Iterator[ObjectInfo]:
        with operation("list", prefix):
            for batch in obstore.list(self._backend, prefix):
                for meta in batch:
                    yield _info(meta["path"], meta)

    def list_folders(self, prefix: str) -> list[str]:
        with operation("list", prefix):
            found = obstore.list_with_delimiter(self._backend, prefix or None)
            return sorted(path.rsplit("/", 1)[-1] for path in found["common_prefixes"])

    def delete(self, key: str) -> None:
        with operation("delete", key):
            try:
                obstore.delete(self._backend, key)
            except FileNotFoundError:
                return


def _info(key: str, meta: obstore.ObjectMeta) -> ObjectInfo:
    modified_unix_s = meta["last_modified"].timestamp()
    return ObjectInfo(key=key, num_bytes=meta["size"], modified_unix_s=modified_unix_s)


def _size(source: bytes | Path) -> int:
    return len(source) if isinstance(source, bytes) else source.stat().st_size


_memory_stores: dict[str, ObstoreStore] = {}
_memory_lock = threading.Lock()


def memory_store(name: str) -> ObstoreStore:
    """The in-memory store `name` of this process, made on first use. For tests and trials."""
    with _memory_lock:
        if name not in _memory_stores:
            _memory_stores[name] = ObstoreStore(MemoryStore(), f"memory://{name}")
        return _memory_stores[name]
