"""Epochs: who may publish. `epochs/<n>.json` is created, never changed; the highest number wins.

No clock is involved: a publisher is fenced off by the existence of a higher number.
"""

from __future__ import annotations

import logging
import threading
import time

from stitch.board import keys
from stitch.board.process import is_gone, this_process
from stitch.board.sequence import last_in_sequence
from stitch.board.stores.creation import Patience, create_record
from stitch.board.stores.store import ObjectStore
from stitch.errors import CorruptRecordError, UnsupportedFormatError
from stitch.records import EpochRecord
from stitch.types import MAX_VERSION

log = logging.getLogger("stitch.board")

MAX_EPOCH_BYTES = 2**20
MAX_LOOKED_BACK = 64
"""Epochs, of other runs mostly, that are read to find the last one of a run."""


class Epochs:
    """The epochs of one board. Thread-safe."""

    def __init__(self, store: ObjectStore, patience: Patience) -> None:
        self._store = store
        self._patience = patience
        self._lock = threading.Lock()
        self._records: dict[int, EpochRecord] = {}
        self._highest = 0

    def current(self, after: int = 0) -> EpochRecord | None:
        """The highest epoch, or None if none began. One request if `after` still is the highest.

        A damaged epoch record keeps its number but names nobody: the one below it counts.
        """
        with self._lock:
            known = max(after, self._highest)
        number = last_in_sequence(self._exists, known, limit=MAX_VERSION)
        with self._lock:
            if number > after:
                self._highest = max(number, self._highest)
        while number > 0:
            record = self._read(number)
            if record is not None:
                return record
            number -= 1
        return None

    def begin(self, run: str, writer: str) -> EpochRecord:
        """Create the next epoch for `run` and `writer`, above every epoch there is."""
        number = last_in_sequence(self._exists, self._highest, limit=MAX_VERSION)
        while True:
            number += 1
            record = EpochRecord(
                epoch=number,
                run=run,
                writer=writer,
                created_unix_s=time.time(),
                process=this_process(),
            )
            key = keys.epoch(number)
            data = record.to_json_bytes()
            EpochRecord.parse(data, key)
            if create_record(self._store, key, data, self._patience) is None:
                with self._lock:
                    self._records[number] = record
                    self._highest = max(self._highest, number)
                log.info("event=epoch_began epoch=%d run=%s writer=%s", number, run, writer)
                return record

    def end(self, record: EpochRecord) -> None:
        """Say that `record`'s publisher is done: the next one needs no fence against it."""
        key = keys.epoch_end(record.epoch)
        create_record(self._store, key, record.to_json_bytes(), self._patience)

    def is_over(self, run: str, before: int, published: int) -> bool:
        """Whether no publisher of an epoch of `run` below `before` can publish any more.

        True only where that is sure. `published` is the epoch of the newest version: its publisher
        had seen to it that all before were over. A publisher is over if it said so, or if its
        process is gone.
        """
        for number in range(before - 1, max(0, before - 1 - MAX_LOOKED_BACK), -1):
            record = self._read(number)
            if record is None:
                return False  # damaged: whose it was is not known
            if record.run != run:
                continue
            if self._has_ended(record):
                return True
            if not is_gone(record.process):
                return False
            if number <= published:
                return True
        return before - 1 <= MAX_LOOKED_BACK

    def _has_ended(self, record: EpochRecord) -> bool:
        key = keys.epoch_end(record.epoch)
        try:
            data = self._store.get(key, max_bytes=MAX_EPOCH_BYTES)
            return data is not None and EpochRecord.parse(data, key) == record
        except (CorruptRecordError, UnsupportedFormatError) as error:
            log.warning("event=damaged_epoch_end key=%s error=%s", key, error)
            return False

    def _exists(self, number: int) -> bool:
        with self._lock:
            if number in self._records:
                return True
        key = keys.epoch(number)
        try:
            data = self._store.get(key, max_bytes=MAX_EPOCH_BYTES)
            if data is None:
                return False
            record = EpochRecord.parse(data, key)
            if record.epoch != number:
                raise CorruptRecordError(f"{key}: field epoch is {record.epoch}, wanted {number}")
        except CorruptRecordError as error:
            # Not remembered: if only the answer was damaged, the next one shows who it is.
            log.warning("event=damaged_epoch key=%s error=%s", key, error)
            return True
        with self._lock:
            self._records[number] = record
        return True

    def _read(self, number: int) -> EpochRecord | None:
        self._exists(number)
        with self._lock:
            return self._records.get(number)
