"""Versions whose patches the source's retention removed: their manifests come without blobs."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from stitch.board import keys
from stitch.board.keeping.retired import Retention, read_retention

if TYPE_CHECKING:
    from stitch.board.board import Board
    from stitch.board.log import Run


class RemovedPatches:
    """Says which patches need not be copied, and tells the target's readers before. Thread-safe."""

    def __init__(self, source: Run, target: Board) -> None:
        self._source = source
        self._store = target.store
        self._lock = threading.Lock()
        self._theirs: Retention | None = None
        self._told: Retention | None = None
        self._has_looked = False

    def covers(self, version: int, *, look_again: bool = False) -> bool:
        """Whether the patch to `version` is gone, or about to go, by the source's retention.

        When this says so, the target's `retention.json` says it too.
        """
        with self._lock:
            if look_again or not self._has_looked:
                self._theirs = self._source.retention()
                self._has_looked = True
            if self._theirs is None or self._theirs.has_patch(version):
                return False
            if self._told is None or self._told.has_patch(version):
                self._told = self._tell(self._theirs)
            return True

    def _tell(self, theirs: Retention) -> Retention:
        ours = read_retention(self._store, self._source.name)
        both = theirs if ours is None else joined(ours, theirs)
        if both != ours:
            key = keys.retention(self._source.name)
            self._store.put(key, both.to_json_bytes(), mode="overwrite")
        return both


def joined(ours: Retention, theirs: Retention) -> Retention:
    """What is left where both have removed something: patches that neither has removed."""
    first = max(ours.first, theirs.first)
    kept = []
    for low, high in _kept_through(ours, first):
        for other_low, other_high in _kept_through(theirs, first):
            if max(low, other_low) <= min(high, other_high):
                kept.append((max(low, other_low), min(high, other_high)))
    if first == ours.first and tuple(kept) == ours.kept:
        return ours
    return Retention(
        run=ours.run,
        first=first,
        kept=tuple(kept),
        created_unix_s=time.time(),
        writer=theirs.writer,
    )


def _kept_through(retention: Retention, last: int) -> list[tuple[int, int]]:
    """Ranges of versions up to `last` whose patches are kept."""
    after = [(retention.first + 1, last)] if retention.first < last else []
    return [*retention.kept, *after]
