"""A store whose blobs are read over a cache that the processes of one host share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import BinaryIO

from blake3 import blake3

from stitch.board.stores.creation import Patience
from stitch.board.stores.store import ObjectStore, StoreOver
from stitch.board.transfers import blobs
from stitch.board.transfers.cache import BlobCache, Filling, pieces_of
from stitch.failpoints import reach
from stitch.records import BlobRef

log = logging.getLogger("stitch.board")

LOOK_S = 0.02
"""Between looks at an entry that another process is filling."""
STALL_S = 15.0
"""How long such a process may stand still before the blob is fetched past it."""


class CachingStore(StoreOver):
    """An ObjectStore that does as `inner` does, but for `open_blob`.

    Nothing depends on the cache: where it cannot be used, blobs are read from the store.
    """

    def __init__(
        self,
        inner: ObjectStore,
        cache: BlobCache,
        *,
        stall_s: float = STALL_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._cache = cache
        self._stall_s = stall_s
        self._sleep = sleep

    def open_blob(
        self, key: str, ref: BlobRef, patience: Patience, start: int = 0
    ) -> Generator[bytes]:
        """The blob's bytes from `start` on, in pieces: from the cache, else on their way into it.

        CorruptBlobError if the store holds another blob.
        """
        if 0 < ref.num_bytes <= self._cache.max_bytes:
            try:
                found = self._find(ref)
            except OSError as error:
                log.warning("event=cache_not_used key=%s error=%s", key, error.strerror or error)
                found = None
            if isinstance(found, Filling):
                yield from self._fill(found, key, ref, patience, start)
                return
            if found is not None:
                with found:
                    found.seek(start)
                    yield from pieces_of(found)
                return
        yield from blobs.open_stored_blob(self._inner, key, ref, patience, start)

    def _find(self, ref: BlobRef) -> BinaryIO | Filling | None:
        """The entry, or the right to fill it; None if another process has that and stands still."""
        waited_s, so_far = 0.0, -1
        while True:
            file = self._cache.open(ref)
            if file is not None:
                return file
            filling = self._cache.begin(ref)
            if filling is not None:
                return self._entry_after_all(ref, filling)
            filled = self._cache.filled_bytes(ref)
            waited_s, so_far = (waited_s if filled == so_far else 0.0), filled
            if waited_s >= self._stall_s:
                log.warning("event=cache_stalled blake3=%s num_bytes=%d", ref.blake3, filled)
                return None
            self._sleep(LOOK_S)
            waited_s += LOOK_S

    def _entry_after_all(self, ref: BlobRef, filling: Filling) -> BinaryIO | Filling:
        """The entry may have been finished between looking for it and getting the right to fill."""
        try:
            file = self._cache.open(ref)
        except BaseException:
            filling.close()
            raise
        if file is None:
            return filling
        filling.discard()
        return file

    def _fill(
        self, filling: Filling, key: str, ref: BlobRef, patience: Patience, start: int
    ) -> Generator[bytes]:
        try:
            if filling.num_bytes and self._go_on(filling, key, ref, patience):
                filling.finish()
                yield from self.open_blob(key, ref, patience, start)
                return
            hasher, at = blake3(), 0
            with closing(blobs.open_stored_blob(self._inner, key, ref, patience)) as pieces:
                for piece in pieces:
                    hasher.update(piece)
                    filling.write(piece)
                    at += len(piece)
                    if at == ref.num_bytes:
                        self._settle(filling, key, ref, hasher.hexdigest())
                    reach("cache.piece")
                    yield piece[max(0, start - (at - len(piece))) :]
        finally:
            filling.close()

    def _go_on(self, filling: Filling, key: str, ref: BlobRef, patience: Patience) -> bool:
        """Fetch what a killed process left out; False, with nothing left, if that was spoilt."""
        hasher = blake3()
        for piece in filling.begun():
            hasher.update(piece)
        log.info("event=cache_resumed key=%s start=%d", key, filling.num_bytes)
        if filling.num_bytes < ref.num_bytes:
            rest = blobs.open_stored_blob(self._inner, key, ref, patience, filling.num_bytes)
            with closing(rest) as pieces:
                for piece in pieces:
                    hasher.update(piece)
                    filling.write(piece)
        if filling.is_alive and hasher.hexdigest() != ref.blake3:
            filling.restart()
        return filling.is_alive and hasher.hexdigest() == ref.blake3

    def _settle(self, filling: Filling, key: str, ref: BlobRef, found: str) -> None:
        if found != ref.blake3:
            filling.discard()
        blobs.check_hash(key, found, ref)
        filling.finish()
