"""Reading the records that are hints. Nothing depends on them: what is wrong with one is logged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

from stitch.board.stores.store import ObjectStore
from stitch.errors import CorruptRecordError, StoreError, UnsupportedFormatError

log = logging.getLogger("stitch.board")


class Hint(Protocol):
    @property
    def run(self) -> str: ...


H = TypeVar("H", bound=Hint)


def read_hint(
    store: ObjectStore,
    key: str,
    parse: Callable[[bytes, str], H],
    *,
    run: str,
    max_bytes: int,
    level: int = logging.INFO,
) -> H | None:
    """The hint at `key`; None if it is missing, damaged, of another run or cannot be read."""
    try:
        data = store.get(key, max_bytes=max_bytes)
        if data is None:
            return None
        found = parse(data, key)
    except (StoreError, CorruptRecordError, UnsupportedFormatError) as error:
        log.log(level, "event=hint_ignored error=%s", error)
        return None
    return found if found.run == run else None
