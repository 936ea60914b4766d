"""`head.json`: a hint at the newest version that saves readers requests. Nothing depends on it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from stitch.board import keys
from stitch.board.hints import read_hint
from stitch.board.stores.store import ObjectStore
from stitch.errors import StoreError
from stitch.failpoints import reach
from stitch.records import Head

log = logging.getLogger("stitch.board")

MAX_HEAD_BYTES = 64 * 2**10
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0


class Heads:
    """Reads and writes the head of one run. Thread-safe."""

    def __init__(
        self, store: ObjectStore, run: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._run = run
        self._clock = clock
        self._lock = threading.Lock()
        self._pause_s = 0.0
        self._not_before_s = float("-inf")

    def version(self) -> int | None:
        """What the head says, or None if it is missing, damaged or cannot be read."""
        key, run = keys.head(self._run), self._run
        head = read_hint(self._store, key, Head.parse, run=run, max_bytes=MAX_HEAD_BYTES)
        return None if head is None else head.version

    def write(self, version: int) -> None:
        """Write the hint, once, if the store takes it.

        After a failure nothing is written for a while that doubles with each one (stores limit
        how often one key may be written); the next write then names the newest version anyway.
        """
        with self._lock:
            if self._clock() < self._not_before_s:
                return
            reach("board.head")
            try:
                data = Head(run=self._run, version=version).to_json_bytes()
                self._store.put(keys.head(self._run), data, mode="overwrite")
                self._pause_s = 0.0
            except StoreError as error:
                self._pause_s = min(MAX_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
                self._not_before_s = self._clock() + self._pause_s
                log.warning("event=head_not_written version=%d error=%s", version, error)
