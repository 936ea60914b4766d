"""An object store that fails on demand, for tests of everything that uses a board.

    store = FaultyStore(board.store)
    store.lose_reply("manifest.json")            # the write happens, the caller gets an error
    faulty_board = Board(store)

Each fault is used up after `times` calls (None: never) on keys that contain `match`, the first
`after` such calls being let through. Faults that were added first come first. Thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stitch.board.stores.store import ObjectInfo, ObjectStore, PutMode
from stitch.board.stores.store_errors import ObjectTooLargeError
from stitch.errors import StitchError, StoreError, StoreFullError
from stitch.testing.planned import PlannedFault, Requests

Operation = Literal["get", "get_range", "head", "put", "list", "delete"]

READS: tuple[Operation, ...] = ("get", "get_range", "head")
BODIES: tuple[Operation, ...] = ("get", "get_range")
ALL: tuple[Operation, ...] = (*READS, "put", "list", "delete")

_Effect = Literal["before", "lost", "phantom", "hide", "body"]


@dataclass(kw_only=True)
class Fault(PlannedFault):
    effect: _Effect
    error: StitchError
    change: Callable[[bytes], bytes] = bytes


class FaultyStore(Requests[Fault]):
    """Wraps a store; an ObjectStore itself. `requests` lists every call as (operation, key)."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__()
        self.inner = inner

    # --- planning faults -------------------------------------------------------------------

    def fail(
        self,
        match: str = "",
        *,
        operations: tuple[Operation, ...] = ALL,
        times: int | None = 1,
        after: int = 0,
        error: StitchError | None = None,
    ) -> Fault:
        """Raise `error` (a StoreError if not given) before anything is done."""
        return self._plan(operations, match, "before", times, after, error)

    def fill_up(self, match: str = "", *, times: int | None = 1, after: int = 0) -> Fault:
        """Raise StoreFullError on writes, before anything is done."""
        error = StoreFullError("the store is full (planned fault)")
        return self._plan(("put",), match, "before", times, after, error)

    def lose_reply(self, match: str = "", *, times: int | None = 1, after: int = 0) -> Fault:
        """Do the write, then raise StoreError as if the answer had been lost."""
        return self._plan(("put", "delete"), match, "lost", times, after)

    def conflict(self, match: str = "", *, times: int | None = 1, after: int = 0) -> Fault:
        """Answer a create as if the key were taken, without writing anything."""
        return self._plan(("put",), match, "phantom", times, after)

    def hide(self, match: str = "", *, times: int | None = 1, after: int = 0) -> Fault:
        """Answer reads as if the object did not exist (yet)."""
        return self._plan(READS, match, "hide", times, after)

    def shorten(
        self, match: str = "", *, keep: int = 1, times: int | None = 1, after: int = 0
    ) -> Fault:
        """Return only the first `keep` bytes of a body, as if that were all."""
        return self._plan_body(match, lambda data: data[:keep], times, after)

    def flip(
        self, match: str = "", *, offset: int = 0, times: int | None = 1, after: int = 0
    ) -> Fault:
        """Return a body with one bit flipped in the byte at `offset` (negative: from the end)."""

        def flipped(data: bytes) -> bytes:
            altered = bytearray(data)
            if altered:
                altered[offset % len(altered)] ^= 1
            return bytes(altered)

        return self._plan_body(match, flipped, times, after)

    def replace(self, match: str, data: bytes, *, times: int | None = 1, after: int = 0) -> Fault:
        """Return `data` as the body instead of what is stored."""
        return self._plan_body(match, lambda _: data, times, after)

    def _plan_body(
        self, match: str, change: Callable[[bytes], bytes], times: int | None, after: int
    ) -> Fault:
        fault = self._plan(BODIES, match, "body", times, after)
        fault.change = change
        return fault

    def _plan(
        self,
        operations: tuple[Operation, ...],
        match: str,
        effect: _Effect,
        times: int | None,
        after: int,
        error: StitchError | None = None,
    ) -> Fault:
        if error is None:
            error = StoreError("the store did not answer (planned fault)")
        return self._add(
            Fault(
                kinds=operations,
                match=match,
                effect=effect,
                times=times,
                after=after,
                error=error,
            )
        )

    # --- the store -------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return self.inner.url

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        fault = self._enter("get", key)
        data = None if fault and fault.effect == "hide" else self.inner.get(key, max_bytes=2**62)
        data = _altered(data, fault)
        if data is not None and len(data) > max_bytes:
            raise ObjectTooLargeError(f"{key} has {len(data)} bytes, wanted at most {max_bytes}")
        return data

    def get_range(self, key: str, start: int, num_bytes: int) -> bytes | None:
        fault = self._enter("get_range", key)
        if fault and fault.effect == "hide":
            return None
        return _altered(self.inner.get_range(key, start, num_bytes), fault)

    def head(self, key: str) -> ObjectInfo | None:
        fault = self._enter("head", key)
        return None if fault and fault.effect == "hide" else self.inner.head(key)

    def put(self, key: str, source: bytes | Path, *, mode: PutMode) -> bool:
        fault = self._enter("put", key)
        if fault and fault.effect == "phantom" and mode == "create":
            return False
        written = self.inner.put(key, source, mode=mode)
        if fault and fault.effect == "lost":
            raise fault.error
        return written

    def list_objects(self, prefix: str) -> Iterator[ObjectInfo]:
        self._enter("list", prefix)
        return self.inner.list_objects(prefix)

    def list_folders(self, prefix: str) -> list[str]:
        self._enter("list", prefix)
        return self.inner.list_folders(prefix)

    def delete(self, key: str) -> None:
        fault = self._enter("delete", key)
        self.inner.delete(key)
        if fault and fault.effect == "lost":
            raise fault.error

    def _enter(self, operation: Operation, key: str) -> Fault | None:
        """Record the call and find its fault; one that strikes before the work is raised here."""
        fault = self._struck(operation, key)
        if fault is not None and fault.effect == "before":
            raise fault.error
        return fault


def _altered(data: bytes | None, fault: Fault | None) -> bytes | None:
    return data if data is None or fault is None else fault.change(data)
