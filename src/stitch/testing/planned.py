"""What faulty stores and proxies share: requests are recorded, and planned faults strike them."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Generic, TypeVar


@dataclass(kw_only=True)
class PlannedFault:
    """Strikes what is in `kinds` (operations of a store, HTTP methods) and has `match` in its key.

    The first `after` are let through; used up after `times` (None: never). `num_hits` counts how
    often it struck.
    """

    kinds: tuple[str, ...]
    match: str
    times: int | None
    after: int
    num_hits: int = 0

    def strikes(self, kind: str, key: str) -> bool:
        if kind not in self.kinds or self.match not in key or self.times == 0:
            return False
        if self.after > 0:
            self.after -= 1
            return False
        if self.times is not None:
            self.times -= 1
        self.num_hits += 1
        return True


F = TypeVar("F", bound=PlannedFault)


class Requests(Generic[F]):
    """What was asked of a store or a proxy, and what is to go wrong. Thread-safe.

    `requests` lists (kind, key). Faults that were added first come first.
    """

    def __init__(self) -> None:
        self._faults: list[F] = []
        self._lock = threading.Lock()
        self.requests: list[tuple[str, str]] = []

    @property
    def counts(self) -> Counter[str]:
        """Number of requests by kind."""
        with self._lock:
            return Counter(kind for kind, _ in self.requests)

    @property
    def num_requests(self) -> int:
        with self._lock:
            return len(self.requests)

    def forget_requests(self) -> None:
        with self._lock:
            self.requests.clear()

    def heal(self) -> None:
        """Forget all planned faults."""
        with self._lock:
            self._faults.clear()

    def _add(self, fault: F) -> F:
        with self._lock:
            self._faults.append(fault)
        return fault

    def _struck(self, kind: str, key: str) -> F | None:
        """Record a request; the fault that strikes it, if one does."""
        with self._lock:
            self.requests.append((kind, key))
            return next((fault for fault in self._faults if fault.strikes(kind, key)), None)
