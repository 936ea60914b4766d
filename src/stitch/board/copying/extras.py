"""Copying what may be written at any time after a version: merged patches and anchors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from stitch.board import keys, spans
from stitch.board.copying.objects import NUM_AHEAD, Carrier, Copied
from stitch.board.keeping.retired import read_retention
from stitch.errors import (
    CorruptBlobError,
    CorruptRecordError,
    UnsupportedFormatError,
    VersionNotFoundError,
)
from stitch.records import BlobRef

if TYPE_CHECKING:
    from stitch.board.board import Board
    from stitch.board.log import Run

log = logging.getLogger("stitch.board")

_UNUSABLE = (CorruptBlobError, CorruptRecordError, UnsupportedFormatError, VersionNotFoundError)
"""What makes one of them of no use; nothing depends on it, so the others are copied."""


class Extras:
    """Merged patches and anchors of one run. Each is copied once in the life of this object, so
    that what the target's own retention removes does not come back with every round."""

    def __init__(self, source: Run, target: Board, carrier: Carrier) -> None:
        self._source = source
        self._target = target
        self._carrier = carrier
        self._settled: set[str] = set()

    def copy(self, newest: int, done: Copied) -> None:
        """Copy those of versions up to `newest` that the target lacks, by listing both boards.

        One that the target has already, from whomever, stays.
        """
        oldest = self._oldest()
        missing = [
            found
            for found in _records(self._source)
            if found[1] not in self._settled and oldest <= found[0] <= newest
        ]
        if not missing:
            return
        theirs = {info.key for info in self._target.store.list_objects(self._folder)}
        num_anchors = done.anchors
        for version, key in missing:
            if key in theirs:
                self._settled.add(key)
                continue
            try:
                is_new = self._copy_one(version, key)
            except _UNUSABLE as error:
                log.warning("event=not_copied key=%s error=%s", key, error)
                done.left_out[key] = str(error)
                continue
            self._settled.add(key)
            if key.endswith("anchor.json"):
                done.anchors += is_new
            else:
                done.merged += is_new
        if done.anchors > num_anchors:
            self._target.open_run(self._source.name).hint_at_anchors()

    def _oldest(self) -> int:
        """The oldest version that is of interest: where the target's retention has gone further
        than the source's, it has removed what it does not need."""
        ours = read_retention(self._target.store, self._source.name)
        if ours is None:
            return 0
        theirs = self._source.retention()
        return ours.first if theirs is None or theirs.first < ours.first else 0

    @property
    def _folder(self) -> str:
        return keys.versions_folder(self._source.name)

    def _copy_one(self, version: int, key: str) -> bool:
        data = self._carrier.record(key)
        refs = self._checked(version, key)
        if data is None or refs is None:
            return False  # removed meanwhile
        self._carrier.expect(refs)
        with ThreadPoolExecutor(NUM_AHEAD, thread_name_prefix="stitch-copy") as pool:
            carry: Callable[[BlobRef], None] = lambda ref: self._carrier.carry(  # noqa: E731
                keys.blob(self._source.name, version, ref.name), ref
            )
            for _ in pool.map(carry, refs):
                pass
        return self._carrier.offer(key, data) is None

    def _checked(self, version: int, key: str) -> tuple[BlobRef, ...] | None:
        """The blobs of a record that leads where it says; None if it is gone."""
        start = keys.parse_merged(key.rsplit("/", 1)[-1])
        if start is not None:
            merged = self._source.merged(start, version)
            return None if merged is None else merged.blobs
        anchor = self._source.anchor(version)
        if anchor is not None and anchor.digest != self._source.digest(version):
            raise CorruptRecordError(f"{key}: field digest is {anchor.digest}, not the version's")
        return None if anchor is None else anchor.files


def _records(run: Run) -> Iterator[tuple[int, str]]:
    """(version, key) of merged patches and anchors; the smaller objects first, by version."""
    found = []
    for info in run.board.store.list_objects(keys.versions_folder(run.name)):
        match info.key.split("/"):
            case [_, "v", folder, name]:
                version, start = keys.parse_number(folder), keys.parse_merged(name)
                if version is None:
                    continue
                if name == "anchor.json" or (start is not None and spans.is_span(start, version)):
                    found.append((name == "anchor.json", version, info.key))
    yield from ((version, key) for _, version, key in sorted(found))
