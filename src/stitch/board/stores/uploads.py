"""Large uploads: parallel parts, and a look at what the store made of them."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.store import ObjectStore as Backend

from stitch.errors import StoreError

if TYPE_CHECKING:
    from stitch.board.stores.store import ObjectStore

UPLOAD_CHUNK_BYTES = 8 * 2**20
UPLOAD_CONCURRENCY = 4
"""Parts that are under way at the same time; each is held in memory once."""

SAMPLE_BYTES = 4096


def upload_in_parts(backend: Backend, key: str, source: bytes | Path) -> None:
    """Put `source` in parts that go up in parallel; the object appears whole, at the end."""
    obstore.put(
        backend,
        key,
        source,
        mode="overwrite",
        use_multipart=True,
        chunk_size=UPLOAD_CHUNK_BYTES,
        max_concurrency=UPLOAD_CONCURRENCY,
    )


def check_upload(store: ObjectStore, key: str, source: bytes | Path) -> None:
    """Compare a few KiB of each part, and the end, with what was sent; StoreError if they differ.

    Stores have lost whole parts while they reported the full size. The wrong object is deleted, so
    that the next try finds its key free. Costs one small request per part.
    """
    num_bytes = len(source) if isinstance(source, bytes) else source.stat().st_size
    starts = range(0, num_bytes, UPLOAD_CHUNK_BYTES)

    def is_right(start: int) -> bool:
        stop = min(start + UPLOAD_CHUNK_BYTES, num_bytes)
        if stop == num_bytes:
            begin = max(start, stop - SAMPLE_BYTES)  # shows that nothing is missing at the end
            return store.get_range(key, begin, SAMPLE_BYTES + 1) == _sent(source, begin, stop)
        begin = random.randrange(start, max(start + 1, stop - SAMPLE_BYTES))
        wanted = _sent(source, begin, min(begin + SAMPLE_BYTES, stop))
        return store.get_range(key, begin, len(wanted)) == wanted

    with ThreadPoolExecutor(UPLOAD_CONCURRENCY, thread_name_prefix="stitch-check") as pool:
        wrong = [number for number, right in enumerate(pool.map(is_right, starts)) if not right]
    if wrong:
        store.delete(key)
        raise StoreError(
            f"{key}: of the {len(starts)} parts that were uploaded the store shows other bytes in "
            f"number {', '.join(map(str, wrong[:10]))}; what it made of them was deleted"
        )


def _sent(source: bytes | Path, start: int, stop: int) -> bytes:
    if isinstance(source, bytes):
        return source[start:stop]
    with source.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)
