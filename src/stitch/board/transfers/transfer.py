"""Moving large objects: ranged reads in parallel, in order, with bounded memory."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor

from stitch.errors import StoreError

log = logging.getLogger("stitch.board")

PIECE_BYTES = 4 * 2**20
NUM_AHEAD = 4
"""Pieces that are fetched at the same time; with the one handed out, all that is held."""

READ_TRIES = 3
"""Tries of one piece, on top of those that the store makes by itself."""

ReadRange = Callable[[int, int], bytes | None]
"""`read(start, num_bytes)`: the bytes there, or None if the object is gone."""


def read_ahead(read: ReadRange, start: int, stop: int, what: str) -> Generator[bytes]:
    """Bytes [start, stop) of an object in pieces of at most PIECE_BYTES, in order.

    Every piece has its full length, or StoreError is raised: an answer that is short, or that
    breaks off, is asked for again, but not one that is gone. Close the iterator to stop.
    """

    def piece(begin: int) -> bytes:
        return _read_piece(read, begin, min(PIECE_BYTES, stop - begin), what)

    starts = iter(range(start, stop, PIECE_BYTES))
    with ThreadPoolExecutor(NUM_AHEAD, thread_name_prefix="stitch-read") as pool:
        waiting: deque[Future[bytes]] = deque()
        try:
            for begin in starts:
                waiting.append(pool.submit(piece, begin))
                if len(waiting) == NUM_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _read_piece(read: ReadRange, start: int, num_bytes: int, what: str) -> bytes:
    problem: StoreError | None = None
    for attempt in range(1, READ_TRIES + 1):
        try:
            data = read(start, num_bytes)
        except StoreError as error:
            problem = error
        else:
            if data is None:
                raise StoreError(f"{what} disappeared while it was read")
            if len(data) == num_bytes:
                return data
            problem = StoreError(
                f"{what}: the store sent {len(data)} bytes from {start}, wanted {num_bytes}"
            )
        log.info("event=read_retried what=%s start=%d try=%d", what, start, attempt)
    assert problem is not None
    raise problem
