"""Heartbeats: one small object per replica, overwritten with every beat."""

from __future__ import annotations

import logging

from stitch.board import keys
from stitch.board.stores.store import ObjectStore
from stitch.errors import CorruptRecordError, StoreError, UnsupportedFormatError
from stitch.records import Heartbeat

log = logging.getLogger("stitch.board")

MAX_HEARTBEAT_BYTES = 2**20


def put_heartbeat(store: ObjectStore, run: str, beat: Heartbeat) -> None:
    key = keys.heartbeat(run, beat.replica)
    data = beat.to_json_bytes()
    Heartbeat.parse(data, key)
    store.put(key, data, mode="overwrite")


def heartbeats(store: ObjectStore, run: str) -> list[Heartbeat]:
    """The last beat of every replica, sorted by id; ones that cannot be read are left out."""
    found = []
    for info in store.list_objects(keys.heartbeats_folder(run)):
        beat = _read(store, info.key)
        if beat is not None:
            found.append(beat)
    return sorted(found, key=lambda beat: beat.replica)


def _read(store: ObjectStore, key: str) -> Heartbeat | None:
    try:
        data = store.get(key, max_bytes=MAX_HEARTBEAT_BYTES)
        if data is None:
            return None
        beat = Heartbeat.parse(data, key)
        if not key.endswith(f"/{beat.replica}.json"):
            raise CorruptRecordError(f"{key}: field replica is {beat.replica!r}")
        return beat
    except (CorruptRecordError, UnsupportedFormatError, StoreError) as error:
        log.warning("event=heartbeat_ignored error=%s", error)
        return None


def delete_heartbeat(store: ObjectStore, run: str, replica: str) -> None:
    store.delete(keys.heartbeat(run, replica))
