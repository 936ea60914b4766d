"""Writing and reading blobs: sizes and BLAKE3 are checked on every read."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Protocol, runtime_checkable

from blake3 import blake3

from stitch.board.stores.creation import Patience
from stitch.board.stores.store import ObjectStore
from stitch.board.stores.store_errors import ObjectTooLargeError
from stitch.board.transfers.transfer import PIECE_BYTES, read_ahead
from stitch.errors import CorruptBlobError, PublishConflictError
from stitch.records import BlobRef

HASH_CHUNK_BYTES = 4 * 2**20


def put_blob(
    store: ObjectStore, key: str, name: str, source: bytes | Path, patience: Patience
) -> BlobRef:
    """Create the blob `key` from memory or a file, visible and durable when this returns.

    Nobody else may be writing this key: its name is the attempt's, or its content's.

    A key that already holds the same content counts as written (the reply may have been lost);
    PublishConflictError if it holds anything else.
    """
    ref = ref_of(name, source)
    if not store.put(key, source, mode="unique"):
        try:
            check_blob(store, key, ref, patience)
        except CorruptBlobError as error:
            raise PublishConflictError(f"another writer's blob is in the way: {error}") from error
    return ref


def ref_of(name: str, source: bytes | Path) -> BlobRef:
    hasher = blake3()
    num_bytes = 0
    if isinstance(source, bytes):
        hasher.update(source)
        num_bytes = len(source)
    else:
        with source.open("rb") as file:
            while chunk := file.read(HASH_CHUNK_BYTES):
                hasher.update(chunk)
                num_bytes += len(chunk)
    return BlobRef(name=name, num_bytes=num_bytes, blake3=hasher.hexdigest())


def read_blob(store: ObjectStore, key: str, ref: BlobRef, patience: Patience) -> bytes:
    """The blob's bytes. CorruptBlobError names the key if they are not the ones in `ref`.

    A blob that a record names exists, so one that cannot be seen is waited for, within bounds.
    """
    with closing(open_blob(store, key, ref, patience)) as pieces:
        return b"".join(checked(key, ref, pieces))


def check_blob(store: ObjectStore, key: str, ref: BlobRef, patience: Patience) -> None:
    """CorruptBlobError unless the stored blob is the one in `ref`. Reads it, in pieces, from the
    store itself."""
    with closing(open_stored_blob(store, key, ref, patience)) as pieces:
        for _ in checked(key, ref, pieces):
            pass


@runtime_checkable
class OpensBlobs(Protocol):
    """A store that has a way of its own to a blob's bytes: over a cache."""

    def open_blob(
        self, key: str, ref: BlobRef, patience: Patience, start: int
    ) -> Generator[bytes]: ...


def open_blob(
    store: ObjectStore, key: str, ref: BlobRef, patience: Patience, start: int = 0
) -> Generator[bytes]:
    """The blob's bytes from `start` on, in pieces; over the store's cache if it has one.

    CorruptBlobError, at once or with the first piece, if it has another size than `ref` says, or
    stays absent. Close the iterator to stop.
    """
    if isinstance(store, OpensBlobs):
        return store.open_blob(key, ref, patience, start)
    return open_stored_blob(store, key, ref, patience, start)


def open_stored_blob(
    store: ObjectStore, key: str, ref: BlobRef, patience: Patience, start: int = 0
) -> Generator[bytes]:
    """The blob's bytes from `start` on, in pieces that are fetched ahead in parallel.

    CorruptBlobError if it has another size than `ref` says, or stays absent.
    """
    for _ in patience.tries():
        pieces = _pieces(store, key, ref, start)
        if pieces is not None:
            return pieces
    raise missing(key)


def _pieces(store: ObjectStore, key: str, ref: BlobRef, start: int) -> Generator[bytes] | None:
    if ref.num_bytes > PIECE_BYTES:
        info = store.head(key)
        if info is None:
            return None
        check_size(key, info.num_bytes, ref)
        return read_ahead(
            lambda begin, size: store.get_range(key, begin, size), start, ref.num_bytes, key
        )
    try:
        data = store.get(key, max_bytes=ref.num_bytes)
    except ObjectTooLargeError as error:
        raise CorruptBlobError(str(error)) from None
    if data is None:
        return None
    check_size(key, len(data), ref)
    return (piece for piece in (data[start:],))


def checked(key: str, ref: BlobRef, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Pass the pieces of a whole blob on, and raise CorruptBlobError at their end if they are not
    what `ref` names."""
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
        yield piece
    check_hash(key, hasher.hexdigest(), ref)


def require_blob(store: ObjectStore, key: str, ref: BlobRef, patience: Patience) -> None:
    """CorruptBlobError unless a blob of the right size is there. Reads nothing."""
    for _ in patience.tries():
        info = store.head(key)
        if info is not None:
            check_size(key, info.num_bytes, ref)
            return
    raise missing(key)


def check_size(key: str, num_bytes: int, ref: BlobRef) -> None:
    if num_bytes != ref.num_bytes:
        raise CorruptBlobError(f"{key} has {num_bytes} bytes, wanted {ref.num_bytes}")


def check_hash(key: str, found: str, ref: BlobRef) -> None:
    if found != ref.blake3:
        raise CorruptBlobError(f"{key} has BLAKE3 {found}, wanted {ref.blake3}")


def missing(key: str) -> CorruptBlobError:
    return CorruptBlobError(f"{key} is named by a record, but the store does not have it")
