"""Proving at the start that a store keeps create-if-absent. Everything else rests on that.

Some stores ignore the condition and overwrite; some check it first and write afterwards, which
holds until two writers come at the same time. Both are tried, on keys that nothing else uses.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from stitch.board.keys import PROBE_FOLDER
from stitch.board.stores.creation import Patience
from stitch.board.stores.store import ObjectStore
from stitch.errors import StoreError, StoreFullError, StoreUnsuitableError

log = logging.getLogger("stitch.board")

NUM_RACES = 3
_MAX_BYTES = 64
_START_S = 30.0


def probe_create_if_absent(store: ObjectStore, patience: Patience | None = None) -> None:
    """Raise StoreUnsuitableError unless `store` keeps create-if-absent, one after the other and
    between two racing writers; StoreError if it gives no usable answer."""
    waits = patience or Patience()
    _settle(lambda: _probe_in_turn(store), waits)
    for _ in range(NUM_RACES):
        _settle(lambda: _probe_race(store), waits)


def _settle(probe: Callable[[], bool], patience: Patience) -> None:
    """Probe until an answer is certain. One that got lost says nothing about the store."""
    problem: StoreError = StoreError("the store lost the probe's object, or answers about it")
    for _ in patience.tries():
        try:
            if probe():
                return
        except StoreFullError:
            raise
        except StoreError as error:
            problem = error
            log.warning("event=probe_retried error=%s", error)
    raise problem


def _probe_in_turn(store: ObjectStore) -> bool:
    """Two creates of one key, one after the other: the second one must be refused."""
    with probe_key(store) as key:
        first = store.put(key, b"first", mode="create")
        second = store.put(key, b"second", mode="create")
        found = store.get(key, max_bytes=_MAX_BYTES)
        _judge(store, "one after the other", {b"first": first, b"second": second}, found)
        # "Taken" at the first create, or nothing to read: a lost reply, or another write under
        # way. Not certain.
        return first and found is not None


def _probe_race(store: ObjectStore) -> bool:
    """Two creates of one key at the same time: exactly one must win, and its bytes must stay."""
    bodies = [b"racer 0", b"racer 1"]
    start = threading.Barrier(len(bodies))

    def create(body: bytes) -> bool:
        start.wait(timeout=_START_S)
        return store.put(key, body, mode="create")

    with probe_key(store) as key, ThreadPoolExecutor(len(bodies), "stitch-probe") as pool:
        racers = [pool.submit(create, body) for body in bodies]
        won = [racer.result() for racer in racers]
        found = store.get(key, max_bytes=_MAX_BYTES)
        _judge(store, "at the same time", dict(zip(bodies, won, strict=True)), found)
        return any(won) and found is not None


def _judge(store: ObjectStore, how: str, told: dict[bytes, bool], found: bytes | None) -> None:
    """Raise StoreUnsuitableError if two were told that they won, or the winner's bytes are gone."""
    winners = [body for body, has_won in told.items() if has_won]
    if len(winners) > 1 or (winners and found not in (winners[0], None)):
        raise _unsuitable(store, how, len(winners), found)


def _unsuitable(
    store: ObjectStore, how: str, num_accepted: int, found: bytes | None
) -> StoreUnsuitableError:
    return StoreUnsuitableError(
        f"the store at {store.url} does not keep create-if-absent: of two creates of one key, "
        f"{how}, it accepted {num_accepted} and kept {found!r}, wanted one accepted and kept; two "
        "publishers could overwrite each other there"
    )


@contextmanager
def probe_key(store: ObjectStore) -> Iterator[str]:
    """A key that nobody else knows, free again at the end."""
    key = f"{PROBE_FOLDER}/{secrets.token_hex(16)}"
    try:
        yield key
    finally:
        try:
            store.delete(key)
        except StoreError as error:
            log.warning("event=probe_left_behind key=%s error=%s", key, error)
