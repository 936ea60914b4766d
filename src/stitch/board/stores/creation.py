"""Create-if-absent, made certain in the face of lost replies; and the bounded waits for it."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stitch.board.stores.store import ObjectStore
from stitch.errors import StoreError, StoreFullError

log = logging.getLogger("stitch.board")

MAX_RECORD_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How often, and after which waits, an operation is tried: doubling, jittered, bounded."""

    num_tries: int = 6
    first_wait_s: float = 0.05
    max_wait_s: float = 1.0
    sleep: Callable[[float], None] = time.sleep

    def tries(self) -> Iterator[int]:
        """Numbers of the tries from 1, sleeping between them."""
        wait_s = self.first_wait_s
        for number in range(1, self.num_tries + 1):
            yield number
            if number < self.num_tries:
                self.sleep(wait_s * random.uniform(0.5, 1.0))
                wait_s = min(2 * wait_s, self.max_wait_s)


def create_record(store: ObjectStore, key: str, data: bytes, patience: Patience) -> bytes | None:
    """Create `key` holding `data`. None: it does now, durably. Else: the bytes that were there.

    `data` must be unique to its writer, because equal bytes count as one's own earlier write: a
    reply can be lost after the write was done. "Taken" from a store that has nothing to show at
    the key is tried again (some stores answer so while another write is under way). StoreError
    after all tries means that the outcome is not known.
    """
    problem: StoreError | None = None
    for _ in patience.tries():
        try:
            if store.put(key, data, mode="create"):
                return None
            found = store.get(key, max_bytes=MAX_RECORD_BYTES)
            if found is not None:
                return None if found == data else found
            problem = StoreError(f"{key} is said to exist, but there is nothing to read")
        except StoreFullError:
            raise
        except StoreError as error:
            log.warning("event=create_retried key=%s error=%s", key, error)
            problem = error
    raise StoreError(f"whether {key} was created is not known: {problem}") from problem
