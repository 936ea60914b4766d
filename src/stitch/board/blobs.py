"""Writing and reading blobs: sizes and BLAKE3 are checked on every read."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from stitch.board.creation import Patience
from stitch.board.store import ObjectStore
from stitch.board.store_errors import ObjectTooLargeError
from stitch.errors import CorruptBlobError, PublishConflictError
from stitch.records import BlobRef

HASH_CHUNK_BYTES = 4 * 2**20


def put_blob(
    store: ObjectStore, key: str, name: str, source: bytes | Path, patience: Patience
) -> BlobRef:
    """Create the blob `key` from memory or a file, visible and durable when this returns.

    A key that already holds the same content counts as written (the reply may have been lost);
    PublishConflictError if it holds anything else.
    """
    ref = ref_of(name, source)
    if not store.put(key, source, mode="create"):
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
    for _ in patience.tries():
        try:
            data = store.get(key, max_bytes=ref.num_bytes)
        except ObjectTooLargeError as error:
            raise CorruptBlobError(str(error)) from None
        if data is not None:
            check_size(key, len(data), ref)
            check_hash(key, blake3(data).hexdigest(), ref)
            return data
    raise missing(key)


def check_blob(store: ObjectStore, key: str, ref: BlobRef, patience: Patience) -> None:
    """CorruptBlobError unless the stored blob is the one in `ref`. Reads it, in pieces."""
    for _ in patience.tries():
        chunks = store.stream(key)
        if chunks is not None:
            hasher = blake3()
            num_bytes = 0
            for chunk in chunks:
                hasher.update(chunk)
                num_bytes += len(chunk)
            check_size(key, num_bytes, ref)
            check_hash(key, hasher.hexdigest(), ref)
            return
    raise missing(key)


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
